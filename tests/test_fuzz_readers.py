"""Files as they come out of accidents: cut off, overwritten, of another kind than they say, or made to harm.

Whatever a file holds, reading it ends in rows that are really there, in a DataError, or in rows that are counted as
bad. `FUZZ_SEED` and `FUZZ_FILES` in the environment run other and more files.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import archive

from deepseek_ft import DataError
from deepseek_ft.config import ChatConfig, CodeConfig, DataConfig, SourceConfig
from deepseek_ft.data import files
from deepseek_ft.data.files import LongText
from deepseek_ft.data.formats import FORMATS, Completion, Conversation, Infill, Text, texts
from deepseek_ft.data.sources import START, Report, open_source

SEED, FILES = int(os.environ.get("FUZZ_SEED", 0)), int(os.environ.get("FUZZ_FILES", 2400))
SECONDS = 20  # for one file; none takes one

PROSE = ["A plain line, and another one.", "def f(x):\r\n\treturn x  # ≤ ℕ", "注意 空格，保留。", "don't\u2028stop \"here\"; ok, 1\\2",
         "🙂👩‍🚀 e\u0301", "line one\nline two\n\nline four", " = not a heading = ", "2024-01-31"]  # fmt: skip


def messages(i: int) -> dict:
    call = {"type": "function", "function": {"name": f"f{i}", "arguments": json.dumps({"x": [i, None, 1.5]})}}
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": PROSE[i % 8]},
             {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "think"},
             {"role": "tool", "content": "{}", "name": "f"},
             {"role": "assistant", "content": [{"type": "text", "text": f"answer {i}"}], "weight": 1}]  # fmt: skip
    return {"messages": turns, "tools": json.dumps([{"name": f"f{i}", "parameters": {}}]), "id": i}


def sharegpt(i: int) -> dict:
    turns = [{"from": "human", "value": PROSE[i % 8]}, {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {}})},
             {"from": "observation", "value": "1"}, {"from": "gpt", "value": f"answer {i}"}]  # fmt: skip
    return {"conversations": turns, "system": "s", "tools": "[]"}


def alpaca(i: int) -> dict:
    return {
        "instruction": PROSE[i % 8],
        "input": "" if i % 2 else "more",
        "output": f"o{i}",
        "history": [["a", "b"]] * (i % 3),
    }


def text(i: int) -> dict:
    return {"id": f"{i:03}", "text": f"{PROSE[i % 8]} {i}", "n": i * 0.5}


def lines(make: Callable[[int], dict], count: int = 12) -> bytes:
    return "".join(json.dumps(make(i), ensure_ascii=bool(i % 2)) + "\n" for i in range(count)).encode()


def array(make: Callable[[int], dict], indent: int | None = None) -> bytes:
    return json.dumps([make(i) for i in range(10)], ensure_ascii=False, indent=indent).encode()


def squad() -> bytes:
    paragraphs = [
        {"context": f"passage {i}", "qas": [{"id": str(i), "question": "q", "answers": []}]} for i in range(6)
    ]
    data = [{"title": "t", "paragraphs": paragraphs[:3]}, {"title": "u", "paragraphs": paragraphs[3:]}]
    return json.dumps({"version": "1.1", "data": data}, indent=1).encode()


def table(make: Callable[[int], dict], **settings) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, make(0), lineterminator="\n", **settings)
    writer.writeheader()
    writer.writerows(make(i) for i in range(12))
    return out.getvalue().encode()


def parquet(make: Callable[[int], dict], **settings) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([make(i) for i in range(12)]), out, row_group_size=5, **settings)
    return out.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PAGES = {f"{i}.txt": PROSE[i].encode() for i in range(6)}
NESTED = {f"urlsf-{i}_data.xz": archive({f"{i}.txt": PROSE[i].encode()}, "w:xz") for i in range(3)}
ARTICLES = "".join(
    f" = Title {i} = \n \n {line} \n\n" for i, line in enumerate(["a <unk> b", "c @-@ d", " = = Deeper = = "] * 4)
)
PROGRAM = "import os\n\n\ndef name(value):\n    return os.fspath(value)  # ≤ ℕ\n" * 3
FIM = {"prefix": "def f():\n", "middle": "    return 1\n", "suffix": "\nf()\n"}

SEEDS: dict[str, bytes] = {
    "text.jsonl": lines(text),
    "messages.jsonl": lines(messages),
    "pairs.jsonl": lines(lambda i: {"prompt": PROSE[i % 8], "completion": f"c{i}"}),
    "turns.jsonl": lines(
        lambda i: {
            "prompt": [{"role": "user", "content": "u"}],
            "completion": [{"role": "assistant", "content": f"a{i}"}],
        }
    ),
    "infill.ndjson": lines(lambda i: FIM | {"id": i}),
    "qa.jsonl": lines(lambda i: {"question": PROSE[i % 8], "answer": f"a{i}"}),
    "sharegpt.json": array(sharegpt, indent=2),
    "alpaca.json": array(alpaca),
    "lines.json": lines(alpaca),
    "objects.json": b"\n".join(json.dumps(text(i), indent=1).encode() for i in range(8)),
    "squad.json": squad(),
    "text.csv": table(text),
    "pairs.csv": table(lambda i: {"prompt": PROSE[i % 8], "completion": f"c{i}"}, quoting=csv.QUOTE_ALL),
    "text.tsv": table(text, delimiter="\t"),
    "text.parquet": parquet(text),
    "plain.parquet": parquet(text, compression="none", use_dictionary=False),
    "messages.parquet": parquet(sharegpt, compression="zstd"),
    "note.txt": "\n".join(PROSE).encode(),
    "wiki.train.tokens": ARTICLES.encode(),
    "program.py": PROGRAM.encode(),
    "pages.tar": archive(PAGES),
    "openwebtext.tar": archive(NESTED),
}
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
PACKED = ["text.jsonl", "messages.jsonl", "alpaca.json", "squad.json", "text.csv", "note.txt", "pages.tar"]

# ------------------------------------------------------------------------------------------- what happens to them

VALUES = [b"null", b"5", b"-0.0", b"NaN", b"Infinity", b"-1e999", b"9" * 5000, b"true", b"[]", b"{}", b'""', b'" "', b'"\\ud83d"',
          b'"\\udc00x"', b'"\\u0000"', b'"caf\xe9"', b'"\xed\xa0\x80"', b'[{"role":"assistant"}]', b'{"role":1}', b'"[{]"', b"[[[]]]",
          b'[{"from":"gpt","value":"x"}]', b'"{\\"name\\": \\"\\\\ud83d\\"}"', b"[" * 100_000, b'{"a":' * 100_000, b"'x'", b"1_0",
          b'{"a":1,"a":2}', b"[" * 400 + b'"\\u00e9"' + b"]" * 400, b"[" * 950 + b"]" * 950]  # fmt: skip
SIGNS = [b"\r", b"\r\n", b"\n", b"\n\n", "\u2028".encode(), "\u0085".encode(), b"\x0b", b"\x0c", b"\0", b"\xef\xbb\xbf", b'"', b"'", b",",
         b";", b"\t", b"\\", b"{", b"}", b"[", b"]", b"\x80", b"\xff", b"\xf0\x9f", b"\x1a", b"e\xcc\x81", b"}{", b"\\u", b"PAR1"]  # fmt: skip
MAGIC = [
    b"\x1f\x8b\x08\0",
    b"\xfd7zXZ\0",
    b"\x28\xb5\x2f\xfd",
    b"PAR1",
    b"PK\x03\x04",
    b"BZh9",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"%PDF-1.7\n",
]
JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def cut_the_beginning(data: bytes, rng: random.Random) -> bytes:
    return data[rng.randrange(len(data) + 1) :]


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30)) if data else 0):
        changed[rng.randrange(len(data))] ^= rng.choice((1 << rng.randrange(8), rng.randrange(256)))
    return bytes(changed)


def flip_the_end(data: bytes, rng: random.Random) -> bytes:
    """Where parquet has its footer, zip and gzip their lengths."""
    at = max(0, len(data) - rng.choice((8, 30, 400, 2000)))
    return data[:at] + flip(data[at:], rng)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + rng.choice((bytes(b - a), rng.randbytes(b - a), b"\xff" * (b - a))) + data[b:]


def delete(data: bytes, rng: random.Random) -> bytes:
    a = rng.randrange(len(data) + 1)
    return data[:a] + data[a + rng.choice((1, 2, 10, 100)) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] * rng.choice((1, 2, 50)) + data[b:]


def insert(data: bytes, rng: random.Random, *what: bytes) -> bytes:
    a = rng.randrange(len(data) + 1)
    return data[:a] + rng.choice(what or (*SIGNS, rng.randbytes(20))) + data[a:]


def insert_line(data: bytes, rng: random.Random) -> bytes:
    parts = data.split(b"\n")
    parts.insert(
        rng.randrange(len(parts) + 1),
        rng.choice((*VALUES, *SIGNS, b"not a row", b'{"text":5}', b'{"a":1,"a":2}', b'"open')),
    )
    return b"\n".join(parts)


def a_huge_line(data: bytes, rng: random.Random) -> bytes:
    return insert(data, rng, b"x" * rng.choice((5_000, 300_000)), b"x" * 1_500_000, b" " * 1_200_000, b"\n" * 100_000)


def exchange_lines(data: bytes, rng: random.Random) -> bytes:
    parts = data.split(b"\n")
    rng.shuffle(parts)
    return b"\n".join(parts)


def exchange_sign(data: bytes, rng: random.Random) -> bytes:
    return data.replace(
        rng.choice((b"\n", b'"', b",", b"{", b"}", b":", b" ")), rng.choice(SIGNS), rng.choice((1, 2, -1))
    )


def wrong_value(data: bytes, rng: random.Random) -> bytes:
    found = list(JSON_STRING.finditer(data))
    if not found:
        return insert(data, rng)
    match = rng.choice(found)
    return data[: match.start()] + rng.choice(VALUES) + data[match.end() :]


def wrong_name(data: bytes, rng: random.Random) -> bytes:
    names = [
        b"text",
        b"messages",
        b"role",
        b"content",
        b"prompt",
        b"from",
        b"value",
        b"conversations",
        b"output",
        b"instruction",
        b"data",
    ]
    return data.replace(
        rng.choice(names), rng.choice((*names, b"other", b"tools", b"system", b"history")), rng.choice((1, 3, -1))
    )


def wrong_magic(data: bytes, rng: random.Random) -> bytes:
    magic = rng.choice(MAGIC)
    return magic + data[rng.choice((0, len(magic))) :]


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(
        rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "gb18030")), "replace"
    )


def nothing_of_it(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"",
            b"\n",
            b" \r\n\n",
            b"\0" * 2000,
            rng.randbytes(rng.choice((1, 7, 3000))),
            b"[" * 100_000,
            b"[]",
            b"{}",
            b"null",
        )
    )


def joined(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"", b"\n", b"\0")) + rng.choice(list(SEEDS.values()))


ACCIDENTS = [cut, cut_the_beginning, flip, flip_the_end, overwrite, delete, repeat, insert, insert_line, a_huge_line, exchange_lines,
             exchange_sign, wrong_value, wrong_value, wrong_name, wrong_magic, not_utf8, nothing_of_it, joined]  # fmt: skip

# ----------------------------------------------------------------------------------------- what has to hold


@dataclass
class Outcome:
    """Of reading one file."""

    examples: list[tuple[tuple[int, int], object]]
    states: list[str]
    """The report when each of them came."""
    report: Report
    error: DataError | None


def source_of(path: Path, **settings) -> SourceConfig:
    kind = {".tokens": "wikitext-103", ".py": "code", ".tar": "openwebtext"}.get(
        Path(path.name.split(".", 1)[1]).suffix or path.suffix
    )
    return SourceConfig(source=kind or "files", path=str(path), **settings)


def reading(path: Path, data: DataConfig, start=START, report: Report | None = None, **settings) -> Outcome:
    outcome = Outcome([], [], report or Report(), None)
    outcome.report.quiet = True
    try:
        corpus = open_source(source_of(path, **settings), data, path.parent / "cache", "data.train.0")
        if report is None:
            outcome.report.bad = corpus.bad()
        for position, example in corpus.read(start, outcome.report):
            outcome.examples.append((position, example))
            outcome.states.append(json.dumps(outcome.report.to_dict()))
    except DataError as error:
        where = path.parent if data.code.repository else path
        assert str(where) in str(error), error
        assert len(str(error)) < 4000
        outcome.error = error
    return outcome


def check_types(example) -> None:
    """Everything that comes later is written for these types, and for text that UTF-8 can carry."""
    if isinstance(example, Text):
        assert isinstance(example.text, str | LongText)
    elif isinstance(example, Completion | Infill):
        assert all(isinstance(v, str) for v in vars(example).values())
        assert (example.completion if isinstance(example, Completion) else example.middle).strip()
    else:
        assert isinstance(example, Conversation) and len(example.messages) == len(example.learnt)
        assert any(example.learnt) and example.learnt[-1]
        for message, learnt in zip(example.messages, example.learnt, strict=True):
            assert message["role"] in ("system", "user", "assistant", "tool") and isinstance(message["content"], str)
            assert set(message) <= {"role", "content", "reasoning_content", "tool_calls", "name"}
            assert isinstance(message.get("reasoning_content", ""), str) and isinstance(message.get("name", ""), str)
            for call in message.get("tool_calls", ()):
                assert all(isinstance(call["function"][k], str) for k in ("name", "arguments"))
            assert not learnt or message["role"] == "assistant"
        assert all(isinstance(tool["function"], dict | str) or tool for tool in example.tools)
        json.dumps([example.messages, example.tools], ensure_ascii=False).encode()
    for part in texts(example):
        part.encode("utf-8")


def check_rows_of_lines(
    path: Path, original: bytes, data: bytes, outcome: Outcome, known: dict[bytes, object], form: str
) -> None:
    """A line that nothing happened to gives the row that it gave before."""
    if b"\0" in data or outcome.report.form != form or files._is_json_lines(path) != (path.name != "alpaca.json"):
        return
    there = data.split(b"\n")
    for (_, number), example in outcome.examples:
        line = there[number - 1].rstrip(b"\r")
        assert line not in known or example == known[line], (number, line[:100])
    if outcome.error is None:
        read = {number for (_, number), _ in outcome.examples}
        for number, line in enumerate(there, start=1):
            assert line not in known or number in read, (number, line[:100])


def one_file(path: Path, original: bytes, rng: random.Random, known: dict[str, Outcome], counts: Counter) -> None:
    inner, accidents = original, []
    packer = PACKERS[path.suffix if path.suffix in PACKERS else ""]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        accidents.append(rng.choice(ACCIDENTS))
        inner = accidents[-1](inner, rng)
    data = packer(inner)
    packed_was_hit = packer is not bytes and rng.random() < 0.6
    if packed_was_hit:
        inner, accidents = original, [rng.choice(ACCIDENTS)]
        data = accidents[0](packer(original), rng)
    path.write_bytes(data)
    plain = rng.random() < 0.7
    settings, options = {}, {}
    if not plain:
        settings = {"format": rng.choice(("auto", *FORMATS)), "split": rng.choice((None, "train", "validation")), "holdout": 0.5,
                    "max_documents": rng.choice((None, 3)), "text_field": rng.choice((None, "text", "id")),
                    "completion_field": rng.choice((None, "n", "output"))}  # fmt: skip
        if path.name.startswith("wiki"):
            settings["split"] = "train"
        options = {
            "chat": ChatConfig(learn=rng.choice(("all", "last"))),
            "code": CodeConfig(repository=rng.random() < 0.3),
        }

    for data_config in (
        DataConfig(**options),
        DataConfig(on_bad_row="skip", max_bad_share=rng.choice((0.01, 0.5, 1.0)), **options),
    ):
        outcome = reading(path, data_config, **settings)
        report, bad = outcome.report, outcome.report.bad
        counts[
            f"{'error' if outcome.error else 'rows' if outcome.examples else 'nothing'} {data_config.on_bad_row}"
        ] += 1
        counts["skipped rows"] += bad.bad
        for _, example in outcome.examples:
            check_types(example)
        assert len({position for position, _ in outcome.examples}) == len(outcome.examples) == report.examples
        assert len(bad.listed) == min(bad.bad, 20) and bad.bad + report.examples <= bad.rows
        assert not bad.muted
        if data_config.on_bad_row == "error":
            assert bad.bad == 0
        elif outcome.error is None:
            assert bad.bad <= bad.max_share * bad.rows
        if not plain:
            continue
        before = known[path.name]
        if accidents == [cut]:  # what was read was there, and where the kind tells it, whole
            rows, whole = ([e for _, e in o.examples] for o in (outcome, before))
            kind = Path(path.name.removesuffix(path.suffix) if packer is not bytes else path.name).suffix
            sure = len(rows) - (kind in (".csv", ".tsv", ".txt", ".tokens", ".py") and not packed_was_hit)
            assert rows[: max(sure, 0)] == whole[: max(sure, 0)] and len(rows) <= len(whole)
        if path.suffix in (".jsonl", ".ndjson"):
            lines_known = dict(zip(original.split(b"\n"), [e for _, e in before.examples], strict=False))
            check_rows_of_lines(path, original, data, outcome, lines_known, before.report.form)
        if outcome.error is None and outcome.examples and rng.random() < 0.3:
            i = rng.randrange(len(outcome.examples))
            rest = Report.from_dict(json.loads(outcome.states[i]))
            again = reading(path, data_config, outcome.examples[i][0], rest)
            assert [e for _, e in map(comparable, again.examples)] == [
                e for _, e in map(comparable, outcome.examples[i + 1 :])
            ]
            assert again.report.to_dict() == report.to_dict() and again.error is None
            counts["resumed"] += 1


def comparable(item):
    """Long texts are read again every time; they are the same if their content is."""
    position, example = item
    if isinstance(example, Text) and isinstance(example.text, LongText):
        return position, (example.text.digest, example.text.bytes)
    return item


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs a clock that interrupts")
def test_any_file_ends_in_its_rows_an_error_or_a_counted_skip(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONG_TEXT_BYTES", 1 << 18)
    seeds = [(name, data) for name, data in SEEDS.items()]
    seeds += [(name + ending, SEEDS[name]) for name in PACKED for ending in PACKERS if ending]
    known = {}
    for name, data in seeds:
        (tmp_path / name).write_bytes(PACKERS[Path(name).suffix if Path(name).suffix in PACKERS else ""](data))
        known[name] = reading(tmp_path / name, DataConfig())
        assert known[name].error is None and known[name].examples, (name, known[name].error)
        assert known[name].report.bad.bad == 0

    def too_long(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    counts: Counter = Counter()
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for i in range(FILES):
            name, data = seeds[i % len(seeds)]
            signal.alarm(SECONDS)
            try:
                one_file(tmp_path / name, data, random.Random(f"{SEED} {i}"), known, counts)
            except Exception as error:
                kept = tmp_path / f"failed-{i}-{name}"
                kept.write_bytes((tmp_path / name).read_bytes())
                raise AssertionError(f"file {i} of seed {SEED}, kept as {kept}: {error!r}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    # The accidents are neither all deadly nor all harmless.
    assert (
        min(counts[k] for k in ("error error", "rows error", "error skip", "rows skip", "skipped rows", "resumed"))
        > FILES / 50
    )
    print(dict(counts))
