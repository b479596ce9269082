from __future__ import annotations

import json

import pytest

from deepseek_ft import ConfigError, PlanError, load_config, plan_run
from deepseek_ft.hardware import Gpu, Hardware
from deepseek_ft.planner import to_dict, warmup_steps
from deepseek_ft.shapes import PRESETS

GIB = 1024**3
CPU = Hardware(gpus=(), cores=16, host_memory_bytes=128 * GIB)


def cards(n: int, name="NVIDIA GeForce RTX 4090", gib=24) -> Hardware:
    return Hardware(tuple(Gpu(str(i), name, gib * GIB) for i in range(n)), 32, 256 * GIB)


def plan(*words, hardware=CPU, recipe="quickstart", **more):
    return plan_run(load_config(recipe, list(words)), hardware, can_build_ops=more.pop("can_build_ops", True), **more)


def refused(*words, **more) -> str:
    with pytest.raises(PlanError) as caught:
        plan(*words, **more)
    return str(caught.value)


def test_three_cpu_ranks_stand_in_for_three_cards():
    p = plan()
    assert (p.strategy.name, p.world_size, p.device, p.ops) == ("zero3", 3, "cpu", ("shm_comm",))
    p = plan(hardware=cards(3))
    assert (p.strategy.name, p.world_size, p.device, p.ops) == ("zero3", 3, "cuda", ())


def test_batch_arithmetic():
    p = plan("train.micro_batch_size=8", "train.grad_accum_steps=4", hardware=cards(3))
    assert p.global_batch_size == 96 and p.tokens_per_step == 96 * 128
    p = plan("train.micro_batch_size=2", "train.global_batch_size=12", hardware=cards(3))
    assert p.grad_accum_steps == 2 and p.global_batch_size == 12
    assert "12 or 18" in refused("train.micro_batch_size=2", "train.global_batch_size=16", hardware=cards(3))
    assert "use 6" in refused("train.micro_batch_size=2", "train.global_batch_size=4", hardware=cards(3))


def test_steps():
    p = plan("train.micro_batch_size=2", "train.grad_accum_steps=2", hardware=cards(3))
    assert p.steps_per_epoch(120) == 10 and p.steps_per_epoch(121) == 11 and p.steps_per_epoch(1) == 1
    config = load_config("quickstart", ["train.max_steps=null", "train.epochs=2.5", "optim.warmup_ratio=0.1"])
    assert p.total_steps(config, 120) == 25 and warmup_steps(config, 25) == 3
    assert p.total_steps(load_config("quickstart", ["train.max_steps=7"]), 120) == 7


def test_ranks():
    assert plan("ranks=2", hardware=cards(3)).world_size == 2
    assert "3 GPUs are visible" in refused("ranks=5", hardware=cards(3))
    assert "1 GPU is visible" in refused("ranks=2", hardware=cards(1))
    assert plan("strategy=single", hardware=cards(3)).world_size == 1
    assert "use strategy=ddp" in refused("strategy=single", "ranks=3", hardware=cards(3))
    assert plan(launched_ranks=2).world_size == 2
    assert "the launcher started 2" in refused("ranks=3", launched_ranks=2)
    assert "one process" in refused("strategy=single", launched_ranks=2)


def test_without_a_compiler():
    p = plan(can_build_ops=False)
    assert (p.strategy.name, p.world_size, p.global_batch_size, p.ops) == ("single", 1, 24, ())
    assert any("no C++ compiler" in n for n in p.notes)
    assert "apt-get install g++ python3-dev" in refused(launched_ranks=3, can_build_ops=False)
    assert "without offload" in refused("strategy=zero2_offload", hardware=cards(3), can_build_ops=False)
    assert plan("strategy=zero3", hardware=cards(3), can_build_ops=False).strategy.name == "zero3"


def test_offload_needs_its_op():
    assert plan("strategy=zero3_offload", hardware=cards(3)).ops == ("cpu_adam",)
    assert plan("strategy=zero3_offload").ops == ("shm_comm", "cpu_adam")


