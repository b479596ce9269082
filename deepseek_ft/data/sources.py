"""A source's name or path -> what is learnt from it, one example after the other, and a fingerprint of its content.

`files` reads bytes, `formats` turns rows into examples; here is which files, in which order, and which of their rows.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import DataConfig, SourceConfig, is_hub_id
from ..errors import DataError
from . import code
from .files import BROKEN, ROW_READERS, BadRows, LongText, decode, kind_of, open_bytes, read_tar, read_text
from .formats import Example, Text, convert, recognise, texts

# Name -> (hub id, config, revision). The scriptless parquet copies: `datasets` 4 and later run no loading scripts.
HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-v1", None),
    "wikitext-103-raw": ("Salesforce/wikitext", "wikitext-103-raw-v1", None),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1", None),
    "wikitext-2-raw": ("Salesforce/wikitext", "wikitext-2-raw-v1", None),
    "openwebtext": ("Skylion007/openwebtext", None, "refs/convert/parquet"),
}

_CODE = ("c cc cpp cu cuh cs css dart f90 go h hpp html hs java jl js json jsx kt lua m md ml mm php pl proto py pyi r "
         "rb rs scala sh sql swift ts tsx vue yaml yml toml v vhd zig")  # fmt: skip
_PACKED = ("", ".gz", ".xz", ".zst")
_ROWS = [f"*.{ending}{packed}" for ending in ("jsonl", "ndjson", "json", "parquet", "csv", "tsv") for packed in _PACKED]
_TEXTS = [f"*.{ending}{packed}" for ending in ("txt", "md", "rst") for packed in _PACKED]
_PATTERNS = {
    "text": _TEXTS,
    "code": [f"*.{ending}" for ending in _CODE.split()] + ["Makefile", "Dockerfile", "CMakeLists.txt"],
    "jsonl": [p for p in _ROWS if "json" in p],
    "python-stdlib": ["*.py"],
    "openwebtext": [*_ROWS, *_TEXTS, "*.xz", "*.tar"],
}
_NEVER = {"node_modules", "__pycache__", "site-packages", "venv"}  # and every folder that begins with a dot
_SPLIT_WORDS = {"train": ("train",), "validation": ("valid", "validation", "dev"), "test": ("test",)}
log = logging.getLogger(__name__)

Position = tuple[int, int]
"""(file, row in it) of an example, after which reading can go on."""
START: Position = (0, 0)


@dataclass
class Report:
    """What a source held, as far as it has been read."""

    form: str | None = None
    """The format of its rows."""
    examples: int = 0
    """What it gave."""
    blank: int = 0
    other_split: int = 0
    generated: int = 0
    """Files left out because a program wrote them."""
    bad: BadRows = field(default_factory=BadRows)
    quiet: bool = False

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> Report:
        return cls(**{**values, "bad": BadRows(**values["bad"])})


@dataclass
class Corpus:
    """The examples of one source and split: the same ones in the same order at every call."""

    label: str
    fingerprint: str
    """Of everything that decides what the examples are."""
    read: Callable[[Position, Report], Iterator[tuple[Position, Example]]]
    """Examples after a position. The report is brought up to date as they are given; with a position in the middle it is
    that of the reading which came so far."""
    bad: Callable[[], BadRows] = BadRows
    is_code: bool = False
    has_rows: bool = True
    """Whether it is made of rows, which may be conversations, and not of whole documents."""
    where: Callable[[Position], str] = str
    """A position for people."""
    share: Callable[[Position, Report], float | None] = lambda *_: None
    """About how much of it has been read at a position, if that can be told."""

    def examples(self) -> Iterator[Example]:
        for _, example in self.read(START, Report(bad=self.bad(), quiet=True)):
            yield example


# -------------------------------------------------------------------------------------------------- files


def _find_files(
    root: Path, include: list[str], exclude: list[str], key: str, allowed: Callable[[str], bool]
) -> list[Path]:
    if root.is_file():
        return [root]
    found, left_out = [], 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders if d not in _NEVER and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            relative = path.relative_to(root)
            if _matches(relative, include) and not _matches(relative, exclude) and path.is_file():
                if allowed(relative.as_posix()):
                    found.append(path)
                else:
                    left_out += 1
    if not found:
        raise DataError(f"{key}: no file below {str(root)!r} matches {', '.join(include[:12])}"
                        + (" ..." if len(include) > 12 else "")
                        + (f" without matching {', '.join(exclude)}" if exclude else "")
                        + (f"; {left_out} were left out by .gitignore or licence" if left_out else ""))  # fmt: skip
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
        text = re.escape(pattern.lstrip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
        _cache[pattern] = re.compile(text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + r"\Z")
    return _cache[pattern]


# --------------------------------------------------------------------------------------------- fingerprints


def _content_hash(path: Path, known: dict[str, list]) -> str:
    """Hash of a file's bytes; from `known` when path, size and times are those of last time."""
    stat = path.stat()
    key = os.fsdecode(path.resolve()).encode("utf-8", "backslashreplace").decode()
    changed = f"{stat.st_mtime_ns}/{stat.st_ctime_ns}"  # ctime too: a copied-over file may keep its old mtime
    entry = known.get(key)
    if entry and entry[:2] == [stat.st_size, changed]:
        return entry[2]
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
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


