"""Layers of one process over several cards. Without cards: the placement, and the hooks between devices that are all the host."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import cli, train

from deepseek_ft import PlanError, load_config, plan_run
from deepseek_ft.hardware import described, probe
from deepseek_ft.stages import device_map


def planned(*words, recipe="deepseek-llm-7b/wikitext103_lora", gpus=3, **more):
    config = load_config(recipe, ["strategy=layer_split", *words])
    return plan_run(config, described(probe("."), gpu="rtx4090", gpus=gpus, host_ram_gib=128, disk_gib=2000), force=True, **more)


def test_every_module_has_a_card_and_layers_stay_in_order():
    found = device_map((3, 2, 2), (0, 1, 2), tied=False)
    assert [found[f"model.layers.{i}"] for i in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert (found["model.embed_tokens"], found["model.norm"], found["lm_head"]) == (0, 2, 2)
    tied = device_map((3, 2, 2), (0, 1, 2), tied=True)  # one weight lies on one card
    assert (tied["model.embed_tokens"], tied["model.norm"], tied["lm_head"]) == (0, 0, 0)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-v2", "tiny-v3"])
def test_the_map_names_every_weight_once(preset):
    from accelerate.utils import check_device_map
    from transformers import AutoConfig, AutoModelForCausalLM

    from deepseek_ft.shapes import preset_config

    numbers = preset_config(preset)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers))
    check_device_map(model, device_map((1, numbers["num_hidden_layers"] - 1), (0, 1), tied=False))


def test_one_process_holds_what_three_cards_have_room_for():
    plan = planned()
    assert (plan.world_size, plan.cards, sum(plan.stages), len(plan.stages)) == (1, 3, 30, 3)
    assert plan.micro_batches == plan.grad_accum_steps and plan.replicas == 1
    alone = plan_run(load_config("deepseek-llm-7b/wikitext103_lora", ["strategy=single"]), plan.hardware, force=True)
    assert plan.memory.gpu_bytes < 0.6 * alone.memory.gpu_bytes
    # one card at work at a time: a single card's speed, and no more
    assert 0.9 * alone.timing.tokens_per_second < plan.timing.tokens_per_second <= 1.02 * alone.timing.tokens_per_second
    assert plan.timing.mfu == pytest.approx(alone.timing.mfu / 3, rel=0.1)


def test_as_many_cards_as_said():
    assert planned("ranks=2").cards == 2 and planned("stages=[10,10,5,5]", gpus=4).stages == (10, 10, 5, 5)
    config = load_config("deepseek-llm-7b/wikitext103_lora", ["strategy=layer_split"])
    with pytest.raises(PlanError, match="several cards, and there is one"):
        plan_run(config, described(probe("."), gpu="rtx4090", gpus=1, host_ram_gib=128, disk_gib=2000))
    with pytest.raises(PlanError, match=r"stages=\[10, 10\] is not a cut of 30 layers"):
        plan_run(dataclasses.replace(config, stages=[10, 10]), planned().hardware)
    with pytest.raises(PlanError, match="is one process, but the launcher started 3"):
        planned(launched_ranks=3)


def test_the_ranks_environment_shows_all_its_cards():
    from deepseek_ft.launch import child_environment

    plan = planned("ranks=2")
    environment, notes = child_environment(load_config("quickstart"), plan, 1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1" and any("2 of 3 visible GPUs" in note for note in notes)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("words", [("model.path=preset:tiny-v2", "method.kind=lora"),
                                   pytest.param(("model.path=preset:tiny-llama", "train.precision=bf16", "model.gradient_checkpointing=true"),
                                                marks=pytest.mark.slow)], ids=["lora", "bf16"])  # fmt: skip
def test_hooks_between_runs_of_layers_change_nothing(words, tiny_recipe, tmp_path):
    """And it is saved, resumed and exported as another run. On cards it has not been run."""
    words = (*words, "train.save_steps=4", "train.loss=chunked")
    reference = train(tiny_recipe, *words, "strategy=single", "output_dir=runs/single", cwd=tmp_path)
    split = train(tiny_recipe, *words, "strategy=layer_split", "output_dir=runs/split", cwd=tmp_path)
    assert split["plan"]["stages"] == [1, 1, 1] and split["world_size"] == 1
    assert split["last_loss"] == reference["last_loss"] and split["after"] == reference["after"]
    import json
    import shutil

    folder = split["folder"]
    shutil.rmtree(folder / "checkpoint-8")
    shutil.rmtree(folder / "model")
    (folder / "run.json").write_text(json.dumps({k: v for k, v in split.items() if k != "folder"} | {"status": "running"}))
    done = cli("train", tiny_recipe, *words, "strategy=layer_split", "output_dir=runs/split", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    again = json.loads((folder / "run.json").read_text())
    assert again["after"] == reference["after"] and again["status"] == "finished"
