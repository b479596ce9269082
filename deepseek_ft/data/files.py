"""A file's bytes -> its rows or its text.

What is compressed or how rows are written is seen in the bytes; a file's name only decides where these leave it open.
Nothing is translated: line ends, indentation, marks and numbers in text arrive as they were written. Only \\n ends a
line. A row that cannot be read is named with file and line, and `BadRows` decides whether that ends the run.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DataError

LONG_TEXT_BYTES = 32 << 20
"""A text file above this is read in pieces; what is below is one string."""
_NO_SEAM = 16 << 20  # characters without a seam that are still waited for; then one token may be cut in two
_LISTED = 20  # bad rows that are told one by one
BROKEN = (OSError, EOFError, lzma.LZMAError, tarfile.TarError, zlib.error)
_PACKED = (b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, xz, zstandard


@dataclass
class BadRows:
    """What could not be read so far, and what is done about it."""

    skip: bool = False
    """Count and go on; otherwise the first one is a DataError."""
    max_share: float = 0.01
    rows: int = 0
    """Rows seen, good and bad."""
    bad: int = 0
    listed: list[str] = field(default_factory=list)
    muted = False
    """While what was counted before is read once more."""
    read_bytes = 0
    """How much of the file in hand has been read: for those who wait."""

    def __call__(self, where: str, why: str) -> None:
        """
        Raises:
            DataError: unless bad rows are skipped, and they are few.
        """
        if self.muted:
            return
        why = why if len(why) <= 500 else f"{why[:500]} ..."  # a row says what it likes
        if not self.skip:
            raise DataError(f"{where}: {why}\n  data.on_bad_row=skip leaves such rows out and counts them")
        self.rows += 1
        self.bad += 1
        if len(self.listed) < _LISTED:
            self.listed.append(f"{where}: {why}")
        if self.rows >= 1000:
            self.check()

    def check(self) -> None:
        """
        Raises:
            DataError: more than `max_share` of the rows were bad.
        """
        if self.bad > self.max_share * self.rows:
            shown = "\n  - ".join(self.listed[:5])
            raise DataError(f"{self.bad:,} of {self.rows:,} rows cannot be used, more than data.max_bad_share="
                            f"{self.max_share:g}; the first:\n  - {shown}")  # fmt: skip


# ------------------------------------------------------------------------------------------------------ bytes


def _magic(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(6)


@contextlib.contextmanager
def open_bytes(path: Path, bad: BadRows | None = None) -> Iterator[BinaryIO]:
    """A file's content, unpacked if its first bytes say gzip, xz or zstandard; `bad.read_bytes` follows the reading."""
    magic = _magic(path)
    with io.BufferedReader(_Counted(path, bad or BadRows()), 1 << 20) as file:
        if magic.startswith(_PACKED[0]):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        elif magic.startswith(_PACKED[1]):
            with lzma.LZMAFile(file) as unpacked:
                yield unpacked
        elif magic.startswith(_PACKED[2]):
            import pyarrow as pa

            # The one zstd that comes with what is installed anyway. Its stream has no readinto of its own.
            stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
            with io.BufferedReader(_Raw(stream), 1 << 20) as unpacked:
                yield unpacked
        else:
            yield file


class _Counted(io.FileIO):
    def __init__(self, path: Path, bad: BadRows):
        super().__init__(path)
        self.bad, bad.read_bytes = bad, 0

    def readinto(self, buffer) -> int:
        n = super().readinto(buffer)
        self.bad.read_bytes += n
        return n


class _Raw(io.RawIOBase):
    def __init__(self, stream):
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        import pyarrow as pa

        try:
            data = self.stream.read(len(buffer))
        except pa.ArrowException as error:
            raise OSError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


class NotUTF8(ValueError):
    def __init__(self, error: UnicodeDecodeError, lines_before: int = 0):
        super().__init__(
            f"not UTF-8: byte 0x{error.object[error.start]:02x}; convert the file, or leave it out with `exclude`"
        )
        self.line = lines_before + error.object.count(b"\n", 0, error.start) + 1