_VARIANT = re.compile(r"wikitext-(2|103)(-raw)?(-v1)?\Z")


def _wikitext_files(name: str, root: Path, split: str | None, key: str) -> list[Path]:
    """The files of one variant and split: by the folders' names, the files' names and their endings."""
    patterns = ["*.tokens", "*.raw", "*.parquet", "*.jsonl", "*.jsonl.gz", "*.txt"]
    everything = _find_files(root, patterns, [], key, lambda _: True)

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


def _wikitext_rows(rows: Iterable[tuple[int, str, Any]], source: SourceConfig, bad: BadRows) -> Iterator[str]:
    for _, where, row in rows:
        try:
            yield convert(row, "text", source).text
        except ValueError as error:
            bad(where, str(error))


def _wikitext_lines(path: Path, source: SourceConfig, bad: BadRows) -> Iterator[str]:
    kind = kind_of(path)
    if kind in ROW_READERS:
        rows = ((n, f"{path}:{line}", row) for n, line, row in ROW_READERS[kind](path, bad, 0))
        yield from _wikitext_rows(rows, source, bad)
        return
    number = 0
    try:
        with open_bytes(path, bad) as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decode(line).removesuffix("\n")
                except ValueError as error:
                    bad(f"{path}:{number}", str(error))
    except BROKEN as error:
        bad(f"{path}:{number + 1}", f"cannot be read: {error}; nothing after it is read")


# ------------------------------------------------------------------------------------------------------ hub


def _load_from_hub(source: SourceConfig, data: DataConfig, key: str) -> tuple[Any, str]:
    """Rows of a data set on the hub, and a name for them."""
    import datasets

    repo, config, revision = HUB.get(source.source, (source.source, source.subset, None))
    # Those with splits of their own are asked for the split; of the others a share is held out.
    own_split = source.source.startswith("wikitext") or (is_hub_id(source.source) and source.split is not None)
    split = (source.split or "train") if own_split else "train"
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(repo, config, split=split, revision=revision, streaming=data.streaming)
    except Exception as error:  # the hub client raises a dozen kinds; all mean "not to be had"
        raise DataError(
            f"{key}: {source.source} is {repo}{f' ({config})' if config else ''} on the Hugging Face hub, which cannot be "
            f"loaded: {_reason(error)}\n  Download it elsewhere and point data.path (or this source's path) to the copy, or set "
            "HF_ENDPOINT to a mirror that you can reach."
        ) from None
    fingerprint = getattr(rows, "_fingerprint", None) or f"{repo}|{config}|{split}|{revision}"
    return rows, str(fingerprint)


def _hub_rows(rows: Any, start: int, name: str) -> Iterator[tuple[int, str, Any]]:
    """Rows after the first `start`, with their number and where that is.

    Raises:
        DataError: the hub stopped to answer.
    """
    number = start
    reader = iter(rows.skip(start) if start else rows)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except Exception as error:  # as above, a dozen kinds
            raise DataError(
                f"{name}: row {number + 1} cannot be had from the Hugging Face hub: {_reason(error)}"
            ) from None
        number += 1
        yield number, f"{name}: row {number}", row


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


