"""Every token is in a block or reported, whatever interrupts the work."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, clean_environment, corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepseek_ft import DataError
from deepseek_ft.config import DataConfig, SourceConfig
from deepseek_ft.data import store as store_module
from deepseek_ft.data.blocks import Blocks, collate, cut_row, load_blocks
from deepseek_ft.data.files import BadRows, LongText
from deepseek_ft.data.formats import Completion, Text
from deepseek_ft.data.sources import open_source
from deepseek_ft.data.store import build_store
from deepseek_ft.data.tokenise import Encoder

EOS = 256


def byte_encoder(more: int = 0, **options) -> Encoder:
    """One token per byte: what comes out can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<eos>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([f"<{i}>" for i in range(more)])
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"), **options)


ENCODER = byte_encoder()


def build(documents, seq_len, folder, fingerprint="f", **options) -> Blocks:
    return load_blocks([corpus_of(documents, fingerprint)], [1.0], ENCODER, seq_len, folder, **options)


def tokens_of(blocks: Blocks) -> np.ndarray:
    """What is in the blocks, without the padding, which is only at their ends."""
    rows = []
    for i, row in enumerate(blocks):
        size = sum(blocks.parts(i)[2])
        assert (row["input_ids"][size:] == blocks.pad_id).all() and (row["labels"][size:] == -100).all()
        rows.append(row["input_ids"][:size])
    return np.concatenate(rows)


def ids_of(text: str) -> list[int]:
    return ENCODER.strings([text])[0].tolist()


