from __future__ import annotations

import gzip
import json
import lzma
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SHARED, needs_shared

from deepseek_ft import DataError
from deepseek_ft.config import DataConfig, SourceConfig
from deepseek_ft.data.sources import in_validation, open_source, wikitext_articles


@pytest.fixture
def read(tmp_path):
    """Documents of a source whose path is below tmp_path unless given."""

    def documents(source: str, path=None, **settings) -> list[str]:
        path = tmp_path / "data" if path is None else path
        entry = SourceConfig(source=source, path=str(path), **settings)
        return list(open_source(entry, DataConfig(), tmp_path / "cache", "data.train.0").documents())

    return documents


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def error(call, *words: str) -> str:
    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    return str(caught.value)


def test_files_are_read_as_the_bytes_they_are(data, read):
    text = "def f():\r\n\treturn '\u2028 \x0b \x0c ≤ 测试'\n\n\n  x\r"
    (data / "a.py").write_bytes(text.encode())
    (data / "b.txt").write_bytes(text.encode())
    assert read("code") == [text] and read("text") == [text]


def test_code_takes_source_files_in_a_fixed_order(data, read):
    for name in ("z.py", "a/b.c", "a/notes.txt", ".git/x.py", "node_modules/y.js", "empty.py", "Makefile"):
        (data / name).parent.mkdir(exist_ok=True, parents=True)
        (data / name).write_text("" if name.startswith("empty") else name)
    assert read("code") == ["Makefile", "z.py", "a/b.c"]
    assert read("code", include=["*.py"]) == ["z.py"]
    assert read("code", include=["a/**"]) == ["a/b.c", "a/notes.txt"]
    assert read("code", exclude=["a/*", "Makefile"]) == ["z.py"]


def test_one_file_is_a_source_too(data, read):
    (data / "a.txt").write_text("x")
    assert read("text", data / "a.txt") == ["x"]


@pytest.mark.parametrize("opener", [open, gzip.open, lzma.open], ids=["plain", "gz", "xz"])
def test_jsonl(data, read, opener):
    ending = {open: "", gzip.open: ".gz", lzma.open: ".xz"}[opener]
    with opener(data / f"a.jsonl{ending}", "wt", encoding="utf-8", newline="") as file:
        file.write('{"text":"a\u2028b"}\r\n\n{"text":"c\\nd", "id": 3}')
    assert read("jsonl") == ["a\u2028b", "c\nd"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b'{"text":"a"}\n{"text":"b', ["a.jsonl:2", '{"text":"b']),
     (b'{"text":"one","text":"two"}', ["a.jsonl:1", "twice"]),
     (b'{"text":"\\ud83d"}', ["a.jsonl:1", "surrogate"]),
     (b'{"text":"caf\xe9"}\n{"text":"ok"}\n', ["a.jsonl:1", "UTF-8"]),
     (b'{"text":"ok"}\n{"text":5}\n', ["a.jsonl:2", "not text"]),
     (b'{"text":"ok"}\n{"text":null}\n', ["a.jsonl:2", "null"]),
     (b'{"content":"ok"}\n', ["a.jsonl:1", "'content'", "text_field"]),
     (b'[1]\n', ["a.jsonl:1", "list"]), (b'{"text":"a\x0bb"}', ["a.jsonl:1", "not valid JSON"]),
     (b"[" * 100_000, ["a.jsonl:1", "not valid JSON"]), (b'{"text":"ok","n":' + b"9" * 5000 + b"}", ["a.jsonl:1"])],
)  # fmt: skip
def test_a_broken_row_is_named(data, read, raw, words):
    (data / "a.jsonl").write_bytes(raw)
    error(lambda: read("jsonl"), *words)


