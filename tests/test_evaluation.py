"""Perplexity is a sum over tokens: it does not know about batches, ranks or the order of blocks."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft.evaluation import block_nll, summarise
from deepseek_ft.losses import Head

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory as bench

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def rows(targets=(15, 1, 12, 2, 14, 1, 3, 9), length=16) -> list[dict]:
    """Rows whose last so many tokens are targets (casebook PPL-1)."""
    generator = np.random.default_rng(0)
    made = []
    for k in targets:
        ids = generator.integers(0, 64, length)
        made.append({"input_ids": ids, "labels": np.where(np.arange(length) < length - k, -100, ids)})
    return made


def by_hand(model, row) -> float:
    ids, labels = (torch.from_numpy(row[k])[None] for k in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].double()
    picked = [(i, t) for i, t in enumerate(labels[0, 1:].tolist()) if t != -100]
    return sum(float(torch.logsumexp(logits[i], 0) - logits[i, t]) for i, t in picked)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 50])
def test_the_sum_does_not_depend_on_the_batch_size(model, batch_size):
    data = rows()
    found = block_nll(model, data, batch_size, CPU)
    assert found == pytest.approx([by_hand(model, r) for r in data], abs=1e-4)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_the_blocks_and_run_equally_often(model, world_size, monkeypatch):
    """Every rank calls the model as often as the others (ZeRO-3 gathers weights in each forward pass)."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda t: None)
    data, calls = rows(), []

    def counting(**kwargs):
        calls[-1] += 1
        return model(**kwargs)

    counting.eval = lambda: None
    parts = []
    for rank in range(world_size):
        calls.append(0)
        parts.append(block_nll(counting, data, 3, CPU, rank, world_size))
    assert len(set(calls)) == 1
    assert sum(parts) == pytest.approx(block_nll(model, data, 8, CPU), abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_sum_is_the_same_without_logits(model, batch_size):
    data = rows()
    assert block_nll(model, data, batch_size, CPU, head=Head(model)) == pytest.approx(
        [by_hand(model, r) for r in data], abs=1e-4
    )


def test_evaluation_never_holds_the_logits_of_a_batch():
    """16 rows of 512 tokens, eight at a time, over 32,768 ids: the logits of a batch would be 537 MB (casebook OOM-2)."""
    config = AutoConfig.for_model("llama", vocab_size=32_768, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    head, live = Head(model), bench.counter()
    with live:
        block_nll(model, rows(targets=[511] * 16, length=512), 8, CPU, head=head)
    assert live.peak < 300e6


def test_training_mode_is_put_back(model):
    model.train()
    block_nll(model, rows(), 4, CPU)
    assert model.training
    model.eval()


def test_summary_by_hand():
    class Rows(list):
        stats = SimpleNamespace(sources=["wikitext-103/test"], text_bytes=60, words=10)

    blocks = Rows({"labels": np.array(row)} for row in ([-100, 2, 3], [-100, 0, 3], [-100, -100, -100]))
    sizes = np.array([0, 9, 2, 3])  # id 0 is an end of document: scored, no bytes
    figures = summarise(np.array([3.0, 5.0, 0.0]), blocks, sizes)
    assert figures["tokens"] == 4 and figures["loss"] == 2.0
    assert figures["perplexity"] == pytest.approx(math.exp(2))
    assert figures["bits_per_byte"] == pytest.approx(8 / (2 + 3 + 0 + 3) / math.log(2))
    assert figures["word_perplexity"] == pytest.approx(math.exp(8 / 8 * 6))
    blocks.stats.sources = ["code"]
    assert "word_perplexity" not in summarise(np.array([3.0, 5.0, 0.0]), blocks, sizes)
