"""What people are shown of their data is what is trained: `data show`, `data stats`, `data cache`."""

from __future__ import annotations

import json
import os
import time

import pytest
from conftest import STDLIB, cli, corpus_of
from test_blocks import ENCODER, byte_encoder

from deepseek_ft.config import DataConfig, SourceConfig
from deepseek_ft.data import view
from deepseek_ft.data.blocks import load_blocks
from deepseek_ft.data.chat import choose_form
from deepseek_ft.data.formats import Completion, convert
from deepseek_ft.data.store import build_store
from deepseek_ft.data.tokenise import Encoder

PAIRS = [Completion("ask ", "answer"), Completion("", "a"), Completion("q" * 30, "b" * 30)]


def shown(examples, encoder=ENCODER, **data) -> list[dict]:
    return list(view.first_rows(corpus_of(examples), encoder, DataConfig(train=(), **({"seq_len": 32} | data)), 10))


def test_a_row_is_shown_as_it_is_trained(tmp_path):
    rows = shown(PAIRS)
    blocks = load_blocks([corpus_of(PAIRS)], [1.0], ENCODER, 32, tmp_path)
    assert sum(r["targets"] for r in rows) == blocks.count_targets()
    assert sum(r["tokens"] for r in rows) == blocks.stats.tokens and rows[2]["cut"] == blocks.stats.cut_tokens == 29
    assert rows[0]["pieces"] == [{"text": "ask ", "learnt": False}, {"text": "answer", "learnt": True},
                                 {"text": "<eos>", "learnt": True, "special": True}]  # fmt: skip
    assert rows[1]["targets"] == 1  # nothing stands before its first token
    text = view.row_text(rows[0], 1, colour=False)
    assert "11 tokens, 7 of them targets" in text and "ask ⟦answer<eos>⟧" in text
    assert "29 tokens cut off" in view.row_text(rows[2], 3, colour=False)
    assert "\x1b[32manswer" in view.row_text(rows[0], 1, colour=True)


def test_a_row_that_cannot_be_trained_is_shown_with_its_reason():
    from test_chat import deepseek, with_tools

    tokenizer = deepseek(None)
    encoder = Encoder(tokenizer, choose_form(tokenizer, "deepseek_llm"))
    conversation = convert({"messages": with_tools("", "21")}, "messages", SourceConfig(source="files"))
    (row,) = shown([conversation], encoder)
    assert "no tool turns" in row["rejected"] and "left out: " in view.row_text(row, 1, colour=False)


def test_figures_add_up(tmp_path):
    corpora = [corpus_of(["one two", "one two", "three <eos> four"], "t", "texts"), corpus_of(PAIRS, "p", "pairs")]
    blocks = load_blocks(corpora, [1.0, 0.5], byte_encoder(special_tokens="text"), 32, tmp_path)
    found = view.stats(blocks)
    assert found["tokens"] + found["padding"] == found["blocks"] * 32
    stored = sum(s["tokens"] for s in found["sources"])
    assert found["tokens"] + found["cut_tokens"] + found["dropped_tokens"] == stored
    texts, pairs = found["sources"]
    assert texts["duplicates"] == 1 and texts["special_text"] == 1 and pairs["documents"] == 3
    assert sum(texts["length_histogram"].values()) == 3 and pairs["length_max"] == 61
    assert pairs["length_median"] == 11
    text = view.stats_text("train", found)
    for word in ("1 documents equal an earlier one", "hold a special token's name", "texts: text", "left out  2 rows"):
        assert word in text, text
    json.dumps(found)


def test_the_cache_is_listed_and_pruned_by_its_last_use(tmp_path):
    for name in ("old", "new"):
        build_store(corpus_of([f"{name} text"] * 9, name, name), ENCODER, tmp_path)
    entries = view.cache_entries(tmp_path)
    assert {e["what"].split(",")[0] for e in entries} == {"old", "new"}
    old = next(e for e in entries if e["what"].startswith("old"))
    for path in [*os.scandir(old["path"])]:
        os.utime(path.path, (time.time() - 10 * 86400,) * 2)
    entries = view.cache_entries(tmp_path)
    assert "10 days ago" in view.cache_text(entries, tmp_path)
    assert [e["what"][:3] for e in view.prune(entries, 5)] == ["old"]
    assert [e["what"][:3] for e in view.cache_entries(tmp_path)] == ["new"]
    assert "is empty" in view.cache_text([], tmp_path)