# ------------------------------------------------------------------------------------------------ conservation

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=12)
PAIRS = st.lists(
    st.tuples(st.text("ab ", max_size=20), st.text("cd", min_size=1, max_size=20)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(documents=TEXTS, seq_len=st.integers(2, 17), isolate=st.booleans())
def test_text_is_kept_to_the_last_token_and_in_order(tmp_path_factory, documents, seq_len, isolate):
    folder = tmp_path_factory.mktemp("blocks")
    stream = [i for d in documents for i in [*ids_of(d), EOS]]
    if len(stream) < seq_len:
        with pytest.raises(DataError, match=f"data.seq_len={seq_len}"):
            build(documents, seq_len, folder)
        return
    blocks = build(documents, seq_len, folder, isolate=isolate)
    s = blocks.stats
    assert tokens_of(blocks).tolist() == stream
    assert s.tokens == len(stream) and s.padding == len(blocks) * seq_len - len(stream) < seq_len
    assert s.documents == len(documents) and s.text_bytes == sum(len(d.encode()) for d in documents)
    assert s.cut_tokens == s.dropped_tokens == 0


@settings(max_examples=80, deadline=None)
@given(pairs=PAIRS, seq_len=st.integers(2, 30), overlong=st.sampled_from(["cut", "drop"]))
def test_conversations_are_kept_whole_or_reported(tmp_path_factory, pairs, seq_len, overlong):
    folder = tmp_path_factory.mktemp("blocks")
    examples = [Completion(*pair) for pair in pairs]
    rows = [[*ids_of(p), *ids_of(c), EOS] for p, c in pairs]
    long = [r for r in rows if len(r) > seq_len]
    if overlong == "drop" and len(long) == len(rows):
        with pytest.raises(DataError):
            build(examples, seq_len, folder, overlong=overlong)
        return
    blocks = build(examples, seq_len, folder, overlong=overlong)
    s, found = blocks.stats, Counter(tokens_of(blocks).tolist())
    whole = Counter(i for r in rows for i in r)
    assert found.total() == s.tokens and s.tokens + s.cut_tokens + s.dropped_tokens == whole.total()
    assert found <= whole  # nothing is there that was not, or more often
    if overlong == "drop":
        assert s.dropped_rows == len(long) and s.dropped_tokens == sum(map(len, long)) and s.cut_rows == 0
        assert found == Counter(i for r in rows if len(r) <= seq_len for i in r)
    else:
        assert s.cut_rows == len(long) and s.cut_tokens == sum(len(r) - seq_len for r in long)
    for i, row in enumerate(blocks):  # no conversation is split over blocks, or without a target
        at = 0
        for size in blocks.parts(i)[2]:
            assert (row["labels"][at : at + size] != -100).any() or size == 1
            assert row["position_ids"][at] == 0 and (np.diff(row["position_ids"][at : at + size]) == 1).all()
            at += size


@settings(max_examples=60, deadline=None)
@given(learnt=st.lists(st.integers(0, 1), min_size=2, max_size=60), room=st.integers(1, 40))
def test_a_cut_row_keeps_something_to_learn(learnt, room):
    learnt = np.array(learnt, np.uint8)
    if not learnt.any() or len(learnt) <= room:
        return
    a, b = cut_row(learnt, room)
    assert 0 <= a and b - a == room and b <= len(learnt) and learnt[a:b].any()
    first = int(np.argmax(learnt))
    if first <= room // 2:
        assert a == 0  # the prompt is kept from its beginning where there is room
    else:
        answer = int(np.argmin(np.append(learnt[first:], 0)))
        assert learnt[a:b].sum() >= min(answer, room - room // 2)


@pytest.mark.parametrize(
    ("weight", "texts"), [(0.5, [0, 1]), (1.0, [0, 1, 2, 3]), (1.5, [0, 1, 2, 3, 0, 1]), (2.0, [0, 1, 2, 3] * 2)]
)
def test_a_weight_repeats_a_source_or_takes_a_part_of_it(tmp_path, weight, texts):
    documents = ["aaaa", "bbbb", "cccc", "dddd"]
    blocks = load_blocks([corpus_of(documents)], [weight], ENCODER, 5, tmp_path)
    assert ENCODER.decode(tokens_of(blocks)) == "".join(documents[i] + "<eos>" for i in texts)
    pairs = [Completion("p", d) for d in documents]
    blocks = load_blocks([corpus_of(pairs, "g")], [weight], ENCODER, 6, tmp_path)
    found = Counter(ENCODER.decode(row["input_ids"]) for row in blocks)
    assert found.total() == len(texts) and sum(found.values()) * 6 == blocks.stats.tokens
    assert max(found.values()) - min(found.values()) <= 1
    assert blocks.stats.tokens + blocks.stats.dropped_tokens == max(1.0, weight) * 24


def test_a_mixture_has_the_asked_shares_and_is_the_same_every_time(tmp_path):
    corpora = [corpus_of(["a" * 99] * 30, "a", "a"), corpus_of(["b" * 99] * 30, "b", "b"),
               corpus_of([Completion("q", "c" * 98)] * 30, "c", "c")]  # fmt: skip
    made = [load_blocks(corpora, [1.0, 0.5, 2.0], ENCODER, 200, tmp_path) for _ in range(2)]
    assert made[0].stats.per_source == {"a": 3000, "b": 1500, "c": 6000}
    assert all((x["input_ids"] == y["input_ids"]).all() for x, y in zip(*made, strict=True))


# ----------------------------------------------------------------------------------------------- rows and labels


def test_the_first_token_of_a_document_is_no_target_and_its_end_is_one(tmp_path):
    blocks = build(["56", "78"], 6, tmp_path)
    (row,) = list(blocks)
    five, six, seven, eight = ids_of("5678")
    assert row["input_ids"].tolist() == [five, six, EOS, seven, eight, EOS]
    assert row["labels"].tolist() == [-100, six, EOS, -100, eight, EOS]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    joined = next(iter(build(["56", "78"], 6, tmp_path, isolate=False)))
    assert joined["labels"].tolist() == [-100, six, EOS, seven, eight, EOS] and "position_ids" not in joined


def test_the_end_is_learnt_where_padding_has_the_same_id(tmp_path):
    blocks = build([Completion("ab", "c"), Completion("a", "")], 8, tmp_path, pad_id=EOS)
    (row,) = list(blocks)
    a, b, c = ids_of("abc")
    assert row["input_ids"].tolist() == [a, b, c, EOS, a, EOS, EOS, EOS]
    assert row["labels"].tolist() == [-100, -100, c, EOS, -100, EOS, -100, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]


def test_blocks_run_over_the_whole_split(tmp_path):
    blocks = build(["ab"] * 2500, 64, tmp_path)  # 3 tokens each with the end of the document
    assert len(blocks) == 118 and blocks.stats.padding == 118 * 64 - 7500
    row = blocks[3]
    assert {v.dtype for v in row.values()} == {np.dtype(np.int64)} and {v.shape for v in row.values()} == {(64,)}
    assert blocks.count_targets() == sum(int((r["labels"] != -100).sum()) for r in blocks)
    with pytest.raises(IndexError):
        blocks[118]
    assert (blocks[-1]["input_ids"] == blocks[117]["input_ids"]).all()
    together = blocks.__getitems__([0, 5, 117])
    assert all((one["input_ids"] == blocks[i]["input_ids"]).all() for one, i in zip(together, [0, 5, 117], strict=True))


def test_no_block_at_all_is_an_error_with_both_numbers(tmp_path):
    with pytest.raises(DataError, match=r"30 tokens.*data.seq_len=64"):
        build(["ab"] * 10, 64, tmp_path)


def test_what_is_longer_than_a_block_can_be_an_error(tmp_path):
    with pytest.raises(DataError, match=r"1 rows are longer than data.seq_len=8, the longest has 12.*overlong"):
        build([Completion("a", "b"), Completion("q" * 5, "b" * 6)], 8, tmp_path, overlong="error")


def test_nothing_to_learn_is_an_error(tmp_path):
    with pytest.raises(DataError, match="there is nothing in it"):
        build([], 8, tmp_path)


def test_flash_attention_is_told_where_documents_begin(tmp_path):
    blocks = build(["ab", "cdef", "ghi", "j"], 7, tmp_path)
    batch = collate([blocks[0], blocks[1]], lengths=True)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 8, 12, 14] and batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_k"] == 4 and batch["input_ids"].shape == (2, 7)
    assert "cu_seq_lens_q" not in collate([blocks[0]])


# ------------------------------------------------------------------------------------------------------- cache


def test_a_second_start_tokenises_nothing_whatever_the_block_length(tmp_path):
    def documents():
        opened.append(1)
        return iter(["hello world"] * 50)

    opened: list[int] = []
    for seq_len in (16, 16, 17, 100):
        build(documents, seq_len, tmp_path)
        load_blocks([corpus_of(documents)], [0.5], ENCODER, seq_len, tmp_path, isolate=False)
    assert len(opened) == 1
    build(documents, 16, tmp_path, fingerprint="other content")
    for another in (byte_encoder(more=1), byte_encoder(special_tokens="parse")):
        load_blocks([corpus_of(documents)], [1.0], another, 16, tmp_path)
    assert len(opened) == 4


@pytest.mark.parametrize("damage", ["cut ids", "other ids", "no ids", "broken record", "empty record", "no record"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    whole = tokens_of(build(["hello world"] * 50, 16, tmp_path)).tolist()
    (folder,) = [p for p in (tmp_path / "tokens").iterdir() if p.is_dir()]
    ids, record = folder / "ids.bin", folder / "store.json"
    match damage:
        case "cut ids":
            ids.write_bytes(ids.read_bytes()[:-10])
        case "other ids":
            ids.write_bytes(bytes(100) + ids.read_bytes()[100:])
        case "no ids":
            ids.unlink()
        case "broken record":
            record.write_text('{"tok')
        case "empty record":
            record.write_text("{}")
        case "no record":
            record.unlink()
    assert tokens_of(build(["hello world"] * 50, 16, tmp_path)).tolist() == whole
    assert json.loads(record.read_text())["stats"]["documents"] == 50


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 7, 20, 39])
def test_an_interrupted_build_goes_on_where_it_stood(tmp_path, monkeypatch, after):
    """At any document, with what had been skipped, and without reading a document twice."""
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 30)
    documents = [f"document {i}" if i % 5 else f"{i} <eos>" for i in range(40)]
    read: list[int] = []

    def until(last):
        def corpus():
            for i, document in enumerate(documents):
                if i == last:
                    raise Interrupt
                read.append(i)
                yield document

        return corpus

    with pytest.raises(Interrupt):
        build(until(after), 16, tmp_path / "a")
    assert not [p for p in (tmp_path / "a/tokens").iterdir() if p.is_dir() and p.suffix != ".building"]
    resumed, clean = build(until(None), 16, tmp_path / "a"), build(until(None), 16, tmp_path / "b")
    assert tokens_of(resumed).tolist() == tokens_of(clean).tolist()
    facts = [vars(b.stores[0].stats) | {"seconds": 0} for b in (resumed, clean)]
    assert facts[0] == facts[1] and facts[0]["special_text"] == 8


def test_an_interruption_while_a_batch_is_written_leaves_no_half_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 30)
    documents = [f"document number {i}" for i in range(20)]
    real, calls = Encoder.encode, []

    def failing(self, *words):
        calls.append(1)
        encoded = real(self, *words)
        if len(calls) == 5:  # the ids are written, and then there is no list of lengths
            encoded.rows[-1].ids = encoded.rows[-1].ids.astype(np.uint16)
            monkeypatch.setattr(np, "cumsum", lambda *_: (_ for _ in ()).throw(Interrupt()))
        return encoded

    monkeypatch.setattr(Encoder, "encode", failing)
    with pytest.raises(Interrupt):
        build(documents, 16, tmp_path / "a")
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 30)
    resumed = build(documents, 16, tmp_path / "a")
    assert ENCODER.decode(tokens_of(resumed)) == "".join(f"{d}<eos>" for d in documents)


