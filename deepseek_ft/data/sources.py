"""A source's name or path -> its documents, and a fingerprint of their content.

One function per kind of source. Files are read as the bytes they are: only UTF-8 decoding, no newline translation.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..config import DataConfig, SourceConfig
from ..errors import DataError

# Name -> (hub id, config). The scriptless parquet copies: `datasets` 4 and later run no loading scripts.
HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-v1", None),
    "wikitext-103-raw": ("Salesforce/wikitext", "wikitext-103-raw-v1", None),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1", None),
    "wikitext-2-raw": ("Salesforce/wikitext", "wikitext-2-raw-v1", None),
    "openwebtext": ("Skylion007/openwebtext", None, "refs/convert/parquet"),
}

_CODE = ("c cc cpp cu cuh cs css dart f90 go h hpp html hs java jl js json jsx kt lua m md ml mm php pl proto py pyi r "
         "rb rs scala sh sql swift ts tsx vue yaml yml toml v vhd zig")  # fmt: skip
_PATTERNS = {
    "text": ["*.txt", "*.md", "*.rst", "*.txt.gz", "*.txt.xz"],
    "code": [f"*.{ending}" for ending in _CODE.split()] + ["Makefile", "Dockerfile", "CMakeLists.txt"],
    "jsonl": ["*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.ndjson"],
    "python-stdlib": ["*.py"],
    "openwebtext": ["*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.parquet", "*.txt", "*.xz", "*.tar"],
}
_NEVER = {"node_modules", "__pycache__", "site-packages", "venv"}  # and every folder that begins with a dot
_SPLIT_WORDS = {"train": ("train",), "validation": ("valid", "validation", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class Corpus:
    """The documents of one source and split. `documents()` may be called again and gives the same order."""

    label: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]


# -------------------------------------------------------------------------------------------------- files


def _find_files(root: Path, include: list[str], exclude: list[str], key: str) -> list[Path]:
    if root.is_file():
        return [root]
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders if d not in _NEVER and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            relative = path.relative_to(root)
            if _matches(relative, include) and not _matches(relative, exclude) and path.is_file():
                found.append(path)
    if not found:
        raise DataError(f"{key}: no file below {str(root)!r} matches {', '.join(include)}"
                        + (f" without matching {', '.join(exclude)}" if exclude else ""))  # fmt: skip
    return found


def _nearby(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f"; the folder {str(path.parent)!r} is not there either"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def _matches(relative: Path, patterns: Iterable[str]) -> bool:
    """A pattern without a slash is for the file's name, one with a slash for the path below the root."""
    return any(_glob(pattern).match(relative.as_posix() if "/" in pattern else relative.name) for pattern in patterns)


def _glob(pattern: str, _cache: dict[str, re.Pattern] = {}) -> re.Pattern:  # noqa: B006  (a cache)
    if pattern not in _cache:
        text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
        _cache[pattern] = re.compile(text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + r"\Z")
    return _cache[pattern]


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


_BROKEN = (OSError, EOFError, lzma.LZMAError, tarfile.TarError, zlib.error)


def _decode(data: bytes, where: str, one_line: bool = False) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        line = "" if one_line else f":{number}"
        raise DataError(f"{where}{line} is not UTF-8: byte 0x{data[error.start]:02x}; convert the file, or leave it out "
                        "with `exclude`") from None  # fmt: skip


def _whole_file(path: Path) -> Iterator[str]:
    """One file, one document."""
    try:
        with _open(path) as file:
            data = file.read()
    except _BROKEN as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    yield _decode(data, str(path))