def test_what_is_being_made_is_not_pruned(tmp_path):
    from filelock import FileLock

    build_store(corpus_of(["text"] * 9), ENCODER, tmp_path)
    entries = view.cache_entries(tmp_path)
    with FileLock(f"{entries[0]['path']}.lock"):
        assert view.prune(entries, 0) == []
    assert len(view.prune(entries, 0)) == 1


def test_the_commands(tmp_path):
    """On Python's own source, with fill-in-the-middle off, as a new user types them."""
    env = dict(os.environ, DEEPSEEK_FT_CACHE=str(tmp_path / "cache"))
    words = (
        "quickstart",
        "model.tokenizer=train:600",
        f"data.train=[{{source: code, path: {STDLIB / 'json'}}}]",
        "data.eval=[]",
    )
    show = cli("data", "show", *words, "-n", "2", cwd=tmp_path, env=env)
    assert show.returncode == 0 and show.stdout.count("--- row") == 2 and "⟦" in show.stdout and "import" in show.stdout
    stats = cli("data", "stats", *words, cwd=tmp_path, env=env)
    assert stats.returncode == 0 and "code: code" in stats.stdout
    figures = cli("data", "stats", *words, "--json", cwd=tmp_path, env=env)
    found = json.loads(figures.stdout[figures.stdout.index("{\n") :])["train"]
    assert found["tokens"] == sum(s["tokens"] for s in found["sources"]) > 1000
    cache = cli("data", "cache", "--json", cwd=tmp_path, env=env)
    assert {"tokens", "tokenizers"} <= {e["kind"] for e in json.loads(cache.stdout)}
    pruned = cli("data", "cache", "--prune", "0", cwd=tmp_path, env=env)
    assert pruned.returncode == 0 and "deleted" in pruned.stdout
    assert "is empty" in cli("data", "cache", cwd=tmp_path, env=env).stdout
    for typo in (
        ("cache", "--prune", "nan"),
        ("cache", "--prune", "-1"),
        ("show", *words, "-n", "-3"),
        ("show", *words, "--skip", "x"),
    ):
        done = cli("data", *typo, cwd=tmp_path, env=env)
        assert done.returncode == 2 and "got" in done.stdout and "deleted" not in done.stdout
    wrong = cli("data", "show", *words, "--part", "eval", cwd=tmp_path, env=env)
    assert wrong.returncode == 2 and "no source there" in wrong.stdout
    missing = cli(
        "data", "show", "quickstart", "data.train=[{source: files, path: nowhere.jsonl}]", cwd=tmp_path, env=env
    )
    assert missing.returncode == 2 and "nowhere.jsonl" in missing.stdout and "Traceback" not in missing.stdout


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "prefix"), (1.0, "suffix")])
def test_the_parts_of_an_infilling_example_are_shown(spm_rate, order):
    from test_tokenise import FIM, wrapped
    from test_tokenise import train as train_tokenizer

    document = "def area(r):\n    return 3.14 * r * r\n"
    encoder = Encoder(wrapped(train_tokenizer(), more=FIM), fim_rate=1.0, spm_rate=spm_rate)
    corpus = corpus_of([document], is_code=True)
    (row,) = view.first_rows(corpus, encoder, DataConfig(train=(), seq_len=256), 1)
    marks = [p["text"] for p in row["pieces"] if p.get("special")]
    assert [m for m in marks if m in FIM] == FIM and row["pieces"][-1]["text"] == encoder.tokenizer.eos_token
    assert row["targets"] == row["tokens"] - 1
    parts = "".join(p["text"] for p in row["pieces"])
    begin, hole, end = (parts.index(m) for m in FIM)
    prefix, suffix = parts[begin + len(FIM[0]) : hole], parts[hole + len(FIM[1]) : end]
    middle = parts[end + len(FIM[2]) :].removesuffix(encoder.tokenizer.eos_token)
    assert prefix + middle + suffix == document and bool(prefix) == (order == "prefix")
    assert f"fill in the middle ({order} first)" in view.row_text(row, 1, colour=False)