def decode(data: bytes) -> str:
    """
    Raises:
        NotUTF8: it is not; its `line` says where.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotUTF8(error) from None


def _ending(path: Path) -> str:
    """What a file is called by, whatever packs it: `json` of `a.json.gz`."""
    names = path.name.lower().split(".")
    while names and names[-1] in ("gz", "xz", "zst", "zstd"):
        names.pop()
    return names[-1] if len(names) > 1 else ""


def kind_of(path: Path) -> str:
    """`json`, `csv`, `parquet`, `tar` or `text`; of a file that cannot be read, what its name says."""
    ending = _ending(path)
    try:
        magic = _magic(path)
        if magic.startswith(b"PAR1") or ending == "parquet":
            return "parquet"
        if ending in ("jsonl", "ndjson", "json"):
            return "json"
        if ending in ("csv", "tsv"):
            return "csv"
        if ending in ("tar", "tgz"):
            return "tar"
        if magic.startswith(_PACKED):
            with open_bytes(path) as file:
                if file.read(512)[257:262] == b"ustar":
                    return "tar"
    except BROKEN:
        pass  # whoever reads it says so
    return "text"


# ------------------------------------------------------------------------------------------------------- text


class LongText:
    """A document too long to hold: a file that is read again for every use."""

    def __init__(self, path: Path, bad: BadRows):
        self.path, self.bad = path, bad
        digest, self.blank, self.bytes = hashlib.blake2b(digest_size=8), True, 0
        decoder, line = codecs.getincrementaldecoder("utf-8")(), 0
        with open_bytes(path, bad) as file:
            while True:
                chunk = file.read(1 << 22)
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    raise NotUTF8(error, line) from None
                self.blank = self.blank and not text.strip()
                line += text.count("\n")
                digest.update(text.encode())
                self.bytes += len(chunk)
                if not chunk:
                    break
        self.digest = digest.digest()

    def pieces(self, size: int = 1 << 20) -> Iterator[str]:
        """The text in pieces of about `size` characters, cut where no token can reach over: see `split_long`."""
        decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
        with open_bytes(self.path, self.bad) as file:
            while chunk := file.read(1 << 20):
                held += decoder.decode(chunk)
                *whole, held = split_long(held, size)
                yield from whole
        held += decoder.decode(b"", final=True)
        if held:
            yield held


# Every pre-tokenizer of the DeepSeek families (and GPT-2's, Llama 3's, Qwen's) ends a word between a line's end and a
# letter that begins the next line, so no token reaches over it. `tokenise.cuts_safely` proves it for the one in use.
_SEAM = re.compile(r"(?<=\S\n)(?=[^\W\d_])")


def split_long(text: str, size: int) -> list[str]:
    """Pieces of `size` characters and a little more, that join to the text; one piece if there is no seam."""
    pieces, start = [], 0
    while len(text) - start > size:
        seam = _SEAM.search(text, start + size)
        if seam is None and len(text) - start < _NO_SEAM:
            break
        end = seam.start() if seam else start + size
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def read_text(path: Path, bad: BadRows) -> Iterator[str | LongText]:
    """One file, one document."""
    try:
        with open_bytes(path, bad) as file:
            data = file.read(LONG_TEXT_BYTES + 1)  # unpacked: a small file may hold a long text
        document = decode(data) if len(data) <= LONG_TEXT_BYTES else LongText(path, bad)
    except NotUTF8 as error:
        bad(f"{path}:{error.line}", str(error))
    except BROKEN as error:
        bad(str(path), f"cannot be read: {error}")
    else:
        yield document


def read_tar(path: Path, bad: BadRows) -> Iterator[str]:
    """OpenWebText's own layout: tar archives of .txt files, or of further .xz archives of them."""

    def texts(stream: BinaryIO, mode: str, name: str) -> Iterator[str]:
        count = 0
        try:
            with tarfile.open(fileobj=stream, mode=mode) as archive:
                for member in archive:
                    count += 1
                    if not member.isfile():
                        continue
                    where = f"{name}!{member.name[-200:]}"
                    if mode == "r|" and member.name.endswith(".xz"):
                        yield from texts(io.BytesIO(archive.extractfile(member).read()), "r:xz", where)
                    elif mode != "r|" or member.name.endswith(".txt"):
                        try:
                            text = decode(archive.extractfile(member).read())
                        except NotUTF8 as error:
                            bad(f"{where}:{error.line}", str(error))
                        else:
                            yield text
        except (*BROKEN, ValueError, OverflowError, RecursionError) as error:  # tarfile trusts what a header says
            bad(name, f"cannot be read as an archive of texts after {count} members: {error}")

    try:
        with open_bytes(path, bad) as stream:
            yield from texts(stream, "r|", str(path))
    except BROKEN as error:
        bad(str(path), f"cannot be read: {error}")