def _jsonl_file(path: Path, field: str) -> Iterator[str]:
    """One line, one document. Only \\n ends a line (a \\r before it is white space to JSON)."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                yield _json_document(line, f"{path}:{number}", field)
    except _BROKEN as error:
        raise DataError(f"{path}:{number + 1} cannot be read: {error}") from None


def _json_document(line: bytes, where: str, field: str) -> str:
    text = _decode(line.removeprefix(b"\xef\xbb\xbf"), where, one_line=True)

    def no_duplicates(pairs):
        row = dict(pairs)
        if len(row) < len(pairs):
            raise DataError(f"{where}: a key is given twice: {text[:80].strip()}")
        return row

    try:
        row = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}): {text[:80].strip()}") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds a {type(row).__name__}, not an object with a field {field!r}: {text[:80].strip()}"
        )
    if field not in row:
        raise DataError(f"{where} has no field {field!r}; it has {', '.join(map(repr, row))}. Set `text_field`")
    value = row[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} holds {json.dumps(value)[:60]}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: the field {field!r} holds half a character (a lone surrogate): {text[:80].strip()}"
        ) from None
    return value


def _parquet_file(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise DataError(
                f"{path} has no column {field!r}; it has {', '.join(file.schema_arrow.names)}. Set `text_field`"
            )
        kind = file.schema_arrow.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{path}: column {field!r} is {kind}, not text")
        number = 0
        for batch in file.iter_batches(columns=[field], batch_size=1024):
            for value in batch.column(0).to_pylist():
                number += 1
                if value is None:
                    raise DataError(f"{path}: row {number} of column {field!r} is null, not text")
                yield value
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None


def _tar_file(path: Path) -> Iterator[str]:
    """OpenWebText's own layout: tar archives of .txt files, or of further .xz archives of them."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                data = archive.extractfile(member).read()
                where = f"{path}!{member.name}"
                if member.name.endswith(".xz"):
                    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as inner:
                        for page in inner:
                            if page.isfile():
                                yield _decode(inner.extractfile(page).read(), f"{where}!{page.name}")
                elif member.name.endswith(".txt"):
                    yield _decode(data, where)
    except _BROKEN as error:
        raise DataError(f"{path} cannot be read as an archive of texts: {error}") from None


def _read_any(path: Path, field: str) -> Iterator[str]:
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return _jsonl_file(path, field)
    if name.endswith(".parquet"):
        return _parquet_file(path, field)
    if name.endswith(".tar") or path.suffix == ".xz" and not name.endswith(".txt") and _is_tar(path):
        return _tar_file(path)
    return _whole_file(path)


def _is_tar(path: Path) -> bool:
    try:
        with _open(path) as file:
            return file.read(512)[257:262] == b"ustar"
    except _BROKEN:
        return False


# --------------------------------------------------------------------------------------------- fingerprints


def _content_hash(path: Path, known: dict[str, list]) -> str:
    """Hash of a file's bytes; from `known` when path, size and times are those of last time."""
    stat = path.stat()
    key = os.fsdecode(path.resolve()).encode("utf-8", "backslashreplace").decode()
    changed = f"{stat.st_mtime_ns}/{stat.st_ctime_ns}"  # ctime too: a copied-over file may keep its old mtime
    entry = known.get(key)
    if entry and entry[:2] == [stat.st_size, changed]:
        return entry[2]
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    known[key] = [stat.st_size, changed, digest.hexdigest()]
    return known[key][2]


def _fingerprint_files(files: list[Path], root: Path, cache_dir: Path) -> str:
    index = cache_dir / "file_hashes.json"
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
        known = {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 3}
    except (OSError, ValueError, AttributeError):
        known = {}
    before = dict(known)
    base = root if root.is_dir() else root.parent
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        name = os.fsencode(path.relative_to(base).as_posix())
        digest.update(name + b"\0" + _content_hash(path, known).encode() + b"\n")
    if before != known:
        partial = index.with_name(f"{index.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # the index only saves time; and the last writer wins
            cache_dir.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(known), encoding="utf-8")
            partial.replace(index)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------- wikitext

# A first-level heading is ` = Title = `; deeper ones have ` = = `.
_HEADING = re.compile(r"\s*= (?!= )[^\n]*(?<! =) =\s*\Z")