# ----------------------------------------------------------------------------------------------- what and where


def in_validation(document: str | bytes, holdout: float) -> bool:
    """Whether a document belongs to the held-out share: by its content, so that copies stay on one side.

    Args:
        document: its text, or the 8-byte blake2b of that.
    """
    if isinstance(document, str):
        document = hashlib.blake2b(document.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(document, "big") / 2**64 < holdout


def _split_glob(path: str) -> tuple[Path, list[str] | None]:
    """`a/b/*.jsonl` -> (a/b, ["*.jsonl"]); a path without signs of a pattern, or that is really there, is itself."""
    if not re.search(r"[*?]", path) or Path(path).exists():
        return Path(path), None
    parts = Path(path).parts
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?]", part))
    pattern = "/".join(parts[first:])
    return Path(*parts[:first]), [pattern if "/" in pattern else f"/{pattern}"]


def locate(source: SourceConfig, data: DataConfig, key: str) -> Path | None:
    """The file or folder that a source reads, or None for the hub. Looks at nothing inside.

    Raises:
        DataError: there is none.
    """
    path = source.path or (None if is_hub_id(source.source) else data.path)
    if source.source == "python-stdlib":
        path = source.path or sysconfig.get_paths()["stdlib"]
    if path is None:
        if source.source in HUB or is_hub_id(source.source):
            return None
        raise DataError(f"{key}: source {source.source} needs a path; set data.path=... or {key}.path=...")
    root, _ = _split_glob(path)
    if not root.exists():
        raise DataError(f"{key}: there is no file or folder {str(root)!r}" + _nearby(root))
    return root


def _reads_code(source: SourceConfig) -> bool:
    return source.format == "code" or source.source in ("code", "python-stdlib")


def _files(source: SourceConfig, data: DataConfig, root: Path, key: str) -> list[Path]:
    if source.source.startswith("wikitext"):
        return _wikitext_files(source.source, root, source.split, key)
    exclude = list(source.exclude or [])
    if source.source == "python-stdlib":
        exclude += ["**/test/**", "**/tests/**", "**/idlelib/**", "**/lib2to3/**", "**/turtledemo/**"]
    allowed: Callable[[str], bool] = lambda _: True  # noqa: E731
    if _reads_code(source) and root.is_dir():
        allowed = _allowed_code(root, data)
    path = source.path or data.path
    pattern = _split_glob(path)[1] if path else None
    include = source.include or pattern or _PATTERNS.get(source.source)
    if source.format == "code" and include is None:
        include = _PATTERNS["code"]
    if include is not None:
        return _find_files(root, list(include), exclude, key, allowed)
    try:  # `files`: rows if there are any, or else texts and code
        return _find_files(root, _ROWS, exclude, key, allowed)
    except DataError:
        return _find_files(root, [*_TEXTS, "*.tar", *_PATTERNS["code"]], exclude, key, allowed)


def _allowed_code(root: Path, data: DataConfig) -> Callable[[str], bool]:
    ignored = code.ignored_by_git(root) if data.code.gitignore else lambda _: False
    if not data.code.licenses:
        return lambda relative: not ignored(relative)
    wanted = {name for name in data.code.licenses if name != "permissive"}
    if "permissive" in data.code.licenses:
        wanted |= code.PERMISSIVE
    known: dict[Path, str | None] = {}

    def licence(folder: Path) -> str | None:
        """Of the nearest folder that has one."""
        if folder not in known:
            own = code.repository_license(folder)
            known[folder] = own or (licence(folder.parent) if folder != root else None)
        return known[folder]

    return lambda relative: not ignored(relative) and licence(root.joinpath(relative).parent) in wanted


# Bytes of text in the training split on the hub, as its data-set cards say; and what packed files unpack to, roughly.
_HUB_BYTES = {
    "wikitext-103": 540e6,
    "wikitext-103-raw": 545e6,
    "wikitext-2": 10.8e6,
    "wikitext-2-raw": 10.9e6,
    "openwebtext": 39.8e9,
}
_UNPACKED = {".gz": 3.0, ".xz": 4.0, ".zst": 3.5, ".parquet": 1.7}
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
        if source.split not in (None, "train") or source.source not in _HUB_BYTES:
            return None
        size = _HUB_BYTES[source.source]
    else:
        size = sum(f.stat().st_size * _UNPACKED.get(f.suffix, 1.0) for f in _files(source, data, root, key))
        if source.split in ("train", "validation") and not source.source.startswith("wikitext"):
            size *= source.holdout if source.split == "validation" else 1 - source.holdout
    if source.max_documents is not None:
        return None
    return int(source.weight * size / _BYTES_PER_TOKEN.get(source.source, 4.2))