# ------------------------------------------------------------------------------------------------------- rows


Row = tuple[int, int, dict]
"""Position in the file, by which a reader can go on after it (`start`); line or row number for people, from 1; fields."""


class _Repeated(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Repeated(f"the key {twice[:60]!r} is given twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
_LENIENT = json.JSONDecoder(parse_int=str)
"""Only finds where a value ends, whatever is wrong in it."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def half_character(value: Any) -> bool:
    """Whether any text in it holds a lone surrogate, which no UTF-8 and no tokenizer can carry."""
    values = [value]
    while values:  # not by recursion: it may be nested as deeply as the parser allows
        value = values.pop()
        if isinstance(value, str):
            if not value.isascii() and _SURROGATE.search(value):
                return True
        elif isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
    return False


def _parse(text: str) -> Any:
    """
    Raises:
        ValueError: why it is no JSON, with the first 80 characters.
    """
    shown = text[:80].strip()
    try:
        value = _DECODER.decode(text)
    except _Repeated as error:
        raise ValueError(f"{error}: {shown}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos + 1}): {shown}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}): {shown}") from None
    if "\\u" in text and half_character(value):
        raise ValueError(f"half a character (a lone surrogate): {shown}")
    return value


def short(value: Any) -> str:
    """A value as a message shows it."""
    try:
        return json.dumps(value, ensure_ascii=False)[:60]
    except (TypeError, ValueError, RecursionError):  # bytes, dates, or nested too deeply
        return (repr(value) if not isinstance(value, list | dict) else f"a nested {type(value).__name__}")[:60]


def _row(value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"holds {short(value)}, not an object with named fields")
    return value


def _json_lines(file: BinaryIO, path: Path, bad: BadRows, start: int) -> Iterator[Row]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if number <= start or not line.strip():
                continue
            try:
                row = _row(_parse(decode(line)))
            except ValueError as error:
                bad(f"{path}:{number}", str(error))
                continue
            yield number, number, row
    except BROKEN as error:
        bad(f"{path}:{number + 1}", f"cannot be read: {error}; nothing after it is read")


class _Values:
    """JSON values in a text that is read as far as they need it."""

    _SPACE = re.compile(r"[ \t\r\n]*")

    def __init__(self, file: BinaryIO):
        self.file, self.text, self.at, self._more = file, "", 0, True
        # Not every byte need be UTF-8 for the values to be found; the row that has the wrong one is named.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._line, self._counted = 1, 0

    def line(self, at: int) -> int:
        """The line of a character; `at` never goes back."""
        self._line += self.text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def _fill(self, size: int = 1 << 20) -> None:
        self.line(self.at)
        data = self.file.read(size)
        self._more = bool(data)
        self.text = self.text[self.at :] + self._decoder.decode(data, final=not data)
        self.at = self._counted = 0

    def sign(self) -> str:
        """The next character that is no white space; nothing at the end."""
        while True:
            self.at = self._SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or not self._more:
                return self.text[self.at : self.at + 1]
            self._fill()

    def next(self) -> tuple[Any, ValueError | None, str]:
        """The value that begins here, what is wrong in it, and its own text.

        Raises:
            ValueError: nobody can tell where it ends.
        """
        size = 1 << 20
        while True:
            problem = None
            try:
                try:
                    value, end = _DECODER.raw_decode(self.text, self.at)
                except json.JSONDecodeError:
                    raise
                except ValueError as error:
                    problem = error
                    value, end = _LENIENT.raw_decode(self.text, self.at)
                # A number at the buffer's end may go on; objects and arrays are closed.
                if end < len(self.text) or self.text[end - 1] in "}]" or not self._more:
                    raw, self.at = self.text[self.at : end], end
                    return value, problem, raw
            except RecursionError as error:
                raise ValueError(str(error)) from None
            except json.JSONDecodeError as error:
                # Wrong in the middle is wrong; wrong near the end, or a string without an end, may be unfinished.
                if not self._more or (error.pos < len(self.text) - 64 and "Unterminated" not in error.msg):
                    raise
            size *= 2  # a long value is tried again: not too often
            self._fill(size)


def _json_values(file: BinaryIO, path: Path, bad: BadRows, start: int) -> Iterator[Row]:
    """Rows of a top-level array, or values one after the other that reach over lines. The number is that of a line."""
    values, position = _Values(file), 0

    def wrong(line: int, why: str) -> None:
        if position >= start:  # otherwise it was counted before
            bad(f"{path}:{line}", why)

    try:
        in_array = values.sign() == "["
        values.at += in_array
        first = True
        while sign := values.sign():
            if in_array and sign == "," and not first:
                values.at += 1
                continue
            if in_array and sign == "]":
                values.at += 1
                if values.sign():
                    shown = values.text[values.at : values.at + 80].strip()
                    wrong(values.line(values.at), f"text after the array's end: {shown}")
                return
            number = values.line(values.at)
            try:
                value, problem, raw = values.next()
            except ValueError as error:
                shown = values.text[values.at : values.at + 80].strip()
                if isinstance(error, json.JSONDecodeError):
                    number, error = values.line(max(error.pos, values.at)), error.msg
                wrong(number, f"not valid JSON ({error}); nothing after it is read: {shown}")
                return
            try:
                if not raw.isascii() and _SURROGATE.search(raw):
                    raise ValueError(f"not UTF-8: {raw[:80].strip().encode('utf-8', 'surrogateescape')!r}")
                if problem:
                    raise ValueError(f"not valid JSON ({problem}): {raw[:80].strip()}")
                if "\\u" in raw and half_character(value):
                    raise ValueError(f"half a character (a lone surrogate): {raw[:80].strip()}")
                rows = [_row(value)]
                inner = _unfolded(value) if first and not in_array else []
                if inner and not values.sign():  # nothing else is in the file
                    rows = inner
            except ValueError as error:
                wrong(number, str(error))
                rows = []
            first = False
            for row in rows:
                position += 1
                if position > start:
                    yield position, number, row
        if in_array:
            wrong(values.line(values.at), "the array has no end: the file is cut off")
    except BROKEN as error:
        wrong(values.line(values.at), f"cannot be read: {error}; nothing after it is read")


# An object with one of these is a row, and a list in it is part of the row.
_ROW_NAMES = {
    "messages", "conversations", "conversation", "text", "content", "code", "document", "passage", "context", "prompt",
    "query", "instruction", "question",
}  # fmt: skip


def _unfolded(value: dict) -> list[dict]:
    """The rows in a file that is one object around them, such as SQuAD's."""
    lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(i, dict) for i in v)]
    if len(lists) != 1 or not _ROW_NAMES.isdisjoint(value):
        return []
    rows: list[dict] = []
    for item in lists[0]:
        inner = item.get("paragraphs")
        nested = isinstance(inner, list) and inner and all(isinstance(p, dict) for p in inner)
        rows += inner if nested else [item]
    return rows


