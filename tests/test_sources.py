from __future__ import annotations

import gzip
import json
import logging
import lzma
import tarfile
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SHARED, error, needs_shared

from deepseek_ft import DataError
from deepseek_ft.config import CodeConfig, DataConfig, SourceConfig
from deepseek_ft.data.formats import Completion, Conversation, Infill, Text
from deepseek_ft.data.sources import START, Report, in_validation, open_source, wikitext_articles


def text(example):
    return example.text if isinstance(example, Text) else example


@pytest.fixture
def open_at(tmp_path):
    """A source whose path is below tmp_path unless given."""

    def corpus(source: str, path=None, data=None, **settings):
        path = tmp_path / "data" if path is None else path
        entry = SourceConfig(source=source, path=str(path), **settings)
        return open_source(entry, data or DataConfig(), tmp_path / "cache", "data.train.0")

    return corpus


@pytest.fixture
def read(open_at):
    """Its documents as strings, and whatever else it gives as it is."""
    return lambda *args, **settings: [text(e) for e in open_at(*args, **settings).examples()]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def test_files_are_read_as_the_bytes_they_are(data, read):
    text = "def f():\r\n\treturn '\u2028 \x0b \x0c ≤ 测试'\n\n\n  x\r"
    (data / "a.py").write_bytes(text.encode())
    (data / "b.txt").write_bytes(text.encode())
    assert read("code") == [text] and read("text") == [text]


def test_a_file_is_one_document_with_all_its_lines(data, read):
    content = "def f():\r\n    return 1\n\n\nx"
    for name in ("a.py", "b.txt"):
        (data / name).write_bytes(content.encode())
    assert read("code") == read("text") == [content]
    assert read("files") == [content, content]


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
     (b'{"body":"ok"}\n', ["a.jsonl:1", "body", "text_field"]),
     (b'{"text":"ok"}\n{"body":"ok"}\n', ["a.jsonl:2", "'text or content", "it has body", "text_field"]),
     (b'[1]\n', ["a.jsonl:1", "holds 1", "not an object"]), (b'{"text":"a\x0bb"}', ["a.jsonl:1", "not valid JSON"]),
     (b"[" * 100_000, ["a.jsonl:1", "not valid JSON"]),
     (b'{"n":' * 100_000, ["a.jsonl:1", "not valid JSON"]), (b'{"text":"ok","n":' + b"9" * 5000 + b"}", ["a.jsonl:1"])],
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


# ------------------------------------------------------------------------------------------- rows and files

SKIP = DataConfig(on_bad_row="skip", max_bad_share=0.9)


def rows(*values) -> str:
    return "".join(v if isinstance(v, str) else json.dumps(v) + "\n" for v in values)


def test_only_the_rows_that_are_wanted_are_read(data, read):
    """A limit counts rows of the file, before they are packed; what comes after it may be broken."""
    (data / "a.jsonl").write_text(rows(*({"text": f"row {i}"} for i in range(10)), "not a row"))
    assert read("files", max_documents=2) == ["row 0", "row 1"]
    assert len(read("files", max_documents=10)) == 10
    error(lambda: read("files", max_documents=11), "a.jsonl:11")


def test_a_limit_does_not_hide_that_too_many_rows_are_bad(data, read):
    (data / "a.jsonl").write_text(rows(*["not a row\n"] * 5, {"text": "good"}, {"text": "more"}))
    error(
        lambda: read("files", data=DataConfig(on_bad_row="skip"), max_documents=1), "5 of 6 rows", "max_bad_share=0.01"
    )