def test_precision():
    assert "bf16 only" in refused("strategy=zero3_bf16", "train.precision=fp16")
    assert "no fp16 on the CPU" in refused("strategy=ddp", "train.precision=fp16")
    assert "no fp16 on the CPU" in refused("strategy=zero3", "train.precision=fp16", can_build_ops=False)
    assert plan("strategy=zero2", "train.precision=fp16").deepspeed["fp16"]["enabled"] == "auto"


def test_auto_takes_the_least_sharding_whose_states_fit(monkeypatch):
    """By the states alone: PERFORMANCE tables put 7 B in AdamW mixed precision at 103 GiB, far over one card."""
    assert plan("strategy=auto", hardware=cards(3)).strategy.name == "ddp"
    assert plan("strategy=auto", hardware=cards(1)).strategy.name == "single"
    big = dict(PRESETS["tiny-llama"], hidden_size=4096, intermediate_size=11008, num_hidden_layers=30, num_attention_heads=32,
               num_key_value_heads=32, vocab_size=102400)  # fmt: skip
    monkeypatch.setitem(PRESETS, "tiny-llama", big)
    seven = ("strategy=auto", "model.path=preset:tiny-llama")
    assert plan(*seven, "train.precision=bf16", hardware=cards(8)).strategy.name == "zero3"
    assert plan(*seven, "train.precision=bf16", hardware=cards(4)).strategy.name == "zero3_bf16"
    assert plan(*seven, "train.precision=fp16", hardware=cards(3)).strategy.name == "zero3_offload"
    assert "no strategy fits" in refused(*seven, "train.precision=fp16", hardware=cards(1, gib=6))


def test_published_models_are_planned_by_their_id():
    p = plan(recipe="deepseek-llm-7b/wikitext103_full", hardware=cards(3))
    assert p.strategy.name == "zero3_offload" and p.shape.parameters == 6_910_365_696
    assert any("bf16 checkpoint" in n for n in p.notes)


def test_an_unknown_size_is_said():
    p = plan("model.path=somebody/a-model", recipe="deepseek-llm-7b/wikitext103_full", hardware=cards(3))
    assert p.strategy.name == "zero3_offload" and any("not known before its download" in n for n in p.notes)


def test_own_deepspeed_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    p = plan(f"deepspeed={file}", hardware=cards(3))
    assert (p.strategy.name, p.strategy.stage, p.strategy.offload_optimizer) == ("mine.json", 2, True)
    assert p.ops == ("cpu_adam",) and p.deepspeed["gradient_clipping"] == "auto"
    file.write_text(json.dumps({"train_batch_size": 5, "scheduler": {"type": "WarmupLR", "params": {}}}))
    with pytest.raises(ConfigError, match="5 in the file, but 24") as caught:
        plan(f"deepspeed={file}", hardware=cards(3))
    assert "WarmupLR" in str(caught.value)
    for stage in ("2.0", 2.0, "2"):
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert plan(f"deepspeed={file}", hardware=cards(3)).strategy.stage == 2
    with pytest.raises(ConfigError, match="no file"):
        plan("deepspeed=nowhere.json")
    with pytest.raises(ConfigError, match="no file"):
        plan(f"deepspeed={tmp_path}/zero3.json")  # a mistyped path is not the shipped file of that name
    with pytest.raises(ConfigError, match="5 in the file"):
        file.write_text(json.dumps({"train_batch_size": 5}))
        plan(f"deepspeed={file}", can_build_ops=False)  # also where the file would not be used in the end


def test_notes():
    def notes(*words, **more):
        return " | ".join(plan(*words, **more).notes)

    assert "never decays" in notes("optim.schedule=warmup", "optim.min_lr_ratio=0", "train.max_steps=null")
    assert "stays below its peak" in notes("train.max_steps=5")
    assert "4096 positions" in notes("data.seq_len=8192")


def test_the_plan_is_pure_and_goes_to_json():
    assert plan() == plan()
    assert json.loads(json.dumps(to_dict(plan())))["global_batch_size"] == 24