def test_a_long_document_goes_on_in_its_middle(tmp_path, monkeypatch):
    monkeypatch.setattr("deepseek_ft.data.files.LONG_TEXT_BYTES", 1000)
    monkeypatch.setattr(LongText, "pieces", lambda self, real=LongText.pieces: real(self, 50))
    monkeypatch.setattr(store_module, "_PIECES", 2)
    path = tmp_path / "long.txt"
    path.write_text("".join(f"Line {i} of a long text.\n" for i in range(300)))
    encoded: list[str] = []
    real = Encoder.encode_texts

    def encode_texts(self, texts):
        if len(encoded) == stop:
            raise Interrupt
        encoded.append("".join(texts))
        return real(self, texts)

    monkeypatch.setattr(Encoder, "encode_texts", encode_texts)

    def documents():
        return iter(["before", Text(LongText(path, BadRows())), "after"])

    stop = 20
    with pytest.raises(Interrupt):
        build(documents, 16, tmp_path / "a")
    stop = None
    resumed = build(documents, 16, tmp_path / "a")
    assert "".join(encoded) == path.read_text()  # each piece once
    assert ENCODER.decode(tokens_of(resumed)) == f"before<eos>{path.read_text()}<eos>after<eos>"
    assert resumed.stats.documents == 3


