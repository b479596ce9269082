"""Every kind of file, read as the bytes that it holds."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import archive, error

from deepseek_ft.data import files
from deepseek_ft.data.files import ROW_READERS, BadRows, LongText, kind_of, open_bytes, read_tar, read_text, split_long


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}

# What readers of lines, tables and JSON like to change.
AWKWARD = {
    "crlf": "a\r\nb\r\n",
    "lone carriage returns": "a\rb\r",
    "tabs and trailing blanks": "\tif x:  \n\t\ty\t \n  ",
    "only newlines": "\n\n\na\n\n",
    "unicode line ends": "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei",
    "nul": "a\0b\0",
    "bom at the start": "\ufeffa\n",
    "bom in the middle": "a\ufeffb\n\ufeffc",
    "dates and numbers": "2024-01-31 007 1e5 1_000 0.10 NaN null true -0 12345678901234567890 1,5",
    "emoji": "🙂 👩‍🚀 👨‍👩‍👧‍👦 🇩🇪 ✊🏽",
    "combining marks": "e\u0301 \u0301 한 \u1112\u1161\u11ab ก็ नि",
    "quotes": '"a" \'b\' ""c"" \\" \\n \\u0041 a;b,c|d',
    "markup": "<think>\nx\n</think> {{y}} <|endoftext|> &amp;",
    "private and far": "\ue000\U0010ffff\ufffd\ufffe",
}


def rows_of(path: Path, bad: BadRows | None = None, start: int = 0) -> list[dict]:
    return [row for _, _, row in ROW_READERS[kind_of(path)](path, bad or BadRows(), start)]


def documents_of(path: Path, bad: BadRows | None = None) -> list[str]:
    return list((read_tar if kind_of(path) == "tar" else read_text)(path, bad or BadRows()))


def skipping(share: float = 1.0) -> BadRows:
    return BadRows(skip=True, max_share=share)


def table(rows: list[dict], **settings) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, rows[0], **settings)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet(rows: list[dict] | pa.Table, **settings) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), out, **settings)
    return out.getvalue().to_pybytes()


def lines(rows: list[dict], ascii: bool = False) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=ascii) + "\n" for r in rows).encode()


# ------------------------------------------------------------------------------------------ text as it is


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("name", AWKWARD)
def test_text_is_what_the_file_holds(tmp_path, name, ending):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(PACKERS[ending](AWKWARD[name].encode()))
    assert documents_of(path) == [AWKWARD[name]]


WRITERS = {
    "jsonl": lines,
    "jsonl with escapes": lambda rows: lines(rows, ascii=True),
    "jsonl of crlf lines": lambda rows: lines(rows).replace(b"\n", b"\r\n"),
    "jsonl without a last newline": lambda rows: lines(rows).rstrip(b"\n"),
    "jsonl with blank lines": lambda rows: b"\n \n" + lines(rows).replace(b"\n", b"\n\r\n\n"),
    "jsonl after a bom": lambda rows: b"\xef\xbb\xbf" + lines(rows),
    "ndjson": lines,
    "json array": lambda rows: json.dumps(rows, ensure_ascii=False).encode(),
    "json array of lines": lambda rows: b"[\n" + lines(rows).replace(b"}\n", b"},\n").rstrip(b",\n") + b"\n]\n",
    "json array, indented": lambda rows: json.dumps(rows, ensure_ascii=False, indent=4).encode() + b"\n",
    "json array after a bom": lambda rows: b"\xef\xbb\xbf \n" + json.dumps(rows).encode(),
    "json of lines": lines,
    "json of objects over several lines": lambda rows: b"\n".join(json.dumps(r, indent=1).encode() for r in rows),
    "jsonl of objects over several lines": lambda rows: b"\n".join(json.dumps(r, indent=1).encode() for r in rows),
    "json of objects without a break": lambda rows: b"".join(json.dumps(r).encode() for r in rows),
    "jsonl of objects without a break": lambda rows: b" ".join(json.dumps(r).encode() for r in rows),
    "json object around the rows": lambda rows: json.dumps({"version": "1.0", "data": rows}).encode(),
    "json object around the rows, indented": lambda rows: json.dumps({"data": rows, "n": 3}, indent=2).encode(),
    "json object around the rows, after a break": lambda rows: b"\n\n" + json.dumps({"data": rows}).encode() + b"\n\n",
    "csv": table,
    "csv of quoted fields": lambda rows: table(rows, quoting=csv.QUOTE_ALL),
    "csv of newlines only": lambda rows: table(rows, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "csv with semicolons": lambda rows: table(rows, delimiter=";"),
    "csv after a bom": lambda rows: b"\xef\xbb\xbf" + table(rows),
    "tsv": lambda rows: table(rows, delimiter="\t"),
    "parquet": parquet,
    "parquet of small groups": lambda rows: parquet(rows, row_group_size=2, compression="zstd"),
    "parquet of large strings": lambda rows: parquet(
        pa.table({k: pa.array([r[k] for r in rows], pa.large_string()) for k in rows[0]})
    ),
}


# A parquet file is packed inside.
WRITTEN = [(kind, ending) for kind in WRITERS for ending in PACKERS if not (ending and "parquet" in kind)]


@pytest.mark.parametrize(("kind", "ending"), WRITTEN)
def test_rows_hold_the_text_that_was_written(tmp_path, kind, ending):
    rows = [{"name": name, "text": text} for name, text in AWKWARD.items()]
    if "csv" in kind or "tsv" in kind:  # Python's own writer leaves a lone \r unquoted
        rows = [r for r in rows if r["name"] != "lone carriage returns" or "quoted" in kind]
    path = tmp_path / f"a.{kind.split()[0].rstrip(',')}{ending}"
    path.write_bytes(PACKERS[ending](WRITERS[kind](rows)))
    assert rows_of(path) == rows


def test_numbers_and_dates_of_a_table_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text('id,text,day\n007,1e5,2024-01-31\n1_0,"0,10",\n-0,NaN,null\n')
    assert rows_of(tmp_path / "a.csv") == [
        {"id": "007", "text": "1e5", "day": "2024-01-31"},
        {"id": "1_0", "text": "0,10", "day": ""},
        {"id": "-0", "text": "NaN", "day": "null"},
    ]


def test_a_table_with_an_index_or_a_single_column(tmp_path):
    (tmp_path / "a.csv").write_text(",text\n0,one\n1,two\n")
    assert [r["text"] for r in rows_of(tmp_path / "a.csv")] == ["one", "two"]
    (tmp_path / "b.csv").write_text("text\none; two\nthree\tfour\n")
    assert [r["text"] for r in rows_of(tmp_path / "b.csv")] == ["one; two", "three\tfour"]
    (tmp_path / "c.csv").write_text('"a\nb",text\n1,x\n')
    assert rows_of(tmp_path / "c.csv") == [{"a\nb": "1", "text": "x"}]


def test_values_in_parquet_keep_their_types(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hi", "weight": None}, {"role": "assistant", "content": "yo", "weight": 1.0}],
             "n": 3, "pairs": [["a", "b"]], "none": None}]  # fmt: skip
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    assert rows_of(tmp_path / "a.parquet") == rows


# ------------------------------------------------------------------------------------------ what a file is


def test_what_packs_a_file_is_seen_in_its_bytes_not_in_its_name(tmp_path):
    for ending, pack in PACKERS.items():
        (tmp_path / "a.jsonl").write_bytes(pack(b'{"text":"a"}\n'))
        assert rows_of(tmp_path / "a.jsonl") == [{"text": "a"}], ending
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"text":"never packed"}\n')
    assert rows_of(tmp_path / "b.jsonl.gz") == [{"text": "never packed"}]
    (tmp_path / "c.bin").write_bytes(parquet([{"text": "a"}]))
    assert kind_of(tmp_path / "c.bin") == "parquet"


def test_archives_that_were_joined_are_read_to_the_end(tmp_path):
    for ending in (".gz", ".xz", ".zst"):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(b"".join(PACKERS[ending](b'{"text":"%d"}\n' % i) for i in range(3)))
        assert rows_of(path) == [{"text": "0"}, {"text": "1"}, {"text": "2"}]


def test_squad_is_read_by_its_paragraphs(tmp_path):
    paragraphs = [{"context": f"passage {i}", "qas": [{"question": "q", "answers": []}]} for i in range(3)]
    data = [{"title": "t", "paragraphs": paragraphs[:2]}, {"title": "u", "paragraphs": paragraphs[2:]}]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps({"version": "1.1", "data": data}, indent=indent))
        assert rows_of(tmp_path / "a.json") == paragraphs


def test_a_list_in_a_row_is_not_taken_for_the_rows(tmp_path):
    row = {"text": "learn this", "sources": [{"text": "not this"}]}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for rows in ([row], [row, row], [chat], [{"instruction": "i", "output": "o", "tools": [{"name": "f"}]}]):
        for indent in (None, 1):
            (tmp_path / "a.json").write_text("\n".join(json.dumps(r, indent=indent) for r in rows))
            assert rows_of(tmp_path / "a.json") == rows
    rows = [{"title": "a", "parts": [{"x": 1}]}, {"title": "b", "parts": [{"x": 2}]}]
    (tmp_path / "a.json").write_text("\n".join(json.dumps(r, indent=1) for r in rows))
    assert rows_of(tmp_path / "a.json") == rows
    mixed = [{"paragraphs": 5}, {"paragraphs": []}, {"paragraphs": [1]}, {"paragraphs": [{"context": "c"}]}]
    (tmp_path / "a.json").write_text(json.dumps({"data": mixed}))
    assert rows_of(tmp_path / "a.json") == [*mixed[:3], {"context": "c"}]


def test_rows_larger_than_any_buffer(tmp_path):
    rows = [{"text": "x" * 3_000_000}, {"text": "é\\n" * 900_000}, {"text": "short"}]
    for kind in ("jsonl", "json array", "json array, indented", "json of objects over several lines", "csv", "parquet"):
        path = tmp_path / f"a.{kind.split()[0].rstrip(',')}"
        path.write_bytes(WRITERS[kind](rows))
        assert rows_of(path) == rows, kind


def test_values_cut_by_the_end_of_a_buffer_are_whole(tmp_path):
    """Escapes, numbers, words and characters of several bytes, each of them across the border of what is read at once."""
    tail = '", "k": [true, null, -12.5e3, "\\u00e9\\ud83d\\ude42\\\\é🙂", {"b": false}]}'
    for i in range(0, len(tail) + 4):
        text = '[{"a": "' + "x" * ((1 << 20) - 8 - i) + tail + ', {"a": 123}]'
        (tmp_path / "a.json").write_text(text)
        assert rows_of(tmp_path / "a.json") == json.loads(text), i


def test_many_small_rows_of_an_array(tmp_path):
    """Their lines are counted as they come: from the beginning for each, this would take minutes."""
    rows = [{"text": str(i)} for i in range(200_000)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=0))
    lines = [line for _, line, _ in ROW_READERS["json"](tmp_path / "a.json", BadRows(), 0)]
    assert len(lines) == 200_000 and lines == sorted(lines) and lines[:2] == [2, 5]


def test_a_key_given_twice_among_many_is_found_at_once(tmp_path):
    keys = ", ".join(f'"k{i}": 1' for i in range(100_000))
    (tmp_path / "a.jsonl").write_text(f'{{{keys}, "k99999": 2}}\n')
    error(lambda: rows_of(tmp_path / "a.jsonl"), "a.jsonl:1", "'k99999' is given twice")


def test_openwebtext_as_it_ships(tmp_path):
    """A tar of .xz archives, each of .txt files; and such an .xz by itself."""

    pages = {f"{i:07}-{'ab' * 16}.txt": f"page {i}\r\n\u2028 é\n".encode() for i in range(5)}
    first, second = dict(list(pages.items())[:2]), dict(list(pages.items())[2:])
    inner = {"openwebtext/urlsf_subset00-1_data.xz": archive(first, "w:xz"), "openwebtext/README": b"not a page",
             "openwebtext/urlsf_subset00-2_data.xz": archive(second, "w:xz")}  # fmt: skip
    wanted = [p.decode() for p in pages.values()]
    for name, data in {"openwebtext.tar": archive(inner, "w"), "openwebtext.tar.xz": archive(inner, "w:xz"),
                       "openwebtext.tgz": archive(inner, "w:gz"), "openwebtext.tar.zst": zstd(archive(inner, "w")),
                       "urlsf_subset00-1_data.xz": archive(pages, "w:xz")}.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert documents_of(tmp_path / name) == wanted, name

    inner["openwebtext/urlsf_subset00-1_data.xz"] = archive(first, "w:xz")[:-100]
    (tmp_path / "a.tar").write_bytes(archive(inner, "w"))
    error(lambda: documents_of(tmp_path / "a.tar"), "a.tar!openwebtext/urlsf_subset00-1_data.xz")
    bad = skipping()
    assert documents_of(tmp_path / "a.tar", bad)[-3:] == wanted[2:] and bad.bad == 1
    (tmp_path / "b.tar").write_bytes(archive({"x.txt": b"ok", "y.txt": b"one\ncaf\xe9"}, "w"))
    error(lambda: documents_of(tmp_path / "b.tar"), "b.tar!y.txt:2", "0xe9")
    assert documents_of(tmp_path / "b.tar", skipping()) == ["ok"]


def test_files_that_hold_nothing(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv"):
        for content in (b"", b"\n\n", b" \r\n"):
            (tmp_path / name).write_bytes(content)
            assert rows_of(tmp_path / name, skipping()) == [], (name, content)
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.csv").write_text("text,n\n")
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"text": pa.array([], pa.string())})))
    assert rows_of(tmp_path / "a.json") == rows_of(tmp_path / "a.csv") == rows_of(tmp_path / "a.parquet") == []
    (tmp_path / "a.txt").write_bytes(b"")
    assert documents_of(tmp_path / "a.txt") == [""]


# --------------------------------------------------------------------------------------- what goes wrong

OK = b'{"text":"ok"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("a.jsonl", OK + b'{"text":"b', ["a.jsonl:2", "not valid JSON", '{"text":"b']),
     ("a.jsonl", OK + b'{"text":"one","text":"two"}', ["a.jsonl:2", "'text' is given twice"]),
     ("a.jsonl", b'\n\n{"m":{"k":1,"k":2}}', ["a.jsonl:3", "'k' is given twice"]),
     ("a.jsonl", OK + b'{"text":"\\ud83d"}', ["a.jsonl:2", "surrogate"]),
     ("a.jsonl", OK + b'{"m":[{"\\udc00":[["x"]]}]}', ["a.jsonl:2", "surrogate"]),
     ("a.jsonl", OK + b'{"text":"caf\xe9"}', ["a.jsonl:2", "not UTF-8", "0xe9", "exclude"]),
     ("a.jsonl", OK + b'{"text":"\xed\xa0\xbd"}', ["a.jsonl:2", "not UTF-8", "0xed"]),
     ("a.jsonl", OK + b'{"text":"a\x0bb"}', ["a.jsonl:2", "control character"]),
     ("a.jsonl", OK + b'"text"', ["a.jsonl:2", 'holds "text"', "not an object"]),
     ("a.jsonl", OK + b'{"text":"a"} {"text":"b"}', ["a.jsonl:2", "Extra data"]),
     ("a.jsonl", OK + b"{'text':'a'}", ["a.jsonl:2", "not valid JSON", "{'text'"]),
     ("a.jsonl", OK + b'{"text":"ok","n":' + b"9" * 5000 + b"}", ["a.jsonl:2", "not valid JSON", "digits"]),
     ("a.jsonl", OK + b"[" * 100_000, ["a.jsonl:2", "not valid JSON", "recursion"]),
     ("a.jsonl", '{"text":"ok"}\n'.encode("utf-16"), ["a.jsonl:1", "not UTF-8", "0xff"]),
     ("a.jsonl", b"\0" * 100, ["a.jsonl:1", "not valid JSON"]),
     ("a.jsonl", b"<!DOCTYPE html>\n<html>", ["a.jsonl:1", "<!DOCTYPE html>"]),
     ("a.json", b'[\n{"text":"ok"},\n{"text":"b', ["a.json:3", "not valid JSON", '{"text":"b']),
     ("a.json", b'[\n{"text":"ok"},\n', ["a.json:3", "cut off"]),
     ("a.json", b'[\n{"text":"ok"}\n]\n{"text":"b"}', ["a.json:4", "after the array's end"]),
     ("a.json", b'[\n{"text":"ok"},\n{"text":"a","text":"b"}]', ["a.json:3", "'text' is given twice"]),
     ("a.json", b'[\n{"text":"ok"},\n{"text":"\\ud83d"}]', ["a.json:3", "surrogate"]),
     ("a.json", b'[\n{"text":"ok"},\n{"text":"caf\xe9"}]', ["a.json:3", "not UTF-8", "xe9"]),
     ("a.json", b'[\n{"text":"ok"},\n"b"]', ["a.json:3", 'holds "b"', "not an object"]),
     ("a.json", b'[\n{"text":"ok"},\n{"text":b}]', ["a.json:3", "Expecting value"]),
     ("a.json", b'[\n{"text":"ok"},\n' + b"[" * 100_000, ["a.json:3", "not valid JSON", "recursion"]),
     ("a.json", b'[\n{"text":"ok"},\n{"n":' + b"9" * 5000 + b"}]", ["a.json:3", "digits"]),
     ("a.json", b"5", ["a.json:1", "holds 5"]), ("a.json", b"nonsense", ["a.json:1", "nonsense"]),
     ("a.csv", b"text,n\nok,1\na,b,c\n", ["a.csv:3", "3 fields", "the header has 2: text,n"]),
     ("a.csv", b'text,n\n"two\nlines",1\nshort\n', ["a.csv:4", "1 fields"]),
     ("a.csv", b'text,n\n"a"b,1\n', ["a.csv:2", "not a row of a table"]),
     ("a.csv", b'text,n\nok,1\n"never closed,1\nx,2\n', ["a.csv:3", "unexpected end of data"]),
     ("a.csv", b"text,n\na\rb,1\n", ["a.csv:2", "new-line character"]),
     ("a.csv", b"text,n\ncaf\xe9,1\n", ["a.csv:2", "not UTF-8"]),
     ("a.csv", b"text,text\na,b\n", ["a.csv:1", "repeated", "text,text"]),
     ("a.csv", b"t\xe9xt,n\na,b\n", ["a.csv:1", "not UTF-8"]),
     ("a.csv", "text,n\nok,1\n".encode("utf-16"), ["a.csv:1", "not UTF-8"]),
     ("a.parquet", b"PAR1 nonsense", ["a.parquet", "parquet"]), ("a.parquet", b"", ["a.parquet", "parquet"])],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_file_and_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = error(lambda: rows_of(tmp_path / name), *words)
    assert len(message) < 600
    if "header" not in message:
        assert "data.on_bad_row=skip" in message


@pytest.mark.parametrize("long", [False, True])
def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path, monkeypatch, long):
    if long:
        monkeypatch.setattr(files, "LONG_TEXT_BYTES", 4)
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\r\ncaf\xe9\n")
    error(lambda: documents_of(tmp_path / "a.txt"), "a.txt:3", "not UTF-8", "0xe9", "exclude")
    (tmp_path / "a.txt").write_bytes("cut in a character é".encode()[:-1])
    error(lambda: documents_of(tmp_path / "a.txt"), "a.txt:1", "0xc3")
    (tmp_path / "a.txt").write_bytes("as a Windows program saves it\r\n".encode("utf-16"))
    bad = skipping()
    assert documents_of(tmp_path / "a.txt", bad) == [] and bad.bad == 1


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_a_packed_file_that_is_cut_off_gives_its_whole_rows_and_says_so(tmp_path, ending):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(3000)]
    packed = PACKERS[ending](lines(rows))
    for kind, reader in (("a.jsonl", rows_of), ("a.txt", documents_of)):
        for cut in (len(packed) // 2, len(packed) - 3):
            path = tmp_path / f"{kind}{ending}"
            path.write_bytes(packed[:cut])
            error(lambda: reader(path), f"{kind}{ending}", "cannot be read")  # noqa: B023
            bad = skipping()
            got = reader(path, bad)
            assert bad.bad == 1 and got == (rows[: len(got)] if kind == "a.jsonl" else [])
    path = tmp_path / f"a{ending}"  # nothing in the name says what it is
    path.write_bytes(packed[:20])
    error(lambda: documents_of(path), f"a{ending}", "cannot be read")


def test_parquet_names_the_one_row_that_cannot_be_read(tmp_path):
    values = [b"one", b"caf\xe9", b"three"]
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array(values, pa.binary()).buffers())
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"text": broken})))
    error(lambda: rows_of(tmp_path / "a.parquet"), "a.parquet: row 2", "cannot be read")
    bad = skipping()
    assert rows_of(tmp_path / "a.parquet", bad) == [{"text": "one"}, {"text": "three"}] and bad.bad == 1
    years = pa.array([0, 1 << 61], pa.timestamp("ms"))
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"text": ["a", "b"], "when": years})))
    error(lambda: rows_of(tmp_path / "a.parquet"), "a.parquet: row 2")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    (tmp_path / "a.parquet").write_bytes(parquet(twice))
    error(lambda: rows_of(tmp_path / "a.parquet"), "a.parquet", "'text' is there twice")


# ------------------------------------------------------------------------------------ rows that are skipped


@pytest.mark.parametrize(
    ("name", "content", "wanted", "named"),
    [("a.jsonl", OK + b"{\n" + OK + b'{"text":"caf\xe9"}\n[]\n' + OK, 3, ["a.jsonl:2", "a.jsonl:4", "a.jsonl:5"]),
     ("a.json", b'[{"text":"ok"},\n5,\n{"text":"ok"},\n{"text":"\\ud83d"},\n{"k":1,"k":2},\n{"text":"\xe9"},\n{"text":"ok"}]', 3,
      ["a.json:2", "a.json:4", "a.json:5", "a.json:6"]),
     ("a.csv", b'text,n\nok,1\nx\nok,2\n"a"b,1\nok,3\n\xe9,1\n', 3, ["a.csv:3", "a.csv:5", "a.csv:7"])],
)  # fmt: skip
def test_skipped_rows_are_counted_and_listed(tmp_path, name, content, wanted, named):
    (tmp_path / name).write_bytes(content)
    bad = skipping()
    assert [r["text"] for r in rows_of(tmp_path / name, bad)] == ["ok"] * wanted
    assert [line.split(": ")[0].rpartition("/")[2] for line in bad.listed] == named
    assert bad.bad == bad.rows == len(named)  # good rows are counted by who uses them


def test_too_many_bad_rows_stop_the_reading(tmp_path):
    bad = skipping(0.01)
    for i in range(999):
        bad("a", f"why {i}")  # too early to judge
    assert len(bad.listed) == 20 and bad.bad == 999
    message = error(lambda: bad("a", "why"), "1,000 of 1,000 rows", "data.max_bad_share=0.01", "a: why 0", "a: why 4")
    assert "why 5" not in message
    few = BadRows(skip=True, max_share=0.01, rows=100)
    few("a", "why")
    few.check()
    few("a", "why")
    error(few.check, "2 of 102 rows")
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 5000)
    error(lambda: rows_of(tmp_path / "a.jsonl", skipping(0.5)), "1,000 of 1,000", "a.jsonl:1: ")
    BadRows().check()


# ------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize(("kind", "ending"), [w for w in WRITTEN if w[1] in ("", ".gz")])
def test_reading_goes_on_after_any_row(tmp_path, kind, ending):
    path = tmp_path / f"a.{kind.split()[0].rstrip(',')}{ending}"
    path.write_bytes(PACKERS[ending](WRITERS[kind]([{"text": f"line {i}\nx"} for i in range(7)])))
    reader = ROW_READERS[kind_of(path)]
    whole = list(reader(path, BadRows()))
    assert len(whole) == 7 and [p for p, _, _ in whole] == sorted({p for p, _, _ in whole})
    for i, (position, _, _) in enumerate(whole):
        assert list(reader(path, BadRows(), position)) == whole[i + 1 :]


def test_a_long_parquet_file_goes_on_inside_a_group(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet([{"n": i} for i in range(3000)], row_group_size=1300))
    for start in (0, 1, 511, 512, 513, 1299, 1300, 1301, 2999, 3000):
        assert [r["n"] for r in rows_of(path, start=start)] == list(range(start, 3000))


# ------------------------------------------------------------------------------------------ long documents

POEM = "Ein Satz, noch einer.\n\n  indented\r\n为什么？\n因为。\nnaïve\u2028x\n" * 40_000  # 2.6 M characters


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("size", [1000, 1 << 20, 1 << 30])
def test_pieces_of_a_long_text_join_to_it(tmp_path, monkeypatch, ending, size):
    monkeypatch.setattr(files, "LONG_TEXT_BYTES", 1000)
    data = os.urandom(40).hex().encode() + POEM.encode()
    (tmp_path / f"a.txt{ending}").write_bytes(PACKERS[ending](data))
    [text] = documents_of(tmp_path / f"a.txt{ending}")
    assert isinstance(text, LongText) and not text.blank and text.bytes == len(data)
    assert text.digest == hashlib.blake2b(data, digest_size=8).digest()
    pieces = list(text.pieces(size))
    assert "".join(pieces).encode() == data and list(text.pieces(size)) == pieces
    assert len(pieces) >= len(POEM) // max(size, 1 << 20) and all(pieces)
    assert all(p[-1] == "\n" and q[0].isalpha() for p, q in zip(pieces, pieces[1:], strict=False))


def test_a_text_is_long_or_short_by_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONG_TEXT_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "b.txt").write_bytes(b" " * 101)
    assert documents_of(tmp_path / "a.txt") == ["x" * 100]
    assert documents_of(tmp_path / "b.txt")[0].blank
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x" * 101))  # a small file
    assert documents_of(tmp_path / "c.txt.gz")[0].bytes == 101
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"x" * 100))
    assert documents_of(tmp_path / "d.txt.gz") == ["x" * 100]


def test_a_piece_ends_where_a_line_begins_with_a_letter():
    text = "one\ntwo\n three\n\nfour\n5\n_six\nséven\n的\n"
    assert split_long(text, 1) == ["one\n", "two\n three\n\nfour\n5\n_six\n", "séven\n", "的\n"]
    assert split_long("", 5) == [""] and split_long("abc", 3) == ["abc"]
    assert split_long("no seam in it " * 100, 10) == ["no seam in it " * 100]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_what_is_split_joins_to_the_text(size):
    for text in [*AWKWARD.values(), POEM[:20_000], "\n".join(AWKWARD.values())]:
        assert "".join(split_long(text, size)) == text


def test_a_text_without_any_seam_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(files, "_NO_SEAM", 1000)
    text = "0123456789" * 500
    pieces = split_long(text, 100)
    assert "".join(pieces) == text and len(pieces) > 30 and max(map(len, pieces)) <= 1000


def test_bytes_are_read_in_any_portions(tmp_path):
    data = os.urandom(1_200_000)
    for ending, pack in PACKERS.items():
        (tmp_path / "a").write_bytes(pack(data))
        with open_bytes(tmp_path / "a") as file:
            assert file.read(1) + file.read(0) + file.read(599_999) + file.read() == data, ending
            assert file.read() == b""