def test_truncated_archives_are_named(data, read):
    whole = gzip.compress(b'{"text":"a"}\n' * 1000)
    (data / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    error(lambda: read("jsonl"), "a.jsonl.gz")
    (data / "a.jsonl.gz").unlink()
    (data / "b.jsonl.xz").write_bytes(b"not xz at all")
    error(lambda: read("jsonl"), "b.jsonl.xz")
    (data / "b.jsonl.xz").unlink()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    (data / "c.jsonl.gz").write_bytes(flipped)
    error(lambda: read("jsonl"), "c.jsonl.gz")


def test_bad_bytes_name_file_and_line(data, read):
    (data / "a.py").write_bytes(b"x = 1\ny = '\xe9'\n")
    error(lambda: read("code"), "a.py:2", "0xe9", "exclude")


def test_missing_paths(tmp_path, data, read):
    (data / "corpus").mkdir()
    error(lambda: read("text", data / "corpsu"), "there is no file or folder", "corpus")
    error(lambda: read("text", data / "corpus"), "no file below", "*.txt")
    with pytest.raises(DataError, match="needs a path"):
        open_source(SourceConfig(source="code"), DataConfig(), tmp_path, "data.train.0")


def test_held_out_documents_are_never_trained_on(data, read):
    documents = [f"document number {i}" for i in range(2000)]
    (data / "a.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in documents))
    train, held_out = (read("jsonl", split=s, holdout=0.05) for s in ("train", "validation"))
    assert sorted(train + held_out) == sorted(documents) and not set(train) & set(held_out)
    assert 60 < len(held_out) < 140
    assert held_out == [d for d in documents if in_validation(d, 0.05)]
    assert read("jsonl") == documents
    assert read("jsonl", split="train", holdout=0.05, max_documents=7) == train[:7]
    error(lambda: read("jsonl", split="test"), "no test split")


def test_fingerprint_follows_the_content(tmp_path, data):
    def fingerprint(path=data, **settings):
        entry = SourceConfig(source="text", path=str(path), **settings)
        return open_source(entry, DataConfig(), tmp_path / "cache", "k").fingerprint

    (data / "a.txt").write_text("one")
    first = fingerprint()
    (data / "a.txt").touch()
    assert fingerprint() == first
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "a.txt").write_text("one")
    assert fingerprint(copy) == first
    assert fingerprint(max_documents=1) != first
    (data / "a.txt").write_text("two")
    assert fingerprint() != first


# ------------------------------------------------------------------------------------------------- wikitext

LINES = [
    "",
    " = Title = \n",
    " text \n",
    "",
    " = = Section = = \n",
    " x = 3 = y \n",
    " = 3 x = \n",
    " ",
    " = Other = ",
    " more ",
]


def test_wikitext_articles():
    assert list(wikitext_articles(LINES)) == [
        " = Title = \n text \n = = Section = = \n x = 3 = y \n = 3 x = \n",
        " = Other = \n more \n",
    ]


@pytest.mark.parametrize("layout", ["tokens", "parquet", "jsonl", "txt"])
def test_wikitext_layouts(data, read, layout):
    lines = [line if line.endswith("\n") else line + "\n" for line in LINES]
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        rows = [line.replace("Title", name) for line in lines]
        if layout == "tokens":
            (data / f"wiki.{split}.tokens").write_text("".join(rows))
        elif layout == "txt":
            (data / f"{split}.txt").write_text("".join(rows))
        elif layout == "jsonl":
            (data / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
        else:
            pq.write_table(pa.table({"text": rows}), data / f"{name}-00000-of-00001.parquet")
    for split in ("train", "validation", "test"):
        articles = read("wikitext-103", split=split)
        assert len(articles) == 2 and articles[0].startswith(f" = {split} = \n text \n")


def test_raw_and_tokenised_are_not_mixed_up(data, read):
    (data / "wiki.test.raw").write_text(" = A = \n x \n")
    error(lambda: read("wikitext-103", split="test"), "raw variant", "source: wikitext-103-raw")
    assert read("wikitext-103-raw", split="test")
    error(lambda: read("wikitext-103-raw", split="train"), "no file of the train split", "wiki.test.raw")


@pytest.mark.parametrize(
    "names", [("wikitext-103-v1", "wikitext-103-raw-v1", "wikitext-2-v1"), ("wikitext-103", "wikitext-2")]
)
def test_a_copy_of_the_whole_repository_is_one_variant(data, read, names):
    """The hub's clone has a folder per variant, all with the same file names."""
    for name in names:
        (data / name).mkdir()
        table = pa.table({"text": [f" = {name} = \n", " x \n"]})
        pq.write_table(table, data / name / "train-00000-of-00001.parquet")
    assert read("wikitext-103", split="train") == [f" = {names[0]} = \n x \n"]
    error(lambda: read("wikitext-2-raw", split="train"), "but not wikitext-2-raw")


def test_a_single_file_is_held_against_split_and_variant(data, read):
    (data / "wiki.test.raw").write_text(" = A = \n x \n")
    error(lambda: read("wikitext-103-raw", data / "wiki.test.raw", split="train"), "no file of the train split")
    error(lambda: read("wikitext-103", data / "wiki.test.raw", split="test"), "raw variant")
    assert read("wikitext-103-raw", data / "wiki.test.raw", split="test") == [" = A = \n x \n"]


def test_parquet_columns(data, read):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), data / "train.parquet")
    error(lambda: read("wikitext-103"), "no column 'text'", "body")
    error(lambda: read("wikitext-103", text_field="n"), "not text")
    (data / "train.parquet").write_bytes(b"PAR1 nonsense")
    error(lambda: read("wikitext-103"), "train.parquet")