# ------------------------------------------------------------------------------------------------------ reading

Raw = tuple[Position, str, Any]
"""Position, where that is for people, and a row's fields or a whole document."""


def _after(documents: Iterator, after: int, bad: BadRows) -> Iterator[tuple[int, Any]]:
    """Documents with their numbers, of which the first ones are read again only to come to the others."""
    bad.muted = after > 0
    try:
        for n, document in enumerate(documents, start=1):
            if n > after:
                yield n, document
            bad.muted = n < after
    finally:
        bad.muted = False


def _kind(path: Path, source: SourceConfig) -> str:
    is_program = source.format == "code" and _matches(Path(path.name), _PATTERNS["code"])  # .json may be one
    return "text" if is_program or source.source in ("text", "code", "python-stdlib") else kind_of(path)


def _raw_files(files: list[Path], source: SourceConfig, start: Position, report: Report) -> Iterator[Raw]:
    for i, path in enumerate(files):
        if i < start[0]:
            continue
        after = start[1] if i == start[0] else 0
        if source.source.startswith("wikitext"):
            articles = wikitext_articles(_wikitext_lines(path, source, report.bad))
            yield from (((i, n), f"{path}: article {n}", a) for n, a in _after(articles, after, report.bad))
            continue
        kind = _kind(path, source)
        if kind in ROW_READERS:
            noun = ": row " if kind == "parquet" else ":"
            for position, line, row in ROW_READERS[kind](path, report.bad, after):
                yield (i, position), f"{path}{noun}{line}", row
        else:
            documents = read_tar(path, report.bad) if kind == "tar" else read_text(path, report.bad)
            yield from (((i, n), str(path), d) for n, d in _after(documents, after, report.bad))


def _raw_repositories(
    files: list[Path], root: Path, start: Position, report: Report, data: DataConfig
) -> Iterator[Raw]:
    """One document for each group of files that need each other, repository by repository."""
    tops: dict[Path, list[Path]] = {}
    known: dict[Path, Path] = {}

    def top(folder: Path) -> Path:
        """The folder that holds .git, or the root."""
        if folder not in known:
            known[folder] = folder if folder == root or (folder / ".git").exists() else top(folder.parent)
        return known[folder]

    for path in files:
        tops.setdefault(top(path.parent) if root.is_dir() else root.parent, []).append(path)
    for i, (folder, members) in enumerate(sorted(tops.items())):
        if i < start[0]:
            continue
        content = {}
        after = start[1] if i == start[0] else 0
        report.bad.muted, generated = after > 0, 0  # what is in this repository was counted before its first document
        for path in members:
            for text in read_text(path, report.bad):
                if not isinstance(text, str):
                    report.bad(str(path), "too long to be one file of a repository")
                elif data.code.skip_generated and code.is_generated(path.relative_to(folder).as_posix(), text):
                    generated += 1
                else:
                    content[path.relative_to(folder).as_posix()] = text
        report.bad.muted = False
        report.generated += 0 if after else generated
        for n, document in enumerate(code.repository_documents(content), 1):
            if n > after:
                yield (i, n), str(folder), document


