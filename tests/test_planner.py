from __future__ import annotations

import json
import math
import re

import pytest
from conftest import ROOT

from deepseek_ft import ConfigError, PlanError, load_config, plan_run
from deepseek_ft.hardware import Gpu, Hardware, described
from deepseek_ft.planner import schedule_run, to_dict, warmup_steps

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
    assert plan("strategy=zero2", "ranks=1").ops == ("shm_comm",)  # DeepSpeed loads it there too, and would wait for a stale lock


def test_precision():
    assert "bf16 only" in refused("strategy=zero3_bf16", "train.precision=fp16")
    assert "no fp16 on the CPU" in refused("strategy=ddp", "train.precision=fp16")
    assert "no fp16 on the CPU" in refused("strategy=zero3", "train.precision=fp16", can_build_ops=False)
    assert plan("strategy=zero2", "train.precision=fp16").deepspeed["fp16"]["enabled"] == "auto"


LLM = "deepseek-llm-7b/wikitext103_full"
MODEST = ("train.precision=bf16", "train.micro_batch_size=4", "train.grad_accum_steps=8", "data.seq_len=1024")
WIDE = ("train.precision=bf16", "train.micro_batch_size=8", "train.grad_accum_steps=4", "data.seq_len=2048")
"""Activations that leave no room on the cards for the optimizer's states."""


def described_cards(n=3, gpu="rtx4090", host=256, disk=2000, cores=32, **more) -> Hardware:
    return described(Hardware((), cores, host * GIB), gpus=n, gpu=gpu, disk_gib=disk, **more)


def seven(*words, host=256, n=3, gpu="rtx4090", **more):
    auto = () if any(word.startswith("strategy=") for word in words) else ("strategy=auto",)
    return plan(*auto, *words, recipe=LLM, hardware=described_cards(n, gpu, host), **more)