def read_json(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    """Rows of JSON lines, of a top-level array, or of one object around them."""
    try:
        lines = _is_json_lines(path)
        with open_bytes(path, bad) as file:
            yield from (_json_lines if lines else _json_values)(file, path, bad, start)
    except BROKEN as error:
        bad(str(path), f"cannot be read: {error}")


def _is_json_lines(path: Path) -> bool:
    """Whether every line is a row. The first line tells, or else the name."""
    named_so = _ending(path) != "json"
    with open_bytes(path) as file:
        head = file.readline(1 << 20).removeprefix(codecs.BOM_UTF8)
        while head and not head.strip():
            head = file.readline(1 << 20)
        head = head.strip()
        if not head.startswith(b"{"):
            return named_so and not head.startswith(b"[")
        text = head.decode("utf-8", "replace")
        try:
            rest = text[_LENIENT.raw_decode(text)[1] :].lstrip()
        except (ValueError, RecursionError):  # broken, or the beginning of an object that reaches over lines
            return named_so and head != b"{"
        if rest:
            return named_so and not rest.startswith("{")
        # One line alone may be an object around the rows.
        return named_so or bool(file.read(1 << 16).strip())


def read_csv(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    """Rows of a table with a header. Every field stays the text that it is.

    Raises:
        DataError: the header names no columns.
    """
    csv.field_size_limit(sys.maxsize)
    reader = None
    try:
        with open_bytes(path, bad) as file:
            # Not every byte need be UTF-8 for the lines to be found; the row that has the wrong one is named.
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
            head = text.readline()
            delimiter = "\t" if _ending(path) == "tsv" else max(",;\t", key=head.count)
            reader = csv.reader(itertools.chain([head], text), delimiter=delimiter, strict=True)
            try:
                names = next(reader, [])
                if len(set(names)) < len(names):  # one without a name is the index that pandas writes
                    raise csv.Error("it has a repeated name")
                if any(map(_SURROGATE.search, names)):
                    raise csv.Error("it is not UTF-8")
            except csv.Error as error:
                shown = head[:80].strip().encode("utf-8", "replace").decode()
                raise DataError(f"{path}:1: the header names no columns ({error}): {shown}") from None
            while True:
                number = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if number > start:
                        bad(f"{path}:{number}", f"not a row of a table: {error}")
                    continue
                if not fields or number <= start:
                    continue
                if len(fields) != len(names):
                    why = f"{len(fields)} fields, and the header has {len(names)}: {','.join(names)[:80]}"
                    bad(f"{path}:{number}", why)
                elif half_character(fields):
                    bad(f"{path}:{number}", "not UTF-8")
                else:
                    yield number, number, dict(zip(names, fields, strict=True))
    except BROKEN as error:
        bad(f"{path}:{reader.line_num + 1 if reader else 1}", f"cannot be read: {error}; nothing after it is read")


def read_parquet(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, broken = 0, (pa.ArrowException, OSError, ValueError, OverflowError)
    try:
        with pq.ParquetFile(path, buffer_size=1 << 22) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"the column {next(n for n in names if names.count(n) > 1)!r} is there twice")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= start:
                    number += rows
                    continue
                for batch in file.iter_batches(batch_size=512, row_groups=[group]):
                    bad.read_bytes = path.stat().st_size * number // max(1, file.metadata.num_rows)
                    try:
                        fields: list = batch.to_pylist()
                    except broken:  # one by one, to know which
                        fields = [None] * len(batch)
                    for i, row in enumerate(fields):
                        number += 1
                        if number <= start:
                            continue
                        if row is None:
                            try:
                                row = batch.slice(i, 1).to_pylist()[0]
                            except broken as error:
                                bad(f"{path}: row {number}", f"cannot be read: {str(error)[:200]}")
                                continue
                        yield number, number, row
    except broken as error:
        bad(f"{path}: row {number + 1}", f"cannot be read as parquet: {str(error)[:200]}; nothing after it is read")


ROW_READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet}
