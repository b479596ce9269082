"""A stream is the cached rows without the cache: the same tokens, from any row on, for any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from conftest import cli, corpus_of, train
from test_blocks import byte_encoder

from deepseek_ft import DataError
from deepseek_ft.config import DataConfig
from deepseek_ft.data import stream as stream_module
from deepseek_ft.data.blocks import load_blocks
from deepseek_ft.data.formats import Completion
from deepseek_ft.data.stream import StreamedBlocks
from deepseek_ft.report import read_metrics

ENCODER = byte_encoder()
DOCUMENTS = [f"document {i} has {'many ' * (i % 7)}words" for i in range(60)]
PAIRS = [Completion(f"question {i} " * (i % 4), f"answer {i} " * (i % 5 + 1)) for i in range(60)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(stream_module, "_BATCH_CHARACTERS", 100)


def stream(corpora, folder, weights=(1.0,), encoder=ENCODER, **options) -> StreamedBlocks:
    data = DataConfig(train=(), **({"seq_len": 48, "shuffle_rows": 8} | options))
    return StreamedBlocks(corpora, list(weights), encoder, data, 42, encoder.eos, folder)


def rows(blocks, numbers) -> list[list[list[int]]]:
    return [[values.tolist() for values in blocks[i].values()] for i in numbers]


def counted(blocks, numbers) -> Counter:
    """Documents by their text, however they are packed: positions say where each begins."""
    found: Counter = Counter()
    for i in numbers:
        row = blocks[i]
        begins = [*np.flatnonzero(row["position_ids"] == 0), len(row["input_ids"])]
        found.update(ENCODER.decode(row["input_ids"][a:b]) for a, b in zip(begins[:-1], begins[1:], strict=True))
    return found


def test_in_order_it_gives_the_rows_of_the_cached_path_epoch_by_epoch(tmp_path):
    cached = load_blocks([corpus_of(DOCUMENTS)], [1.0], ENCODER, 48, tmp_path)
    streamed = stream([corpus_of(DOCUMENTS)], tmp_path, shuffle_rows=1)
    n = len(cached)
    assert rows(streamed, range(2 * n)) == rows(cached, range(n)) * 2


def test_shuffled_it_gives_the_same_tokens_in_another_order(tmp_path):
    cached = load_blocks([corpus_of(DOCUMENTS)], [1.0], ENCODER, 48, tmp_path)
    streamed, n = stream([corpus_of(DOCUMENTS)], tmp_path), len(cached)
    first, second = rows(streamed, range(n)), rows(streamed, range(n, 2 * n))
    assert sorted(first) == sorted(second) == sorted(rows(cached, range(n)))
    assert first != second and first != rows(cached, range(n))
    assert rows(stream([corpus_of(DOCUMENTS)], tmp_path / "again"), range(n)) == first


def test_an_epoch_of_conversations_has_each_of_them_once(tmp_path):
    streamed = stream([corpus_of(PAIRS)], tmp_path, shuffle_rows=4, seq_len=120)
    expected = Counter(f"{p.prompt}{p.completion}<eos>" for p in PAIRS)
    found, i = Counter(), 0
    while (found & expected).total() < len(PAIRS):
        found += counted(streamed, [i])
        i += 1
    assert expected <= found and i < 60
    assert not {t for t in found if t not in expected and t.replace("<eos>", "")}  # beside padding nothing else


@pytest.mark.parametrize("corpus", [DOCUMENTS, PAIRS], ids=["text", "conversations"])
def test_any_row_can_be_asked_for_first(tmp_path, corpus):
    read: list[int] = []

    def examples():
        for i, example in enumerate(corpus):
            read.append(i)
            yield example

    whole = rows(stream([corpus_of(corpus)], tmp_path / "a", seq_len=120), range(40))
    stream([corpus_of(examples)], tmp_path / "b", seq_len=120)[39]  # notes its places on the way
    for noted in (True, False):
        for first in (33, 11, 1):
            resumed = stream([corpus_of(examples)], tmp_path / ("b" if noted else f"c{first}"), seq_len=120)
            read.clear()
            assert rows(resumed, range(first, 40)) == whole[first:]
            assert rows(resumed, range(5, 9)) == whole[5:9]  # and back


def test_going_on_does_not_read_what_came_before(tmp_path):
    encoded: list[int] = []
    encoder = byte_encoder()
    real = encoder.encode
    encoder.encode = lambda examples, *rest: encoded.append(len(examples)) or real(examples, *rest)
    last = len(load_blocks([corpus_of(DOCUMENTS)], [1.0], ENCODER, 48, tmp_path)) - 1
    stream([corpus_of(DOCUMENTS)], tmp_path, encoder=encoder)[last]
    everything = sum(encoded)
    encoded.clear()
    stream([corpus_of(DOCUMENTS)], tmp_path, encoder=encoder)[last]
    assert sum(encoded) < everything / 2


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_note_is_passed_over(tmp_path, damage):
    whole = rows(stream([corpus_of(DOCUMENTS)], tmp_path), range(20))
    for place in tmp_path.glob("streams/*/[1-9]*.json"):
        text = place.read_text()
        place.write_text({"cut": text[: len(text) // 2], "empty": "", "other": '{"sources": []}'}[damage])
    assert rows(stream([corpus_of(DOCUMENTS)], tmp_path), range(15, 20)) == whole[15:]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_see_the_same_stream(tmp_path, ranks):
    whole = rows(stream([corpus_of(DOCUMENTS)], tmp_path), range(24))
    shares = [rows(stream([corpus_of(DOCUMENTS)], tmp_path), range(r, 24, ranks)) for r in range(ranks)]
    assert [shares[i % ranks][i // ranks] for i in range(24)] == whole


def test_sources_are_mixed_by_the_tokens_of_their_weights(tmp_path):
    corpora = [
        corpus_of(["a" * 39] * 10, "a", "a"),
        corpus_of(["b" * 39] * 200, "b", "b"),
        corpus_of([Completion("c", "c" * 38)] * 10, "c", "c"),
    ]
    streamed = stream(corpora, tmp_path, weights=(1.0, 0.5, 2.0))
    text = "".join(ENCODER.decode(streamed[i]["input_ids"]) for i in range(300))
    a, b, c = (text.count(letter) for letter in "abc")
    assert a / c == pytest.approx(0.5, rel=0.05) and b / a == pytest.approx(0.5, rel=0.05)


def test_what_is_longer_than_a_block_follows_the_same_rule(tmp_path):
    pairs = [Completion("q" * 60, "answer" * 10), Completion("q", "a" * 3)]
    cached = load_blocks([corpus_of(pairs)], [1.0], ENCODER, 48, tmp_path)
    assert sorted(rows(stream([corpus_of(pairs)], tmp_path), range(2))) == sorted(rows(cached, range(2)))
    dropped = stream([corpus_of(pairs)], tmp_path, overlong="drop")
    assert ENCODER.decode(dropped[0]["input_ids"][:5]) == ENCODER.decode(dropped[1]["input_ids"][:5]) == "qaaa<eos>"
    with pytest.raises(DataError, match=r"a row has 121 tokens.*data.seq_len=48"):
        stream([corpus_of(pairs)], tmp_path, overlong="error")[0]


def test_a_stream_without_a_row_ends_at_once(tmp_path):
    with pytest.raises(DataError, match="there is nothing in it"):
        stream([corpus_of([])], tmp_path)[0]
    with pytest.raises(DataError, match="nothing in it but rows that are left out"):
        stream([corpus_of([Completion("q" * 60, "a")])], tmp_path, overlong="drop")[0]
    with pytest.raises(IndexError):
        stream([corpus_of(DOCUMENTS)], tmp_path)[-1]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["single", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_run_on_a_stream_goes_on_where_it_stopped(tiny_recipe, tmp_path, strategy):
    """Under one process and under three ranks: the losses of a run that was never interrupted, step by step."""
    words = ["data.streaming=true", "data.shuffle_rows=16", f"strategy={strategy}", "train.save_steps=4"]
    folder = train(tiny_recipe, *words, cwd=tmp_path)["folder"]
    whole = [e["loss"] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e]
    assert len(whole) == 8
    for name in ("checkpoint-8", "model"):  # as a crash after step 4 leaves it
        shutil.rmtree(folder / name)
    record = json.loads((folder / "run.json").read_text()) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    done = cli("train", tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    steps = {e["step"]: e["loss"] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e}
    assert [steps[i + 1] for i in range(8)] == whole
    assert "step 5/8" in done.stdout and "step 4/8" not in done.stdout


def test_a_stream_needs_to_be_told_its_length(tiny_recipe, tmp_path):
    done = cli("train", tiny_recipe, "data.streaming=true", "train.max_steps=null", "train.epochs=1", cwd=tmp_path)
    assert done.returncode == 2 and "data.streaming needs train.max_steps" in done.stdout
