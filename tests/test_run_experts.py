"""Mixtures of experts through the command line: ranks that route differently, resumed, saved, and equal to one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import cli, train
from safetensors.torch import load_file, save_file

from deepseek_ft.report import read_metrics
from deepseek_ft.shapes import PRESETS

pytestmark = pytest.mark.ranks
EXPERTS = 32  # and few tokens on a rank: on every rank some experts have none
STEPS = 50


def published(kind: str, folder: Path) -> Path:
    """A random model as DeepSeek's files hold one: a tensor for each matrix of each expert, written by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = PRESETS[f"tiny-{kind}"] | {"n_routed_experts": EXPERTS, "moe_intermediate_size": 32, "vocab_size": 640,
                                       "num_hidden_layers": 2}  # fmt: skip
    config = AutoConfig.for_model(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                base = name.replace("gate_up_proj", str(i))
                gate, up = both.chunk(2)
                tensors |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            tensors |= {f"{name.replace('down_proj', str(i))}.down_proj.weight": down for i, down in enumerate(tensor)}
        elif name.endswith("gate.weight"):  # decided: no rounding of fp32 changes a choice
            tensors[name] = 10 * tensor
        else:
            tensors[name] = tensor
    folder.mkdir()
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: published(kind, folder / kind) for kind in ("v2", "v3")}


WORDS = {"v2": ("experts.balance_loss=0.02",), "v3": ("experts.balance_loss=0.02", "experts.bias_update_speed=0.001")}
ALL = ("data.seq_len=32", "data.eval=[]", f"train.max_steps={STEPS}", "train.global_batch_size=3", "optim.lr=1e-3")
ZERO3 = (*ALL, "strategy=zero3", "train.micro_batch_size=1", "train.save_steps=20", "output_dir=runs/ranks")


def logged(result: dict) -> tuple[list[dict], list[dict]]:
    rows = [m for m in read_metrics(result["folder"] / "metrics.jsonl") if "loss" in m]
    return rows, read_metrics(result["folder"] / "experts.jsonl")


@pytest.mark.parametrize("kind", ["v3", pytest.param("v2", marks=pytest.mark.slow)])
def test_ranks_that_route_differently_give_the_curve_of_one_process(kind, models, tiny_recipe, tmp_path):
    """Casebook MOE-1. Fifty steps under ZeRO-3, in each of which some expert has no token on some rank; with a balance loss,
    V3's moving bias, and from files with an expert's matrices apart, as the published ones are."""
    words = (f"model.path={models[kind]}", "model.untrained=true", *WORDS[kind])
    single = train(tiny_recipe, *words, *ALL, "strategy=single", "train.micro_batch_size=3", cwd=tmp_path, timeout=900)
    ranks = train(tiny_recipe, *words, *ZERO3, cwd=tmp_path, timeout=900)
    assert ranks["engine_facts"]["zero_stage"] == 3 and ranks["world_size"] == 3
    (expected, loads), (found, found_loads) = logged(single), logged(ranks)
    assert len(found) == len(expected) == STEPS and found[-1]["loss"] < found[0]["loss"] - 0.5
    for key, tolerance in (("loss", 1e-4), ("balance_loss", 1e-4), ("grad_norm", 1e-3)):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in expected], rel=tolerance), key
    # In every step the ranks used different experts, and no token was lost on the way.
    assert all(m["experts_idle_on_a_rank"] > m["experts_idle"] for m in found)
    assert all(m["expert_tokens_dropped"] == 0 for m in [*found, *expected])
    assert all(sum(map(sum, row["load"])) == 96 * 2 for row in found_loads)  # tokens x experts of a token
    if kind == "v3":
        assert found_loads[-1]["bias"] == loads[-1]["bias"] and found[-1]["expert_bias_max"] > 0.01

    # Resumed from step 40, the bias and all goes on as it was.
    folder = ranks["folder"]
    whole = {m["step"]: m for m in found}
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / f"checkpoint-{STEPS}", ignore_errors=True)
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {"status": "running"}))
    done = cli("train", tiny_recipe, *words, *ZERO3, "--resume", cwd=tmp_path, timeout=900)
    assert done.returncode == 0 and "checkpoint-40" in done.stdout, done.stdout[-3000:]
    again, again_loads = logged(ranks)
    for row in again:
        for key in ("loss", "balance_loss", "grad_norm", "expert_load_max"):
            assert row[key] == whole[row["step"]][key], (row["step"], key)
    assert again_loads == found_loads

    # The export holds what was trained: in fp32 the bias, and each expert's matrices under its own name.
    saved = load_file(folder / "model" / "model.safetensors")
    assert saved.keys() == load_file(models[kind] / "model.safetensors").keys()
    if kind == "v3":
        biases = [saved[f"{name}.gate.e_score_correction_bias"] for name in found_loads[-1]["layers"]]
        assert all(b.dtype is torch.float32 for b in biases) and [b.tolist() for b in biases] == found_loads[-1]["bias"]