def wikitext_articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines regrouped into articles by their first-level headings; blank lines are dropped.

    Only a heading after a blank line (or at the start) opens an article, so that a formula such as ` = 3 x = `
    inside a paragraph does not.
    """
    article: list[str] = []
    after_blank = True
    for line in lines:
        if not line.strip():
            after_blank = True
            continue
        if after_blank and _HEADING.match(line) and article:
            yield "".join(article)
            article = []
        article.append(line if line.endswith("\n") else line + "\n")
        after_blank = False
    if article:
        yield "".join(article)


def _wikitext_lines(path: Path, field: str) -> Iterator[str]:
    if path.name.endswith(".parquet"):
        yield from _parquet_file(path, field)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _jsonl_file(path, field)
    else:
        for text in _whole_file(path):
            yield from text.split("\n")


_VARIANT = re.compile(r"wikitext-(2|103)(-raw)?(-v1)?\Z")


def _wikitext_files(name: str, root: Path, split: str | None, key: str) -> list[Path]:
    """The files of one variant and split: by the folders' names, the files' names and their endings."""
    patterns = ["*.tokens", "*.raw", "*.parquet", "*.jsonl", "*.jsonl.gz", "*.txt"]
    everything = _find_files(root, patterns, [], key)

    # A copy of the hub's repository, or of the whole download, has a folder per variant.
    variants: dict[str, list[Path]] = {}
    for path in everything:
        parts = path.relative_to(root).parts[:-1] if root.is_dir() else ()
        named = [m for m in map(_VARIANT.match, parts) if m]
        variants.setdefault(named[-1][0].removesuffix("-v1") if named else "", []).append(path)
    if set(variants) != {""}:
        if name not in variants:
            raise DataError(f"{key}: {str(root)!r} has {', '.join(sorted(filter(None, variants)))}, but not {name}")
        everything = variants[name]

    def is_of(path: Path, words: tuple[str, ...]) -> bool:
        return any(re.search(rf"(^|[^a-z]){w}([^a-z]|$)", path.name.lower()) for w in words)

    wanted = [p for p in everything if split is None or is_of(p, _SPLIT_WORDS[split])]
    if not wanted:
        raise DataError(f"{key}: {str(root)!r} has no file of the {split} split; it has "
                        + ", ".join(sorted({p.name for p in everything})[:8]))  # fmt: skip
    for wrong, right, ending in ((".raw", ".tokens", "raw"), (".tokens", ".raw", "tokenised")):
        if (right == ".raw") == name.endswith("-raw") and any(p.suffix == wrong for p in wanted):
            kept = [p for p in wanted if p.suffix != wrong]
            if not kept:
                other = name.removesuffix("-raw") if name.endswith("-raw") else f"{name}-raw"
                raise DataError(f"{key}: {wanted[0]} is the {ending} variant, whose words are not those of {name}; use "
                                f"source: {other}, or a copy with {right} files")  # fmt: skip
            wanted = kept
    return wanted


# ------------------------------------------------------------------------------------------------------ hub


def _from_hub(source: SourceConfig, key: str) -> tuple[str, Callable[[], Iterator[str]]]:
    import datasets

    repo, config, revision = HUB[source.source]
    has_splits = source.source.startswith("wikitext")
    split = (source.split or "train") if has_splits else "train"
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(repo, config, split=split, revision=revision)
    except Exception as error:  # the hub client raises a dozen kinds; all mean "not to be had"
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{key}: {source.source} is {repo}{f' ({config})' if config else ''} on the Hugging Face hub, which cannot be "
            f"loaded: {reason}\n  Download it elsewhere and point data.path (or this source's path) to the copy, or set "
            "HF_ENDPOINT to a mirror that you can reach."
        ) from None
    if source.text_field not in rows.column_names:
        raise DataError(f"{key}: {repo} has no column {source.text_field!r}; it has {', '.join(rows.column_names)}")

    def texts() -> Iterator[str]:
        for row in rows:
            yield row[source.text_field]

    documents = (lambda: wikitext_articles(texts())) if has_splits else texts
    return rows._fingerprint, documents


# ---------------------------------------------------------------------------------------------------- public


def in_validation(document: str, holdout: float) -> bool:
    """Whether a document belongs to the held-out share: by its content, so that copies stay on one side."""
    digest = hashlib.blake2b(document.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < holdout


def locate(source: SourceConfig, data: DataConfig, key: str) -> Path | None:
    """The file or folder that a source reads, or None for the hub. Looks at nothing inside.

    Raises:
        DataError: there is none.
    """
    path = source.path or data.path
    if source.source == "python-stdlib":
        path = source.path or sysconfig.get_paths()["stdlib"]
    if path is None:
        if source.source in HUB:
            return None
        raise DataError(f"{key}: source {source.source} needs a path; set data.path=... or {key}.path=...")
    root = Path(path)
    if not root.exists():
        raise DataError(f"{key}: there is no file or folder {path!r}" + _nearby(root))
    return root


def _files(source: SourceConfig, root: Path, key: str) -> list[Path]:
    if source.source.startswith("wikitext"):
        return _wikitext_files(source.source, root, source.split, key)
    exclude = list(source.exclude or [])
    if source.source == "python-stdlib":
        exclude += ["**/test/**", "**/tests/**", "**/idlelib/**", "**/lib2to3/**", "**/turtledemo/**"]
    return _find_files(root, list(source.include or _PATTERNS[source.source]), exclude, key)


# Bytes of text in the training split on the hub, as its data-set cards say; and what packed files unpack to, roughly.
_HUB_BYTES = {
    "wikitext-103": 540e6,
    "wikitext-103-raw": 545e6,
    "wikitext-2": 10.8e6,
    "wikitext-2-raw": 10.9e6,
    "openwebtext": 39.8e9,
}
_UNPACKED = {".gz": 3.0, ".xz": 4.0, ".parquet": 1.7}
# Bytes of text per token, measured with DeepSeek-LLM's and DeepSeek-Coder's tokenizers: 4.2 to 4.3 and 3.9 to 4.0 on
# English prose, 3.6 and 3.4 on Python, 4.1 and 3.4 on Chinese.
_BYTES_PER_TOKEN = {"code": 3.5, "python-stdlib": 3.5}


def guess_tokens(source: SourceConfig, data: DataConfig, key: str) -> int | None:
    """About how many tokens a source has, from file sizes alone: nothing is read or downloaded. None when unknown.

    Raises:
        DataError: the path is not there, or holds no file that fits.
    """
    root = locate(source, data, key)
    if root is None:
        if source.split not in (None, "train"):
            return None
        size = _HUB_BYTES[source.source]
    else:
        size = sum(f.stat().st_size * _UNPACKED.get(f.suffix, 1.0) for f in _files(source, root, key))
        if source.split in ("train", "validation") and not source.source.startswith("wikitext"):
            size *= source.holdout if source.split == "validation" else 1 - source.holdout
    return None if source.max_documents is not None else int(size / _BYTES_PER_TOKEN.get(source.source, 4.2))


def open_source(source: SourceConfig, data: DataConfig, cache_dir: Path, key: str) -> Corpus:
    """The documents of one entry of `data.train` or `data.eval`.

    Args:
        key: what to call the entry in errors, such as `data.train.0`.

    Raises:
        DataError: a missing or unreadable file, a hub that does not answer.
    """
    name = source.source
    root = locate(source, data, key)
    is_wikitext = name.startswith("wikitext")
    if root is None:
        fingerprint, documents = _from_hub(source, key)
    else:
        files = _files(source, root, key)
        fingerprint = _fingerprint_files(files, root, cache_dir)

        def documents() -> Iterator[str]:
            for path in files:
                if is_wikitext:
                    yield from wikitext_articles(_wikitext_lines(path, source.text_field))
                elif name == "jsonl":
                    yield from _jsonl_file(path, source.text_field)
                elif name == "openwebtext":
                    yield from _read_any(path, source.text_field)
                else:
                    yield from _whole_file(path)

    if source.split == "test" and not is_wikitext:
        raise DataError(f"{key}: {name} has no test split; use split: validation (a held-out share) or null")
    by_content = source.split is not None and not is_wikitext

    def selected() -> Iterator[str]:
        taken = 0
        for document in documents():
            if not document.strip():
                continue
            if by_content and in_validation(document, source.holdout) != (source.split == "validation"):
                continue
            if source.max_documents is not None and taken == source.max_documents:
                return
            taken += 1
            yield document

    label = f"{name}{f'/{source.split}' if source.split else ''}"
    options = (name, source.split, source.text_field, source.holdout if by_content else None, source.max_documents)
    return Corpus(label, hashlib.blake2b(f"{fingerprint}|{options}".encode(), digest_size=16).hexdigest(), selected)