def _examples(raw: Iterator[Raw], source: SourceConfig, data: DataConfig, by_content: bool, is_code: bool, repositories: bool,
              label: str, report: Report) -> Iterator[tuple[Position, Example]]:  # fmt: skip
    """Rows -> examples: recognised, checked, of the wanted split, and no more than are wanted."""
    most = source.max_documents
    while most is None or report.examples < most:  # not a row is read beyond what is wanted
        try:
            position, where, value = next(raw)
        except StopIteration:
            break
        try:
            form = report.form or (None if source.format == "auto" else source.format)
            if isinstance(value, Mapping):
                form = form or recognise(value, source)
                example: Example = convert(value, form, source, data.chat.learn)
            elif form not in (None, "text", "code"):
                raise ValueError(f"is a text, where rows of {form} are wanted")
            else:
                form = "code" if is_code else "text"
                example = Text(value)
        except ValueError as error:
            report.bad(where, str(error))
            continue
        report.bad.rows += 1
        if report.form is None:
            report.form = form
            asked = "" if source.format == "auto" else ", as asked for"
            log.log(logging.DEBUG if report.quiet else logging.INFO, "data %s: read as %s%s", label, form, asked)
        if isinstance(example, Text):
            text = example.text
            if text.blank if isinstance(text, LongText) else not text.strip():
                report.blank += 1
                continue
            if (
                is_code
                and data.code.skip_generated
                and not repositories
                and isinstance(text, str)
                and code.is_generated(where, text)
            ):
                report.generated += 1
                continue
        if by_content:
            if isinstance(example, Text):
                identity = example.text.digest if isinstance(example.text, LongText) else example.text
            else:
                identity = "\0".join(texts(example))
            if in_validation(identity, source.holdout) != (source.split == "validation"):
                report.other_split += 1
                continue
        report.examples += 1
        yield position, example
    report.bad.check()


def open_source(source: SourceConfig, data: DataConfig, cache_dir: Path, key: str) -> Corpus:
    """The examples of one entry of `data.train` or `data.eval`.

    Args:
        key: what to call the entry in errors, such as `data.train.0`.

    Raises:
        DataError: a missing or unreadable file, a hub that does not answer.
    """
    name = source.source
    root = locate(source, data, key)
    is_wikitext = name.startswith("wikitext")
    is_code = _reads_code(source)
    repositories = is_code and data.code.repository and root is not None
    if root is None:
        rows, fingerprint = _load_from_hub(source, data, key)

        def raw(start: Position, report: Report) -> Iterator[Raw]:
            if is_wikitext:
                articles = wikitext_articles(_wikitext_rows(_hub_rows(rows, 0, name), source, report.bad))
                return (((0, n), f"{name}: article {n}", a) for n, a in _after(articles, start[1], report.bad))
            return (((0, n), where, row) for n, where, row in _hub_rows(rows, start[1], name))
    else:
        files = _files(source, data, root, key)
        fingerprint = _fingerprint_files(files, root, cache_dir)

        def raw(start: Position, report: Report) -> Iterator[Raw]:
            if repositories:
                return _raw_repositories(files, root, start, report, data)
            return _raw_files(files, source, start, report)

    if source.split == "test" and not is_wikitext and not (root is None and is_hub_id(name)):
        raise DataError(f"{key}: {name} has no test split; use split: validation (a held-out share) or null")
    by_content = source.split is not None and not is_wikitext and not (root is None and is_hub_id(name))
    label = f"{Path(source.path).name if name == 'files' and source.path else name}{f'/{source.split}' if source.split else ''}"

    def read(start: Position, report: Report) -> Iterator[tuple[Position, Example]]:
        return _examples(raw(start, report), source, data, by_content, is_code, repositories, label, report)

    options: list[Any] = [name, source.split, source.format, source.text_field, source.prompt_field, source.completion_field,
                          source.messages_field, source.holdout if by_content else None, source.max_documents,
                          data.on_bad_row, data.max_bad_share, data.chat.learn]  # fmt: skip
    if is_code:
        options += [data.code.repository, data.code.skip_generated]
    identity = hashlib.blake2b(f"{fingerprint}|{options}".encode(), digest_size=16).hexdigest()
    corpus = Corpus(label, identity, read, lambda: BadRows(data.on_bad_row == "skip", data.max_bad_share), is_code)
    corpus.has_rows = root is None or (not is_wikitext and not repositories and _kind(files[0], source) in ROW_READERS)
    if root is not None and not repositories:
        sizes = [f.stat().st_size for f in files]
        corpus.where = lambda at: f"{files[at[0]]}:{at[1]}"
        begins = [0, *itertools.accumulate(sizes)]
        corpus.share = lambda at, report: (
            (begins[at[0]] + min(report.bad.read_bytes, sizes[at[0]])) / max(1, begins[-1])
        )
    return corpus