CHILD = """
    import os, resource, signal, sys
    sys.path.insert(0, {tests!r})
    import test_blocks as t
    from pathlib import Path
    t.store_module._BATCH_CHARACTERS, t.store_module._SAVE_SECONDS = 1000, 0.0
    documents = [f"document number {{i}} has some words" for i in range(2000)]
    def corpus():
        for i, document in enumerate(documents):
            {at_each}
            yield document
    {first}
    try:
        blocks = t.build(corpus, 64, Path({folder!r}))
        print("tokens", int(t.tokens_of(blocks).sum()), len(blocks))
    except t.DataError as error:
        print("error", error)
    """


def child(folder: Path, at_each: str = "pass", first: str = "pass") -> subprocess.CompletedProcess:
    script = textwrap.dedent(CHILD).format(tests=str(ROOT / "tests"), folder=str(folder), at_each=at_each, first=first)
    return subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True, timeout=120
    )


def test_a_killed_build_goes_on(tmp_path):
    killed = child(tmp_path / "a", "if i == 1500: os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -9 and not killed.stdout
    # What was noted is not read again: the corpus refuses to be at its beginning for long.
    resumed, clean = child(tmp_path / "a"), child(tmp_path / "b")
    assert resumed.stdout.startswith("tokens") and resumed.stdout == clean.stdout
    noted = child(tmp_path / "c", "if i == 1500: os.kill(os.getpid(), signal.SIGKILL)")
    assert noted.returncode == -9
    (state,) = (tmp_path / "c").glob("tokens/*.building/progress.json")
    assert 1400 < json.loads(state.read_text())["stats"]["documents"] <= 1500


def test_a_full_disk_is_one_message_and_the_work_goes_on_when_there_is_room(tmp_path):
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    full = child(tmp_path / "a", first=limit)
    assert full.stdout.startswith("error the token cache") and "data.cache_dir" in full.stdout, (
        full.stdout + full.stderr
    )
    resumed, clean = child(tmp_path / "a"), child(tmp_path / "b")
    assert resumed.stdout.startswith("tokens") and resumed.stdout == clean.stdout


def _build_in_a_process(folder):
    return len(build(["hello world"] * 5000, 16, folder))


def test_two_processes_build_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_build_in_a_process, [tmp_path] * 4) == [3750] * 4
    assert len([p for p in (tmp_path / "tokens").iterdir() if p.is_dir()]) == 1