# ---------------------------------------------------------------------------------------------- openwebtext


def test_openwebtext_archive_tree(tmp_path, data, read):
    for i in range(3):
        (data / f"{i}.txt").write_text(f"page {i}\n")
    loose = read("openwebtext")
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "urlsf_subset00-1_data.xz", "w:xz") as archive:
        for i in range(2):
            archive.add(data / f"{i}.txt", f"{i}.txt")
    with tarfile.open(packed / "urlsf_subset01.tar", "w") as archive:
        inner = tmp_path / "urlsf_subset01-2_data.xz"
        with tarfile.open(inner, "w:xz") as pages:
            pages.add(data / "2.txt", "2.txt")
        archive.add(inner, f"openwebtext/{inner.name}")
    assert read("openwebtext", packed) == loose == ["page 0\n", "page 1\n", "page 2\n"]


# ------------------------------------------------------------------------------------------------------ hub


@pytest.mark.parametrize(
    ("source", "repo", "config"),
    [("wikitext-103", "Salesforce/wikitext", "wikitext-103-v1"), ("wikitext-103-raw", "Salesforce/wikitext", "wikitext-103-raw-v1"),
     ("wikitext-2", "Salesforce/wikitext", "wikitext-2-v1"), ("openwebtext", "Skylion007/openwebtext", None)],
)  # fmt: skip
def test_what_is_asked_of_the_hub(monkeypatch, tmp_path, source, repo, config):
    """The hub itself is out of reach here, so what would be asked of it is recorded (casebook DAT-9)."""
    import datasets

    asked = {}

    def load_dataset(*args, **kwargs):
        asked["args"], asked["split"] = args, kwargs["split"]
        rows = datasets.Dataset.from_dict({"text": ["", " = Title = \n", " text \n"]})
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_source(SourceConfig(source=source, split="train"), DataConfig(), tmp_path, "k")
    assert asked == {"args": (repo, config), "split": "train"}
    documents = list(corpus.documents())
    assert documents == ([" = Title = \n text \n"] if config else [" = Title = \n", " text \n"])


def test_a_hub_that_does_not_answer_names_the_way_out(monkeypatch, tmp_path):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    entry = SourceConfig(source="openwebtext", split="train")
    error(
        lambda: open_source(entry, DataConfig(), tmp_path, "data.train.0"),
        "Skylion007/openwebtext",
        "data.path",
        "HF_ENDPOINT",
    )


# ----------------------------------------------------------------------------------------------- real files


@needs_shared
def test_real_wikitext(read):
    test = read("wikitext-103", SHARED / "text/wikitext-103", split="test")
    valid = read("wikitext-103", SHARED / "text/wikitext-103", split="validation")
    raw = read("wikitext-2-raw", SHARED / "text/wikitext-2-raw", split="test")
    # As published: 60 articles each; 245,569 and 217,646 tokens, of which one per line is its end.
    assert (len(test), len(valid), len(raw)) == (60, 60, 60)
    assert sum(len(d.split()) for d in test) == 245_569 - 4_358
    assert sum(len(d.split()) for d in valid) == 217_646 - 3_760
    assert [d for d in raw if "<unk>" in d] == [] and any("<unk>" in d for d in test)


@needs_shared
def test_real_openwebtext(read):
    documents = read("openwebtext", SHARED / "text/openwebtext")
    assert len(documents) == 1000
    tree = read("openwebtext", SHARED / "text/hf-dummy/openwebtext")
    files = sorted((SHARED / "text/hf-dummy/openwebtext").rglob("*.txt"))
    assert tree == [f.read_bytes().decode() for f in files]
