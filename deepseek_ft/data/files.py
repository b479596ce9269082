"""A file's bytes -> its rows or its text.

What is compressed or how rows are written is seen in the bytes; a file's name only decides where these leave it open.
Nothing is translated: line ends, indentation, marks and numbers in text arrive as they were written. Only \\n ends a
line. A row that cannot be read is named with file and line, and `BadRows` decides whether that ends the run.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
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
_BROKEN = (OSError, EOFError, lzma.LZMAError, tarfile.TarError, zlib.error)


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

    def __call__(self, where: str, why: str) -> None:
        """
        Raises:
            DataError: unless bad rows are skipped, and they are few.
        """
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


def open_bytes(path: Path) -> BinaryIO:
    """A file's content, unpacked if its first bytes say gzip, xz or zstandard."""
    magic = _magic(path)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rb")
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.open(path, "rb")
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow as pa

        # The one zstd that comes with what is installed anyway. Its stream has no readinto of its own.
        return io.BufferedReader(_Raw(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")), 1 << 20)
    return open(path, "rb")


class _Raw(io.RawIOBase):
    def __init__(self, stream):
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def decode(data: bytes, where: str, one_line: bool = False) -> str:
    """
    Raises:
        ValueError: it is not UTF-8; the message says where.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = "" if one_line else f" in line {data.count(bytes([10]), 0, error.start) + 1}"
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x}{line}; convert the file, or leave it out with "
                         "`exclude`") from None  # fmt: skip


def kind_of(path: Path) -> str:
    """`json`, `csv`, `parquet`, `tar` or `text`.

    Raises:
        DataError: the file cannot be opened.
    """
    names = path.name.lower().split(".")
    while names and names[-1] in ("gz", "xz", "zst", "zstd"):
        names.pop()
    ending = names[-1] if len(names) > 1 else ""
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
        if magic.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            with open_bytes(path) as file:
                if file.read(512)[257:262] == b"ustar":
                    return "tar"
    except _BROKEN as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return "text"


# ------------------------------------------------------------------------------------------------------- text


class LongText:
    """A document too long to hold: a file that is read again for every use."""

    def __init__(self, path: Path, bad: BadRows):
        self.path, self.bad = path, bad
        digest, self.blank, self.bytes = hashlib.blake2b(digest_size=8), True, 0
        decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
        with open_bytes(path) as file:
            while True:
                chunk = file.read(1 << 22)
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    line += error.object.count(b"\n", 0, error.start)
                    raise ValueError(f"not UTF-8: byte 0x{error.object[error.start]:02x} near line {line}") from None
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
        with open_bytes(self.path) as file:
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
        if path.stat().st_size > LONG_TEXT_BYTES // (
            1 if _magic(path)[:2] not in (b"\x1f\x8b", b"\xfd7", b"\x28\xb5") else 4
        ):
            yield LongText(path, bad)
            return
        with open_bytes(path) as file:
            data = file.read()
        yield decode(data, str(path))
    except ValueError as error:
        bad(str(path), str(error))
    except _BROKEN as error:
        bad(str(path), f"cannot be read: {error}")


def read_tar(path: Path, bad: BadRows) -> Iterator[str]:
    """OpenWebText's own layout: tar archives of .txt files, or of further .xz archives of them."""
    try:
        with open_bytes(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                data = archive.extractfile(member).read()
                where = f"{path}!{member.name}"
                if member.name.endswith(".xz"):
                    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as inner:
                        pages = [(f"{where}!{p.name}", inner.extractfile(p).read()) for p in inner if p.isfile()]
                else:
                    pages = [(where, data)] if member.name.endswith(".txt") else []
                for name, page in pages:
                    try:
                        text = decode(page, name)
                    except ValueError as error:
                        bad(name, str(error))
                    else:
                        yield text
    except _BROKEN as error:
        bad(str(path), f"cannot be read as an archive of texts: {error}")


# ------------------------------------------------------------------------------------------------------- rows


Row = tuple[int, int, dict]
"""Position in the file, by which a reader can go on after it (`start`); line or row number for people, from 1; fields."""


class _Repeated(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _half_character(value: Any) -> bool:
    """Whether any text in it holds a lone surrogate, which no UTF-8 and no tokenizer can carry."""
    if isinstance(value, str):
        return bool(_SURROGATE.search(value))
    if isinstance(value, dict):
        return any(_half_character(k) or _half_character(v) for k, v in value.items())
    return isinstance(value, list) and any(map(_half_character, value))


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
    if "\\u" in text and _half_character(value):
        raise ValueError(f"half a character (a lone surrogate): {shown}")
    return value


def _row(value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"holds {json.dumps(value, ensure_ascii=False)[:60]}, not an object with named fields")
    return value


def _json_lines(file: BinaryIO, path: Path, bad: BadRows, start: int) -> Iterator[Row]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            if number <= start or not line.strip():
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                row = _row(_parse(decode(line, "", one_line=True)))
            except ValueError as error:
                bad(f"{path}:{number}", str(error))
                continue
            yield number, number, row
    except _BROKEN as error:
        bad(f"{path}:{number + 1}", f"cannot be read: {error}")


def _json_values(file: BinaryIO, path: Path, bad: BadRows, start: int) -> Iterator[Row]:
    """Rows of a top-level array, or values one after the other that reach over lines. The number is that of a line."""
    text, line, at, more = "", 1, 0, True
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    in_array, first, position = False, True, 0
    chunk = 1 << 20

    def fill() -> bool:
        nonlocal text, at, line, more, chunk
        if not more:
            return False
        line += text.count("\n", 0, at)
        data = file.read(chunk)
        chunk = min(2 * chunk, 1 << 26)  # a row larger than the last chunk is tried again: not too often
        more = bool(data)
        text, at = text[at:] + decoder.decode(data, final=not data), 0
        return True

    def skip_space() -> str:
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or not fill():
                return text[at : at + 1]

    try:
        fill()
        while True:
            sign = skip_space()
            if first and sign == "[":
                in_array, first, at = True, False, at + 1
                continue
            if not first and in_array and sign == ",":
                at += 1
                continue
            if not sign or (in_array and sign == "]"):
                if in_array and not sign:
                    bad(f"{path}:{line + text.count(chr(10), 0, at)}", "the array has no end: the file is cut off")
                if in_array and sign:
                    at += 1
                    if skip_space():
                        bad(
                            f"{path}:{line + text.count(chr(10), 0, at)}",
                            f"text after the array's end: {text[at : at + 80]}",
                        )
                return
            first = False
            number = line + text.count("\n", 0, at)
            while True:
                try:
                    value, end = _DECODER.raw_decode(text, at)
                    # A number or the like at the buffer's end may go on; objects and arrays are closed.
                    if end < len(text) or text[end - 1] in "}]" or not fill():
                        break
                except json.JSONDecodeError as error:
                    # Wrong in the middle is wrong; wrong near the end may be unfinished.
                    if not more or (error.pos < len(text) - 64 and "Unterminated" not in error.msg) or not fill():
                        shown = text[at : at + 80].strip()
                        bad(f"{path}:{line + text.count(chr(10), 0, min(error.pos, len(text)))}",
                            f"not valid JSON ({error.msg}): {shown}")  # fmt: skip
                        return  # where the next row begins is anyone's guess
                except (ValueError, RecursionError) as error:
                    bad(f"{path}:{number}", f"not valid JSON ({error}): {text[at : at + 80].strip()}")
                    return
            raw, at = text[at:end], end
            try:
                if "\\u" in raw and _half_character(value):
                    raise ValueError(f"half a character (a lone surrogate): {raw[:80].strip()}")
                rows = _unfolded(_row(value)) if not in_array else [_row(value)]
            except ValueError as error:
                bad(f"{path}:{number}", str(error))
                continue
            for row in rows:
                position += 1
                if position > start:
                    yield position, number, row
    except UnicodeDecodeError as error:
        bad(f"{path}:{line + text.count(chr(10))}", f"not UTF-8: byte 0x{error.object[error.start]:02x}")
    except _BROKEN as error:
        bad(f"{path}:{line}", f"cannot be read: {error}")


def _unfolded(value: dict) -> list[dict]:
    """The rows of a file that is one object around them, such as SQuAD's; or the object itself."""
    lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(i, dict) for i in v)]
    if len(lists) != 1 or set(value) & {"messages", "conversations", "conversation"}:
        return [value]
    paragraphs = [p for item in lists[0] for p in item.get("paragraphs", ())]
    return [p for p in paragraphs if isinstance(p, dict)] or lists[0]


def read_json(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    """Rows of JSON lines, of a top-level array, or of one object around them."""
    try:
        with open_bytes(path) as file:
            head = file.readline(1 << 20)
            while head and not head.strip():
                head = file.readline(1 << 20)
        opening = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        lines = opening != b"[" and path.name.split(".")[-1] != "json"
        if opening == b"{" and not lines:
            try:
                lines = isinstance(json.loads(head), dict) and not _is_whole(path, head)
            except (ValueError, RecursionError):
                lines = not head.endswith(b"\n") and len(head) == 1 << 20 and path.name.split(".")[-1] != "json"
        with open_bytes(path) as file:
            yield from (_json_lines if lines else _json_values)(file, path, bad, start)
    except _BROKEN as error:
        bad(f"{path}", f"cannot be read: {error}")


def _is_whole(path: Path, head: bytes) -> bool:
    """Whether the first line is all that the file has: then it may be one object around the rows."""
    with open_bytes(path) as file:
        file.read(len(head))
        return not file.read(1 << 16).strip()


def read_csv(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    """Rows of a table with a header. Every field stays the text that it is."""
    csv.field_size_limit(sys.maxsize)
    reader = None
    try:
        with open_bytes(path) as file:
            # Not every byte need be UTF-8 for the lines to be found; the row that has the wrong one is named.
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
            head = text.readline()
            signs = {sign: head.count(sign) for sign in "\t,;"}
            delimiter = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else max(",;\t", key=signs.get)
            names = next(csv.reader([head], delimiter=delimiter), [])
            if len(set(names)) < len(names) or not all(names):
                raise DataError(f"{path}:1: the header has an empty or repeated name: {head[:80].strip()}")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            while True:
                number = reader.line_num + 2  # the header was read before
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    bad(f"{path}:{number}", f"not a row of a table: {error}")
                    continue
                if not fields or number <= start:
                    continue
                if len(fields) != len(names):
                    bad(
                        f"{path}:{number}",
                        f"{len(fields)} fields, and the header has {len(names)}: {','.join(names)[:80]}",
                    )
                elif any(_SURROGATE.search(f) for f in fields):
                    bad(f"{path}:{number}", "not UTF-8")
                else:
                    yield number, number, dict(zip(names, fields, strict=True))
    except _BROKEN as error:
        bad(f"{path}:{reader.line_num + 1 if reader else 1}", f"cannot be read: {error}")


def read_parquet(path: Path, bad: BadRows, start: int = 0) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number + rows <= start:
                number += rows
                continue
            for batch in file.iter_batches(batch_size=512, row_groups=[group]):
                for row in batch.to_pylist():
                    number += 1
                    if number > start:
                        yield number, number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        bad(f"{path}: row {number + 1}", f"cannot be read as parquet: {str(error)[:200]}")


ROW_READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet}