def test_a_value_of_another_type_is_named_wherever_it_stands(data, read):
    """Loaders that infer a type per column give such rows to the template without a word."""
    (data / "a.jsonl").write_text(rows({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
                                       {"messages": "oops"}))  # fmt: skip
    error(lambda: read("files"), "a.jsonl:2", '"oops"', "not a list of messages")
    (data / "a.jsonl").write_text(rows({"text": "a"}, {"text": 5}))
    error(lambda: read("files"), "a.jsonl:2", "'text' holds 5", "not text")


def test_the_first_rows_format_is_held_against_every_row(data, read):
    (data / "a.jsonl").write_text(rows({"prompt": "p", "completion": "c"}, {"text": "t"}))
    error(lambda: read("files"), "a.jsonl:2", "no field 'prompt or query'", "it has text", "prompt_field")


def test_the_format_is_said_once_in_the_log(data, open_at, caplog):
    (data / "a.jsonl").write_text(rows({"question": "q", "answer": "a"}, {"question": "q", "answer": "b"}))
    caplog.set_level(logging.INFO)
    corpus = open_at("files", split="train")
    assert len(list(corpus.read(START, Report()))) == 2
    assert [r.getMessage() for r in caplog.records if "read as" in r.getMessage()] == ["data data/train: read as qa"]


def test_bad_rows_are_skipped_counted_and_listed(data, open_at):
    (data / "a.jsonl").write_text(
        rows({"text": "a"}, "{\n", {"text": 5}, {"text": " "}, {"text": "b"}, {"body": "c"}, {"text": "d"})
    )
    report, corpus = Report(), open_at("files", data=SKIP)
    report.bad = corpus.bad()
    assert [text(e) for _, e in corpus.read(START, report)] == ["a", "b", "d"]
    assert (report.examples, report.blank, report.bad.bad, report.bad.rows) == (3, 1, 3, 7)
    assert [line.split(": ")[0].rpartition("/")[2] for line in report.bad.listed] == [
        "a.jsonl:2",
        "a.jsonl:3",
        "a.jsonl:6",
    ]
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_blank_documents_are_counted_and_left_out(data, open_at):
    for name, content in (("a.txt", "a"), ("b.txt", ""), ("c.txt", " \n\t\u3000")):
        (data / name).write_text(content)
    report = Report()
    assert [text(e) for _, e in open_at("files").read(START, report)] == ["a"]
    assert (report.blank, report.bad.rows) == (2, 3)


def test_files_of_all_kinds_side_by_side(data, read):
    (data / "a.csv").write_text("text,n\nfrom csv,1\n")
    (data / "b.json").write_text(json.dumps([{"text": "from json"}], indent=1))
    (data / "c.jsonl").write_text(rows({"text": "from jsonl"}))
    pq.write_table(pa.table({"text": ["from parquet"]}), data / "d.parquet")
    (data / "e.txt").write_text("a note beside the rows")
    assert read("files") == ["from csv", "from json", "from jsonl", "from parquet"]
    assert read("files", include=["*.txt", "*.csv"]) == ["from csv", "a note beside the rows"]
    assert read("files", data / "*.json*") == ["from json", "from jsonl"]
    assert read("files", data / "e.txt") == ["a note beside the rows"]


def test_a_text_among_conversations_is_named(data, read):
    (data / "a.jsonl").write_text(rows({"prompt": "p", "completion": "c"}))
    (data / "b.txt").write_text("a note")
    error(lambda: read("files", include=["*"]), "b.txt", "is a text", "rows of prompt_completion")
    error(lambda: read("files", data / "b.txt", format="messages"), "b.txt", "rows of messages")


def test_code_in_rows_and_code_in_files(data, read):
    (data / "a.jsonl").write_text(rows({"content": "def f(): return 1\n"}))
    (data / "b.json").write_text('{"name": "part of a program"}')
    (data / "c.py").write_text("value = 1\n")
    assert read("files", data / "a.jsonl", format="code") == ["def f(): return 1\n"]
    assert read("files", format="code") == ['{"name": "part of a program"}', "value = 1\n"]


def test_a_field_that_was_asked_for_comes_before_the_usual_ones(data, read):
    row = {"text": "t", "body": "b", "messages": [{"role": "assistant", "content": "m"}], "prompt": "p", "output": "o"}
    (data / "a.jsonl").write_text(rows(row))
    assert isinstance(read("files")[0], Conversation)
    assert read("files", text_field="body") == ["b"]
    assert read("files", format="text") == ["t"]
    assert read("files", format="prompt_completion", completion_field="output") == [Completion("p", "o")]


def test_generated_files_are_left_out_and_counted(data, open_at):
    (data / "a.py").write_text("value = 1\n")
    (data / "b.py").write_text("# Code generated by a program. DO NOT EDIT.\nvalue = 1\n")
    report = Report()
    assert len(list(open_at("code").read(START, report))) == 1 and report.generated == 1
    everything = DataConfig(code=CodeConfig(skip_generated=False))
    assert len(list(open_at("code", data=everything).examples())) == 2


def make_rows(data):
    (data / "a.jsonl").write_text(
        rows(*({"text": f"row {i}"} if i % 3 else "broken\n" for i in range(12)), {"text": ""})
    )
    (data / "b.csv").write_text('text,n\none,1\nbroken\n"two\n lines",2\nthree,"3\n')
    (data / "c.json").write_text(json.dumps([{"text": "x"}, 5, {"text": "y"}, {"text": 6}, {"text": "z"}], indent=1))
    pq.write_table(pa.table({"text": ["p", None, "q"]}), data / "d.parquet", row_group_size=2)
    return "files"


def make_archive(data):
    with tarfile.open(data / "a.tar", "w") as archive:
        for i, content in enumerate([b"one", b"caf\xe9", b"two", b"", b"\xff", b"three"]):
            (data / "page").write_bytes(content)
            archive.add(data / "page", f"{i}.txt")
    (data / "page").unlink()
    return "openwebtext"


def make_articles(data):
    (data / "wiki.train.tokens").write_bytes(b" = A = \n a \n caf\xe9 \n\n = B = \n b \n\n = C = \n \xff \n c \n")
    return "wikitext-103"


def make_repositories(data):
    for name, content in (("a/.git/x", b""), ("a/m.py", b"import n\n"), ("a/n.py", b"value = 1\n"), ("a/o.py", b"caf\xe9"),
                          ("b/.git/x", b""), ("b/m.py", b"value = 1\n"), ("b/n.py", b"other = 1\n"), ("b/p.min.js", b"z")):  # fmt: skip
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    return "code"


@pytest.mark.parametrize("make", [make_rows, make_archive, make_articles, make_repositories])
def test_reading_goes_on_at_any_position_with_the_same_rows_and_counts(data, open_at, make):
    settings = DataConfig(on_bad_row="skip", max_bad_share=1.0, code=CodeConfig(repository=make is make_repositories))
    corpus = open_at(make(data), data=settings, **({"split": "train"} if make is make_articles else {}))
    whole, report, states = [], Report(bad=corpus.bad()), []
    for position, example in corpus.read(START, report):
        whole.append(example)
        states.append((position, json.dumps(report.to_dict())))
    assert len(whole) >= 3 and report.bad.bad + report.generated >= 2
    assert len({position for position, _ in states}) == len(states)
    for i, (position, state) in enumerate(states):
        rest = Report.from_dict(json.loads(state))
        assert [e for _, e in corpus.read(position, rest)] == whole[i + 1 :], position
        assert asdict(rest) == asdict(report), position


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
    error(lambda: read("wikitext-103"), "no field 'text", "it has body, n", "text_field")
    error(lambda: read("wikitext-103", text_field="n"), "not text")
    assert read("wikitext-103", text_field="body") == ["x\n"]
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
    """The hub itself is out of reach here, so what would be asked of it is recorded."""
    import datasets

    asked = {}

    def load_dataset(*args, **kwargs):
        asked["args"], asked["split"], asked["revision"] = args, kwargs["split"], kwargs["revision"]
        assert "trust_remote_code" not in kwargs
        rows = datasets.Dataset.from_dict({"text": ["", " = Title = \n", " text \n"]})
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_source(SourceConfig(source=source, split="train"), DataConfig(), tmp_path, "k")
    # The scripts on the main branch are run by nobody any more; the parquet copy has a branch of its own.
    revision = None if config else "refs/convert/parquet"
    assert asked == {"args": (repo, config), "split": "train", "revision": revision}
    documents = [text(e) for e in corpus.examples()]
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


def test_a_hub_that_stops_to_answer_is_named_with_the_row(monkeypatch, tmp_path):
    class Rows:
        def __iter__(self):
            yield {"text": "a"}
            raise ConnectionError("Connection reset by peer")

    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: Rows())
    corpus = open_source(SourceConfig(source="someone/something"), DataConfig(), tmp_path, "data.train.0")
    error(lambda: list(corpus.examples()), "someone/something: row 2", "Connection reset")