SHORT = ("data.seq_len=32", "data.eval=[]", "train.max_steps=5", "optim.lr=1e-3", "train.global_batch_size=6", *WORDS["v3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("strategy=ddp", "train.micro_batch_size=1", "model.gradient_checkpointing=true"),
     ("strategy=zero2", "train.micro_batch_size=2"),
     ("strategy=zero3", "train.micro_batch_size=1", "model.gradient_checkpointing=true", "train.loss=chunked")],
    ids=["ddp-checkpointing-accumulated", "zero2", "zero3-checkpointing-accumulated-chunked-loss"],
)  # fmt: skip
def test_every_strategy_balances_alike(words, models, tiny_recipe, tmp_path):
    model = (f"model.path={models['v3']}", "model.untrained=true")
    single = train(tiny_recipe, *model, *SHORT, "strategy=single", "train.micro_batch_size=6", cwd=tmp_path, timeout=900)
    ranks = train(tiny_recipe, *model, *SHORT, *words, "output_dir=runs/ranks", cwd=tmp_path, timeout=900)
    (expected, loads), (found, found_loads) = logged(single), logged(ranks)
    for key in ("loss", "balance_loss", "grad_norm"):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in expected], rel=1e-4), key
    for mine, one in zip(found_loads, loads, strict=True):
        assert (mine["load"], mine["bias"]) == (one["load"], one["bias"])


@pytest.mark.slow
def test_in_bf16_the_bias_keeps_its_small_steps(models, tiny_recipe, tmp_path):
    """Under ZeRO-3 with layers computed twice, frozen routers, and a source whose other tensors must stay what they are."""
    words = (f"model.path={models['v3']}", "model.untrained=true", *SHORT[:-2], "experts.bias_update_speed=0.0001", "experts.train_router=false",
             "model.gradient_checkpointing=true", "train.precision=bf16", "strategy=zero3", "train.micro_batch_size=1")  # fmt: skip
    result = train(tiny_recipe, *words, cwd=tmp_path, timeout=900)
    rows, loads = logged(result)
    assert result["engine_facts"]["bf16"] and all(sum(row["load"][0]) == 6 * 32 * 2 for row in loads)
    assert rows[-1]["expert_bias_max"] == pytest.approx(5e-4)  # some expert was always over the mean, or under it
    saved = load_file(result["folder"] / "model" / "model.safetensors")
    source = load_file(models["v3"] / "model.safetensors")
    name = "model.layers.1.mlp.gate"
    assert saved[f"{name}.e_score_correction_bias"].dtype is torch.float32
    assert saved[f"{name}.e_score_correction_bias"].tolist() == loads[-1]["bias"][0]
    assert torch.equal(saved[f"{name}.weight"].bfloat16(), source[f"{name}.weight"].bfloat16())
    assert saved.keys() == source.keys()
    moved = [k for k in saved if "experts" in k and not torch.equal(saved[k], source[k].bfloat16())]
    assert moved


@pytest.mark.parametrize("kind", ["v3", pytest.param("v2", marks=pytest.mark.slow)])
def test_what_is_gathered_and_exported_is_bit_equal_to_what_was_read(kind, models, tiny_recipe, tmp_path):
    """With a learning rate that moves no weight, files of DeepSeek's names go through ZeRO-3 on three ranks and come back the same."""
    words = ("data.seq_len=32", "data.eval=[]", "train.max_steps=1", "optim.lr=1e-30", "train.global_batch_size=3")
    result = train(tiny_recipe, f"model.path={models[kind]}", "model.untrained=true", *words, "strategy=zero3", "train.micro_batch_size=1", cwd=tmp_path)
    saved, source = (load_file(folder / "model.safetensors") for folder in (result["folder"] / "model", models[kind]))
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) and saved[name].dtype == source[name].dtype for name in source)