def test_large_vocabularies_take_32_bits(tmp_path):
    assert build_store(corpus_of(["x" * 40]), ENCODER, tmp_path).stats.dtype == "uint16"
    encoder = byte_encoder(more=70_000)
    store = build_store(corpus_of(["x<69999>" * 9]), encoder, tmp_path)
    assert store.stats.dtype == "uint32" and store.ids.max() > 2**16


def test_copies_are_counted(tmp_path):
    store = build_store(corpus_of(["one", "two", "one", "one"]), ENCODER, tmp_path)
    assert store.stats.duplicates == 2 and store.stats.documents == 4


@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".parquet"])
def test_progress_of_one_file_is_told_with_what_is_left(tmp_path, monkeypatch, packed):
    rows = [{"text": "".join(np.random.default_rng(i).choice(list("abcdefgh "), 2000))} for i in range(5000)]
    path = tmp_path / f"rows{packed or '.jsonl'}"
    if packed == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path = tmp_path / f"rows.jsonl{packed}"
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(
            {"": bytes, ".gz": gzip.compress, ".zst": lambda b: pa.compress(b, "zstd", asbytes=True)}[packed](content)
        )
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 100_000)
    shown: list[tuple[int, float]] = []
    monkeypatch.setattr(store_module._Progress, "show", lambda self, tokens, share: shown.append((tokens, share)))
    source = SourceConfig(source="files", path=str(path))
    corpus = open_source(source, DataConfig(train=[source]), tmp_path, "data.train.0")
    store = build_store(corpus, ENCODER, tmp_path)
    shares = [share for _, share in shown]
    assert shares == sorted(shares) and shares[0] < 0.4 and shares[-1] > 0.8
    assert all(abs(share - tokens / store.stats.tokens) < 0.4 for tokens, share in shown)


def test_a_long_document_that_brings_its_begin_and_end_has_them_once(tmp_path, monkeypatch):
    monkeypatch.setattr(LongText, "pieces", lambda self, real=LongText.pieces: real(self, 50))
    path = tmp_path / "long.txt"
    path.write_text("".join(f"Line {i} of a long text.\n" for i in range(300)) + "<eos>")
    documents = [Text(LongText(path, BadRows()))]
    parsed = load_blocks([corpus_of(documents)], [1.0], byte_encoder(special_tokens="parse"), 16, tmp_path)
    assert tokens_of(parsed).tolist().count(EOS) == 1
    as_text = load_blocks([corpus_of(documents)], [1.0], byte_encoder(special_tokens="text"), 16, tmp_path)
    assert as_text.stats.tokens == parsed.stats.tokens + len("<eos>")


@pytest.mark.parametrize("kind", ["text", "completion"])
def test_rows_that_a_template_has_rendered_are_parsed(tmp_path, kind):
    rendered = [f"{i}<eos>" for i in range(30)]
    examples = rendered if kind == "text" else [Completion("q<eos>", text) for text in rendered]
    blocks = build(examples, 16, tmp_path)
    assert "<" not in ENCODER.decode(tokens_of(blocks)).replace("<eos>", "")
    assert tokens_of(blocks).tolist().count(EOS) == 30 * (1 + (kind == "completion"))
    one = build([*examples[:3], *["plain"] * 30], 16, tmp_path, fingerprint="mostly plain") if kind == "text" else None
    assert one is None or one.stores[0].stats.special_text == 3
