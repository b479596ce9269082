from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepseek_ft import DataError
from deepseek_ft.data.blocks import build_blocks
from deepseek_ft.data.sources import Corpus

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte: what comes out can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<eos>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build(documents, seq_len, folder, fingerprint="f"):
    corpus = Corpus("test", fingerprint, lambda: iter(documents))
    return build_blocks([corpus], byte_tokenizer(), "bytes", EOS, seq_len, folder)


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(st.text(max_size=30), min_size=1, max_size=12), seq_len=st.integers(2, 17))
def test_every_token_is_in_a_block_or_reported(tmp_path_factory, documents, seq_len):
    folder = tmp_path_factory.mktemp("blocks")
    tokenizer = byte_tokenizer()
    stream = [i for d in documents for i in [*tokenizer.encode(d).ids, EOS]]
    if len(stream) < seq_len:
        with pytest.raises(DataError):
            build(documents, seq_len, folder)
        return
    blocks = build(documents, seq_len, folder)
    s = blocks.stats
    assert blocks.ids.flatten().tolist() == stream[: s.blocks * seq_len]
    assert s.tokens == len(stream) == s.blocks * seq_len + s.dropped_tokens
    assert s.dropped_tokens < seq_len and s.documents == len(documents)
    assert s.text_bytes == sum(len(d.encode()) for d in documents)


def test_blocks_run_over_the_whole_split(tmp_path):
    blocks = build(["ab"] * 2500, 64, tmp_path)  # 3 tokens each with the end of the document
    assert len(blocks) == 7500 // 64 == 117 and blocks.stats.dropped_tokens == 12
    row = blocks[3]
    assert row["input_ids"].dtype == np.int64 and (row["labels"] == row["input_ids"]).all()


def test_no_block_at_all_is_an_error_with_both_numbers(tmp_path):
    with pytest.raises(DataError, match=r"30 tokens.*data.seq_len=64"):
        build(["ab"] * 10, 64, tmp_path)
    assert not list((tmp_path / "blocks").glob("*/stats.json"))


def test_second_start_does_not_tokenise(tmp_path):
    def documents():
        opened.append(1)
        return iter(["hello world"] * 50)

    opened: list[int] = []
    for _ in range(3):
        build_blocks([Corpus("t", "f", documents)], byte_tokenizer(), "bytes", EOS, 16, tmp_path)
    assert len(opened) == 1
    build_blocks([Corpus("t", "f", documents)], byte_tokenizer(), "bytes", EOS, 17, tmp_path)
    build_blocks([Corpus("t", "other", documents)], byte_tokenizer(), "bytes", EOS, 16, tmp_path)
    build_blocks([Corpus("t", "f", documents)], byte_tokenizer(), "another tokenizer", EOS, 16, tmp_path)
    assert len(opened) == 4


def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    def documents():
        yield "hello world" * 1_000_000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_blocks([Corpus("t", "f", documents)], byte_tokenizer(), "bytes", EOS, 16, tmp_path)
    assert not [p for p in (tmp_path / "blocks").iterdir() if p.is_dir()]
    assert len(build(["hello world"] * 50, 16, tmp_path)) == 37


@pytest.mark.parametrize("damage", ["cut tokens", "no tokens", "broken stats", "empty stats", "no stats"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    whole = build(["hello world"] * 50, 16, tmp_path).ids.tolist()
    (folder,) = [p for p in (tmp_path / "blocks").iterdir() if p.is_dir()]
    tokens, stats = folder / "tokens.bin", folder / "stats.json"
    match damage:
        case "cut tokens":
            tokens.write_bytes(tokens.read_bytes()[:-10])
        case "no tokens":
            tokens.unlink()
        case "broken stats":
            stats.write_text('{"tok')
        case "empty stats":
            stats.write_text("{}")
        case "no stats":
            stats.unlink()
    assert build(["hello world"] * 50, 16, tmp_path).ids.tolist() == whole


def _build_in_a_process(folder):
    return len(build(["hello world"] * 5000, 16, folder))


def test_two_processes_build_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_build_in_a_process, [tmp_path] * 4) == [3750] * 4
    assert len([p for p in (tmp_path / "blocks").iterdir() if p.is_dir()]) == 1


def test_large_vocabularies_take_32_bits(tmp_path):
    tokenizer = byte_tokenizer()
    assert build(["x" * 40], 8, tmp_path).stats.dtype == "uint16"
    tokenizer.add_tokens([f"<{i}>" for i in range(70_000)])
    blocks = build_blocks([Corpus("t", "g", lambda: iter(["x<69999>" * 9]))], tokenizer, "big", EOS, 8, tmp_path)
    assert blocks.stats.dtype == "uint32" and blocks.ids.max() > 2**16
