"""Rows in parts, one per rank: what one process computes of whole rows."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import clean_environment, cli, train

from deepseek_ft import PlanError, load_config, plan_run
from deepseek_ft.hardware import described, probe
from deepseek_ft.report import read_metrics
from deepseek_ft.sequence import Parts


def planned(*words, recipe="deepseek-llm-7b/wikitext103_full_bf16states", gpus=2):
    config = load_config(recipe, ["strategy=sequence", "optim.name=auto", *words])
    return plan_run(config, described(probe("."), gpu="rtx4090", gpus=gpus, host_ram_gib=256, disk_gib=2000, cores=16), force=True)


def test_what_does_not_divide_is_refused_with_the_arithmetic():
    for words, gpus, says in (((), 3, "32 heads do not divide by 3 ranks, but by 2, 4, 8"),
                              (("data.seq_len=2047",), 2, "data.seq_len=2047 does not divide by 2 ranks"), ((), 1, "at least 2 ranks")):  # fmt: skip
        with pytest.raises(PlanError, match=says):
            planned(*words, gpus=gpus)
    with pytest.raises(PlanError, match="a balance loss is of whole rows"):
        planned("experts.balance_loss=0.001", recipe="deepseek-v2-lite/chat_lora")
    with pytest.raises(PlanError, match="28 heads and 4 key heads do not divide by 3 ranks, but by 2, 4"):
        planned(recipe="r1-distill-qwen-7b/chat_lora", gpus=3)


def test_two_cards_have_room_for_longer_rows_than_one():
    """The activations of a row are halved; ZeRO-3's weights are as ever."""
    long = ("data.seq_len=16384", "train.micro_batch_size=1", "model.gradient_checkpointing=true", "model.offload_activations=false")
    parts, whole = planned(*long), plan_run(load_config(
        "deepseek-llm-7b/wikitext103_full_bf16states", ["strategy=zero3", "optim.name=auto", *long]), planned().hardware, force=True)  # fmt: skip
    assert parts.memory.gpu["weights"] == whole.memory.gpu["weights"]
    saved = whole.memory.moments["loss, forward"] - parts.memory.moments["loss, forward"]
    kept = 30 * 16384 * 4096 * 2  # what enters each layer, in bf16
    assert saved > 0.5 * kept
    assert (parts.replicas, parts.micro_batches) == (1, 2 * parts.grad_accum_steps)
    assert parts.global_batch_size == whole.global_batch_size and parts.timing.step_seconds > whole.timing.step_seconds


def test_parts_of_a_batch_know_the_whole_rows_positions_and_each_tokens_next():
    class Model:
        config = type("Config", (), {"_attn_implementation": "sdpa"})()

    ids = torch.arange(16).view(2, 8)
    labels = ids.clone()
    labels[0, :3] = -100
    restarts = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    batch = {"input_ids": ids, "labels": labels, "position_ids": restarts, "cu_seq_lens_q": torch.tensor([0, 5, 8, 10, 16])}
    parts = [Parts(Model, rank, 4).of(batch) for rank in range(4)]
    assert torch.equal(torch.cat([p["input_ids"] for p in parts], 1), ids) and torch.equal(torch.cat([p["position_ids"] for p in parts], 1), restarts)
    following = torch.cat([p["shift_labels"] for p in parts], 1)
    assert torch.equal(following[:, :-1], labels[:, 1:]) and (following[:, -1] == -100).all()
    assert all(torch.equal(p["cu_seq_lens_q"], batch["cu_seq_lens_q"]) and torch.equal(p["whole_positions"], restarts) for p in parts)
    plain = Parts(Model, 1, 4).of({"input_ids": ids, "labels": labels})
    assert plain["position_ids"].tolist() == [[2, 3], [2, 3]] and plain["whole_positions"] is None


@pytest.mark.ranks
@pytest.mark.slow
def test_a_model_that_looks_its_attention_up_elsewhere_is_not_trained_on_parts(tiny_recipe, tmp_path):
    """Each rank would see its part of a row only, and learn all the same."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'worker' in sys.argv:\n    import transformers.models.llama.modeling_llama as m\n"
        "    m.ALL_ATTENTION_FUNCTIONS = type('Own', (), {'get_interface': staticmethod(lambda name, eager: eager)})()\n"
    )
    done = cli("train", tiny_recipe, "model.path=preset:tiny-llama", "strategy=sequence", "ranks=2", "train.micro_batch_size=3", cwd=tmp_path,
               env=clean_environment(PYTHONPATH=str(tmp_path)))  # fmt: skip
    assert done.returncode != 0 and "of 3 layers 0 attended to whole rows" in done.stdout, done.stdout[-3000:]


def curve(run: dict) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(run["folder"] / "metrics.jsonl") if "loss" in row]


WORDS = {
    "v3, documents apart": ("model.path=preset:tiny-v3",),
    "documents joined": ("model.path=preset:tiny-llama", "data.isolate=false"),
    "eager": ("model.path=preset:tiny-v2", "model.attention=eager"),
    "eager, documents joined": ("model.path=preset:tiny-llama", "model.attention=eager", "data.isolate=false"),
    "grouped heads": ("model.path=preset:tiny-qwen3", "train.loss=naive"),
    "lora": ("model.path=preset:tiny-v2", "method.kind=lora", "train.loss=chunked"),
    "smoothed": ("model.path=preset:tiny-llama", "train.label_smoothing=0.1"),
    "smoothed without logits": ("model.path=preset:tiny-llama", "train.label_smoothing=0.1", "train.loss=chunked"),
}
FAST = ("lora",)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in WORDS])
def test_ranks_that_share_rows_learn_what_one_process_does(name, tiny_recipe, tmp_path):
    words = WORDS[name]
    reference = train(tiny_recipe, *words, "strategy=single", "train.global_batch_size=6", cwd=tmp_path)
    run = train(tiny_recipe, *words, "strategy=sequence", "ranks=2", "train.micro_batch_size=3", cwd=tmp_path)
    assert run["tokens"] == reference["tokens"] and run["target_tokens"] == reference["target_tokens"]
    for mine, theirs in zip(curve(run), curve(reference), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert run["after"]["loss"] == pytest.approx(reference["after"]["loss"], rel=1e-5)
    assert run["engine_facts"]["zero_stage"] == 3 and run["engine_facts"]["grad_accum_steps"] == 2


@pytest.mark.ranks
@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_bit(tiny_recipe, tmp_path):
    words = ("strategy=sequence", "ranks=2", "train.micro_batch_size=3", "train.save_steps=4", "train.save_total_limit=2")
    whole = train(tiny_recipe, *words, cwd=tmp_path)
    folder, before = whole["folder"], curve(whole)
    shutil.rmtree(folder / "checkpoint-8")
    shutil.rmtree(folder / "model")
    (folder / "run.json").write_text(json.dumps({k: v for k, v in whole.items() if k != "folder"} | {"status": "running"}))
    done = cli("train", tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    again = json.loads((folder / "run.json").read_text())
    assert curve({"folder": folder}) == before and again["after"] == whole["after"]


@pytest.mark.ranks
@pytest.mark.slow
def test_in_bf16(tiny_recipe, tmp_path):
    """Beside ZeRO-3 in bf16, whose products are summed in another order."""
    words = ("train.precision=bf16", "ranks=2", "train.micro_batch_size=3", "optim.lr=1e-3")
    zero3, sequence = (train(tiny_recipe, *words, f"strategy={name}", cwd=tmp_path) for name in ("zero3", "sequence"))
    for mine, theirs in zip(curve(sequence), curve(zero3), strict=True):
        assert mine == pytest.approx(theirs, rel=5e-3)