def test_auto_takes_the_fastest_that_fits():
    """From the least sharding to the most, as the model grows against the cards and the host against the model."""
    small = ("strategy=auto", "train.max_steps=5")
    assert plan(*small, hardware=described_cards(1)).strategy.name == "single"
    p = plan(*small, hardware=described_cards(3))
    fitting = [c for c in p.candidates if c.fits and c.strategy.chosen and c.strategy.many_ranks]
    assert p.timing.tokens_per_second >= 0.95 * max(c.timing.tokens_per_second for c in fitting)
    one_and_a_half = seven("model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "train.precision=bf16")
    assert one_and_a_half.strategy.name == "zero1"
    assert seven(*MODEST, n=8, gpu="a100").strategy.name in ("zero1", "zero2", "pipeline")
    # Over PCIe stages beat shards: they send hidden states, once a step gradients to the host, and never weights to each other.
    for host in (256, 96):
        assert seven(*MODEST, host=host).strategy.name == seven(*WIDE, host=host).strategy.name == "pipeline_offload"
    by_name = [seven(f"strategy={name}", *MODEST) for name in ("zero2_offload", "zero3_offload", "pipeline_offload")]
    assert sorted(by_name, key=lambda p: p.timing.tokens_per_second) == [by_name[1], by_name[0], by_name[2]]
    assert sorted(by_name, key=lambda p: p.memory.host_bytes)[0] is by_name[2]
    assert seven(*MODEST, host=80).strategy.name == "pipeline_bf16"  # rounds as zero3_bf16 does, and moves a hundredth of its bytes


def test_exact_updates_come_before_rounded_ones():
    """bf16 master weights lose small updates (casebook FP-4), or move by chance: only when nothing exact fits, the harmless
    rounding before the other, and then it is said."""
    exact = seven(*MODEST)
    faster = [c for c in exact.candidates if c.fits and c.rounding != "none" and c.timing.tokens_per_second > exact.timing.tokens_per_second]
    assert exact.chosen.rounding == "none" and faster
    chance = seven(*MODEST, host=80)
    assert chance.chosen.rounding == "stochastic" and any("rounds updates stochastically" in n for n in chance.notes)
    rounded = seven(*WIDE, "strategy=zero3_offload_bf16", host=128)
    assert rounded.chosen.rounding == "plain" and any("updates smaller than" in n for n in rounded.notes)


def test_seven_billion_on_128_gib_is_refused_with_the_host_figure():
    """Issue: fp32 states with offload do not fit, and bf16 states or adapters are offered."""
    said = refused("train.precision=fp16", recipe=LLM, hardware=described_cards(host=128))
    assert re.search(r"zero3_offload +needs 1[34]\d\.\d GiB of host memory, 126\.0 of 128 are usable", said)
    assert "train.precision=bf16  (pipeline_offload, " in said and "method.kind=lora" in said  # in bf16 the states fit, in stages
    assert "yet" not in said and "--force" in said
    named = refused("train.precision=bf16", "strategy=zero3_offload", recipe=LLM, hardware=described_cards(host=128))
    assert "strategy zero3_offload does not fit" in named and "    strategy=pipeline_offload  (pipeline_offload, " in named
    assert seven(*WIDE, "strategy=zero3_offload_bf16", host=128).memory.host_bytes < 90 * GIB  # what else would, by name


def test_force_gives_a_plan_with_its_misfits():
    p = plan("train.precision=fp16", recipe=LLM, hardware=described_cards(host=128), force=True)
    assert p.misfits and p.offers and not p.chosen.fits
    assert all(o.candidate.fits for o in p.offers)


def test_offers_fit_when_they_are_taken():
    asked = ("train.precision=fp16", "train.loss=naive")
    p = plan(*asked, recipe=LLM, hardware=described_cards(host=64), force=True)
    assert len(p.offers) >= 1
    for offer in p.offers:
        changed = {word.split("=")[0] for word in offer.overrides}
        words = [word for word in asked if word.split("=")[0] not in changed] + list(offer.overrides)
        again = plan(*words, recipe=LLM, hardware=described_cards(host=64))
        assert again.chosen.fits and again.strategy == offer.candidate.strategy
        assert again.global_batch_size == p.global_batch_size


def test_the_disk_is_counted():
    said = refused(*MODEST, recipe=LLM, hardware=described_cards(disk=230))
    assert "GiB of disk, 230.0 are free" in said and "train.save_total_limit=1" in said
    assert plan(*MODEST, "train.save_steps=null", recipe=LLM, hardware=described_cards(disk=20)).chosen.fits


def test_the_disk_decides_no_strategy():
    """It changes while a run goes, and rounded states are no cure for a full disk."""
    for disk in (50, 150, 300, 2000):
        assert plan(*MODEST, recipe=LLM, hardware=described_cards(disk=disk), force=True).strategy.name == "pipeline_offload"


def test_a_pinned_strategy_gets_offers_that_keep_it():
    p = plan("strategy=zero2_offload", "train.precision=bf16", recipe=LLM, hardware=described_cards(), force=True)
    assert p.misfits and any(o.overrides[0].startswith("strategy=") for o in p.offers)
    for offer in p.offers:
        words = [w for w in ("strategy=zero2_offload", "train.precision=bf16") if w.split("=")[0] not in {o.split("=")[0] for o in offer.overrides}]
        assert plan(*words, *offer.overrides, recipe=LLM, hardware=described_cards()).strategy == offer.candidate.strategy


def test_several_hosts():
    """Six ranks on two hosts of three cards: each host holds its own ranks' share."""
    one, two = (plan(*MODEST, "strategy=zero3_offload", recipe=LLM, hardware=described_cards(3), launched_ranks=n, force=True) for n in (3, 6))
    states = ("optimizer states", "master weights", "gradients")
    assert sum(two.memory.host[k] for k in states) == pytest.approx(sum(one.memory.host[k] for k in states) / 2, rel=0.01)
    assert 0 < two.timing.mfu < 1


def test_own_files_have_deepspeeds_defaults(tmp_path):
    """What a file leaves out is not what the shipped files say."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    p = plan(f"deepspeed={file}", hardware=described_cards(3))
    buckets = 4 * 500_000_000  # one of 5e8 in fp32: overlap_comm is off below stage 3
    assert p.memory.moments["backward of layer 0, input norm"] > buckets > p.memory.moments["optimizer step"]
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}))
    p = plan(f"deepspeed={file}", "train.precision=bf16", recipe=LLM, hardware=described_cards(host=128))
    assert p.memory.host_bytes < 110 * GIB and "offloaded states" in p.memory.disk
    file.write_text(json.dumps({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}))
    assert not plan(f"deepspeed={file}", hardware=described_cards(3)).strategy.offload_optimizer


def test_old_cards_get_a_table_and_an_offer():
    p = plan("train.precision=bf16", "strategy=auto", hardware=described_cards(3, "v100"), force=True)
    assert p.chosen.forbidden and any("train.precision" in o.overrides[0] for o in p.offers)


def test_a_model_that_fits_nowhere():
    said = refused("model.path=deepseek-ai/DeepSeek-R1", "train.precision=bf16", recipe=LLM, hardware=described_cards())
    assert "No change of sequence length, micro-batch, precision or adapters fits" in said


def test_arithmetic_is_shown():
    assert "a layer for each stage: 3 layers, 4 ranks" in refused("strategy=pipeline", "train.precision=bf16", hardware=described_cards(4))
    for name in ("tensor", "sequence"):
        said = refused(f"strategy={name}", "train.precision=bf16", recipe=LLM, hardware=described_cards(3))
        assert "32 heads do not divide by 3 ranks, but by 2, 4, 8" in said
    distilled = ("strategy=tensor", "train.precision=bf16", "model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    assert "28 heads and 4 key heads do not divide by 3" in refused(*distilled, recipe=LLM, hardware=described_cards(3))
    assert plan(*distilled, recipe=LLM, hardware=described_cards(4), force=True).memory is not None
    assert "bf16 needs an Ampere card" in refused("train.precision=bf16", hardware=described_cards(3, "t4"))
    assert plan("train.precision=fp16", "strategy=auto", hardware=described_cards(3, "t4")).chosen.fits
    with pytest.raises(ConfigError, match="v_proj is no linear layer of preset:tiny-v2; it has"):
        plan("method.kind=lora", "method.targets=[q_proj, v_proj]", "model.path=preset:tiny-v2", hardware=described_cards(3))


def test_a_larger_micro_batch_is_pointed_out():
    """The batch-size pathology of the article's 23 tokens/s: one short row at a time."""
    zero3 = ("strategy=zero3_offload", "train.precision=bf16", "data.seq_len=512")  # stages mind it less
    p = seven(*zero3, "train.micro_batch_size=1", "train.grad_accum_steps=32")
    (note,) = [n for n in p.notes if "is the same batch" in n]
    micro, accumulation = re.search(r"micro_batch_size=(\d+) train.grad_accum_steps=(\d+)", note).groups()
    assert int(micro) * int(accumulation) == 32
    better = seven(*zero3, f"train.micro_batch_size={micro}", f"train.grad_accum_steps={accumulation}")
    assert better.timing.tokens_per_second > 2 * p.timing.tokens_per_second
    assert not any("is the same batch" in n for n in better.notes)


def test_published_models_are_planned_by_their_id():
    p = plan(*MODEST[1:], "train.precision=fp16", recipe=LLM, hardware=cards(3))
    assert p.strategy.name == "zero2_offload" and p.shape.parameters == 6_910_365_696
    assert any("bf16 checkpoint" in n for n in p.notes)


def test_schedule_of_a_run():
    p = seven(*MODEST)
    config = load_config(LLM, list(MODEST))
    schedule = schedule_run(p, config, 129_000_000)
    blocks = 129_000_000 // 1024
    assert schedule.steps == math.ceil(5 * math.ceil(math.ceil(math.ceil(blocks / 4) / 3) / 8)) and schedule.warmup_steps == 1000
    assert schedule.seconds == pytest.approx(schedule.steps * p.timing.step_seconds) and schedule.guessed
    assert schedule.seconds_range[0] < schedule.seconds < schedule.seconds_range[1]
    assert schedule_run(p, config, None) is None


def test_an_unknown_size_is_said():
    p = plan("model.path=somebody/a-model", recipe=LLM, hardware=cards(3))
    assert p.memory is None and p.strategy.name == "zero3_offload" and any("not known before its download" in n for n in p.notes)


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


def test_an_own_file_with_bf16_states_is_planned_as_such(tmp_path):
    file = tmp_path / "mine.json"
    ours = json.loads((ROOT / "ds_configs/zero3_bf16.json").read_text())
    file.write_text(json.dumps(ours))
    p = plan(f"deepspeed={file}", "train.precision=bf16", recipe=LLM, hardware=described_cards(8))
    shipped = plan("strategy=zero3_bf16", "train.precision=bf16", recipe=LLM, hardware=described_cards(8))
    assert p.chosen.rounding == "stochastic" and p.memory == shipped.memory
    ours["zero_optimization"]["sub_group_size"] = 1_000_000_000
    file.write_text(json.dumps(ours))
    p = plan(f"deepspeed={file}", "train.precision=bf16", recipe=LLM, hardware=described_cards(8), force=True)
    assert p.memory.moments["optimizer step"] > shipped.memory.moments["optimizer step"]


def test_notes():
    def notes(*words, **more):
        return " | ".join(plan(*words, **more).notes)

    assert "never decays" in notes("optim.schedule=warmup", "optim.min_lr_ratio=0", "train.max_steps=null")
    assert "stays below its peak" in notes("train.max_steps=5")
    assert "4096 positions" in notes("data.seq_len=8192", "train.micro_batch_size=1")


def test_the_plan_is_pure_and_goes_to_json():
    assert plan() == plan()
    assert json.loads(json.dumps(to_dict(plan())))["global_batch_size"] == 24