def test_rows_of_the_hub_are_recognised_and_resumed_like_those_of_files(monkeypatch, tmp_path):
    import datasets

    values = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(4)] + [{"prompt": "p", "completion": None}]
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: datasets.Dataset.from_list(values))
    corpus = open_source(SourceConfig(source="someone/something"), SKIP, tmp_path, "k")
    whole = list(corpus.read(START, Report(bad=corpus.bad())))
    assert [e for _, e in whole] == [Completion(f"p{i}", f"c{i}") for i in range(4)]
    assert list(corpus.read(whole[1][0], Report(bad=corpus.bad()))) == whole[2:]


# ----------------------------------------------------------------------------------------------- real files


@needs_shared
@pytest.mark.parametrize(
    ("path", "count", "kind", "form"),
    [("chat/identity.json", 91, Conversation, "alpaca"), ("chat/sharegpt_dummy_conversation.json", None, Conversation, "sharegpt"),
     ("chat/glaive_toolcall_zh_demo.json", 300, Conversation, "sharegpt"),
     ("chat/reason_tool_use_demo_50.jsonl", 50, Conversation, "messages"),
     ("chat/v1_sft_demo.jsonl", None, Conversation, "messages"), ("math/gsm8k_test.jsonl", 1319, Conversation, "qa"),
     ("code/HumanEval.jsonl.gz", 164, Completion, "prompt_completion"),
     ("code/HumanEval-RandomSpanInfillingLight.jsonl.gz", 164, Infill, "infill"),
     ("text/zh/cmrc2018_trial.json", 256, Text, "text"), ("text/openwebtext/openwebtext-1000.jsonl", 1000, Text, "text")],
)  # fmt: skip
def test_real_files_are_read_whole_and_recognised(tmp_path, path, count, kind, form):
    corpus = open_source(SourceConfig(source="files", path=str(SHARED / path)), DataConfig(), tmp_path, "k")
    report = Report(quiet=True)
    examples = [e for _, e in corpus.read(START, report)]
    assert report.form == form and {type(e) for e in examples} == {kind}
    content = (gzip.open if path.endswith(".gz") else open)(SHARED / path, "rt", encoding="utf-8")
    with content:
        if ".jsonl" in path:
            rows_there = sum(bool(line.strip()) for line in content)
        else:
            value = json.load(content)
            rows_there = len(value) if isinstance(value, list) else sum(len(d["paragraphs"]) for d in value["data"])
    assert len(examples) == rows_there == (count or rows_there) and report.bad.bad == 0


# ------------------------------------------------------------------------------------------- as published


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


def test_a_long_text_is_not_read_to_know_what_it_is(tmp_path, monkeypatch):
    from deepseek_ft.data.blocks import needs_form

    (tmp_path / "long.txt").write_text("text\n" * 100)
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    opened = []
    monkeypatch.setattr("deepseek_ft.data.sources.read_text", lambda path, bad: opened.append(path) or iter(()))
    corpora = {}
    for name in ("long.txt", "chat.jsonl"):
        source = SourceConfig(source="files", path=str(tmp_path / name))
        corpora[name] = open_source(source, DataConfig(train=[source]), tmp_path, "data.train.0")
    assert not needs_form([corpora["long.txt"]]) and not opened
    assert needs_form([corpora["long.txt"], corpora["chat.jsonl"]])
