"""Tokens on disk, once per source whatever the block length; made once, and gone on with when that was interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from .files import LongText
from .formats import Conversation, Example, is_long, texts
from .sources import START, Corpus, Position, Report

if TYPE_CHECKING:
    from .tokenise import Encoder

_BATCH_CHARACTERS = 4 << 20  # text per call of the tokenizer: enough to keep all cores busy, little enough to hold
_SAVE_SECONDS = 2.0
_PIECES = 8  # of a long document, at once
log = logging.getLogger(__name__)


def _code_version() -> str:
    """Of the rooms that decide what a document's tokens are: a cache of other code is another cache."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("files", "formats", "chat", "code", "tokenise", "sources", "store"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


@dataclass
class StoreStats:
    """What went into a store."""

    source: str
    form: str = "text"
    """The format of its rows."""
    chat_form: str | None = None
    examples: int = 0
    """Documents or conversations that were read."""
    documents: int = 0
    """Rows that came of them: a conversation may give several."""
    text_bytes: int = 0
    """UTF-8 bytes of the text, with what a prompt form adds."""
    words: int = 0
    """White-space separated words, for WikiText."""
    tokens: int = 0
    learnt: int = 0
    """Tokens that are targets, but for the first of each document."""
    blank: int = 0
    other_split: int = 0
    generated: int = 0
    duplicates: int = 0
    """Documents that an earlier one equals."""
    special_text: int = 0
    """Documents in which a special token's name was read as text."""
    fim: int = 0
    bad: int = 0
    bad_listed: list[str] = field(default_factory=list)
    is_stream: bool = True
    """Text that runs on from block to block; otherwise each document stays whole."""
    dtype: str = "uint32"
    seconds: float = 0.0


class TokenStore:
    """A source's documents as ids; opening it costs nothing, whatever its size.

    Attributes:
        ids: (tokens,) of all documents, one after the other.
        ends: (documents,) where each ends in `ids`.
        learnt: (tokens,) of 0 and 1, or None where every token is learnt.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            ValueError, OSError, KeyError, TypeError: the files are not those that were written.
        """
        self.folder = folder
        record = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.stats = StoreStats(**record["stats"])
        known = record["files"]
        for name, facts in known.items():
            found = (folder / name).stat()
            if found.st_size != facts["bytes"]:
                raise ValueError(f"{name} has {found.st_size} bytes, {facts['bytes']} were written")
            if found.st_mtime_ns != facts["mtime_ns"] and _digest(folder / name) != facts["blake2b"]:
                raise ValueError(f"{name} is not what was written")
        self.ids = _mapped(folder / "ids.bin", np.dtype(self.stats.dtype))
        self.ends = _mapped(folder / "ends.bin", np.dtype(np.int64))
        self.learnt = _mapped(folder / "learnt.bin", np.dtype(np.uint8)) if "learnt.bin" in known else None
        with contextlib.suppress(OSError):
            os.utime(folder / "store.json")  # when it was last of use, for `data cache`

    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]])


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    # A plain array over the map: memmap's own class costs microseconds at every slice.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def store_key(corpus: Corpus, encoder: Encoder) -> str:
    fim = [encoder.fim_rate, encoder.spm_rate, encoder.seed] if corpus.is_code and encoder.fim_rate else None
    made_of = [_code_version(), corpus.fingerprint, encoder.identity(), fim]
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()


def build_store(corpus: Corpus, encoder: Encoder, cache_dir: Path) -> TokenStore:
    """The tokens of a corpus, from the cache or made now.

    Two processes that want the same tokens at once make them once. A build that was interrupted goes on where it stood.

    Raises:
        DataError: a source cannot be read or holds nothing, or the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    folder = cache_dir / "tokens" / store_key(corpus, encoder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("data %s: another process is tokenising it; waiting", corpus.label)
        lock.acquire()
    try:
        if folder.is_dir():
            try:
                store = TokenStore(folder)
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("data %s: the cache %s is damaged (%s) and made again", corpus.label, folder, error)
                shutil.rmtree(folder)
            else:
                log.info("data %s: %s tokens of %s documents from the cache", corpus.label, f"{store.stats.tokens:,}",
                         f"{store.stats.documents:,}")  # fmt: skip
                return store
        building = folder.with_suffix(".building")
        try:
            _Builder(corpus, encoder, building).run()
            building.replace(folder)
        except OSError as error:
            raise DataError(f"the token cache {building} cannot be written: {error.strerror or error}; set data.cache_dir "
                            "or $DEEPSEEK_FT_CACHE to a disk with room, or make room: it goes on where it stood") from None  # fmt: skip
        return TokenStore(folder)
    finally:
        lock.release()


class _Builder:
    """Writes a store's files beside their place, with a note of how far it is, so that it can be gone on with."""

    def __init__(self, corpus: Corpus, encoder: Encoder, folder: Path):
        self.corpus, self.encoder, self.folder = corpus, encoder, folder
        self.position: Position = START
        self.report = Report(bad=corpus.bad())
        self.stats = StoreStats(corpus.label, dtype=encoder.dtype.name)
        self.special = encoder.special_tokens
        self.files: dict[str, object] = {}
        self.noted: dict | None = None
        """How far it is, as of the last batch that is wholly written."""
        self.unfinished: dict | None = None
        """A document that was being written piece by piece when the last build was interrupted."""
        self.saved = time.monotonic()
        self.spent = 0.0

    def run(self) -> None:
        self._open()
        self.started = time.monotonic()
        self.progress = _Progress(self.corpus.label, self.stats.tokens)
        try:
            if self.unfinished is not None:
                text = LongText(Path(self.unfinished["path"]), self.report.bad)
                self._add_long(text, self.unfinished["pieces"], self.unfinished["first"])
                self._note()
            for batch in self._batches():
                self._add(batch)
            self._finish()
        except BaseException:
            with contextlib.suppress(OSError, ValueError):  # ValueError: the files are closed already
                self._save()
            raise
        finally:
            self.progress.close()
            for file in self.files.values():
                with contextlib.suppress(OSError):
                    file.close()

    # ----------------------------------------------------------------------------------- state on disk

    def _open(self) -> None:
        sizes: dict[str, int] = {}
        try:
            saved = json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
            sizes, unfinished = saved["bytes"], saved["unfinished"]
            if any((self.folder / n).stat().st_size < size for n, size in sizes.items()):
                raise ValueError("shorter than noted")
            if unfinished is not None and not Path(unfinished["path"]).is_file():
                raise ValueError("the file is elsewhere now")
            state = (
                tuple(saved["position"]),
                saved["special"],
                Report.from_dict(saved["report"]),
                StoreStats(**saved["stats"]),
            )
            self.position, self.special, self.report, self.stats = state  # all of it, or none
            self.unfinished = unfinished
            self.spent = self.stats.seconds
            log.info(
                "data %s: going on after %s tokens, where it was interrupted",
                self.corpus.label,
                f"{self.stats.tokens:,}",
            )
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            sizes = {}
        for name in ("ids.bin", "ends.bin", "learnt.bin", "hashes.bin"):
            file = open(self.folder / name, "ab")  # closed by run
            file.truncate(sizes.get(name, 0))
            self.files[name] = file

    def _write(self, name: str, values: np.ndarray) -> None:
        # Not by numpy's tofile, which does not notice a full disk.
        self.files[name].write(values.tobytes())

    def _note(self, unfinished: dict | None = None) -> None:
        """What has been written up to now belongs together; a build that goes on does so from the last note."""
        self.stats.seconds = self.spent + time.monotonic() - self.started
        self.noted = {
            "position": self.position, "special": self.special, "report": self.report.to_dict(), "stats": asdict(self.stats),
            "bytes": {n: f.tell() for n, f in self.files.items()}, "unfinished": unfinished,
        }  # fmt: skip
        self.progress.show(self.stats.tokens, self.corpus.share(self.position, self.report))
        if time.monotonic() - self.saved > _SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        if self.noted is None:
            return
        for file in self.files.values():
            file.flush()
        partial = self.folder / "progress.json.new"
        partial.write_text(json.dumps(self.noted), encoding="utf-8")
        partial.replace(self.folder / "progress.json")
        self.saved = time.monotonic()

    # ----------------------------------------------------------------------------------------- the work

    def _batches(self) -> Iterator[list[tuple[Position, Example]]]:
        """A document that is too long to hold is the last of its batch."""
        batch: list[tuple[Position, Example]] = []
        size = 0
        for item in self.corpus.read(self.position, self.report):
            batch.append(item)
            size += _BATCH_CHARACTERS if is_long(item[1]) else sum(map(len, texts(item[1])))
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _add(self, batch: list[tuple[Position, Example]]) -> None:
        examples = [example for _, example in batch]
        if self.special == "auto":  # decided on once, by the first documents
            self.special = decide_special(self.encoder, examples, self.corpus.label)
        self.encoder = self.encoder.reading(self.special)
        self.position = batch[-1][0]
        self.stats.examples += len(examples)
        held = examples[:-1] if is_long(examples[-1]) else examples
        if held:
            self._add_rows(batch, held)
        if len(held) < len(examples):
            self._add_long(examples[-1].text, 0, self.stats.tokens)
        self._note()

    def _add_rows(self, batch: list, examples: list[Example]) -> None:
        before = self.encoder.counts.copy()
        encoded = self.encoder.encode(examples, self.corpus.is_code)
        for i, why in encoded.rejected:
            self.report.bad.rows -= 1  # counted as good when it was read
            self.report.bad(self.corpus.where(batch[i][0]), why)
        if not encoded.rows:
            return
        ids = np.concatenate([row.ids for row in encoded.rows])
        masked = encoded.rows[0].learnt is not None  # a source has one format
        self._write("ids.bin", ids)
        lengths = np.array([len(row.ids) for row in encoded.rows], dtype=np.int64)
        self._write("ends.bin", (self.stats.tokens + np.cumsum(lengths)))
        if masked:
            self.stats.is_stream = False
            learnt = np.concatenate([row.learnt for row in encoded.rows])
            self._write("learnt.bin", learnt)
            self.stats.learnt += int(learnt.sum())
        else:
            self.stats.learnt += len(ids)
        hashes = [hashlib.blake2b(row.ids, digest_size=8).digest() for row in encoded.rows]
        self.files["hashes.bin"].write(b"".join(hashes))
        self.stats.documents += len(encoded.rows)
        self.stats.tokens += len(ids)
        self.stats.text_bytes += encoded.text_bytes
        if self.corpus.label.startswith("wikitext"):
            self.stats.words += sum(len(t.split()) for e in examples for t in texts(e))
        for name, count in (self.encoder.counts - before).items():
            setattr(self.stats, name, getattr(self.stats, name) + count)

    def _add_long(self, text: LongText, done: int, first: int) -> None:
        """A document that is too long to hold, piece by piece; its pieces are one document only at its end.

        Args:
            done: pieces of it that are written already.
            first: where it begins in the store.
        """
        self.encoder = encoder = self.encoder.reading(self.special)
        brings = self.special == "parse"  # its own begin and end
        bos, eos = str(encoder.tokenizer.bos_token), str(encoder.tokenizer.eos_token)
        pieces, last = itertools.islice(text.pieces(), done, None), ""
        while batch := list(itertools.islice(pieces, _PIECES)):
            if done == 0 and encoder.bos is not None and not (brings and batch[0].startswith(bos)):
                self._append([np.array([encoder.bos], encoder.dtype)])
            self._append(encoder.encode_texts(batch))
            done, last = done + len(batch), batch[-1]
            self._note({"path": str(text.path), "pieces": done, "first": first})
        if not (brings and last.endswith(eos)):
            self._append([np.array([encoder.eos], encoder.dtype)])
        self._write("ends.bin", np.array([self.stats.tokens], np.int64))
        self.files["hashes.bin"].write(text.digest)
        self.stats.documents += 1
        self.stats.learnt += self.stats.tokens - first
        self.stats.text_bytes += text.bytes

    def _append(self, pieces: list[np.ndarray]) -> None:
        for ids in pieces:
            self._write("ids.bin", ids)
            self.stats.tokens += len(ids)

    def _finish(self) -> None:
        stats, report = self.stats, self.report
        stats.form = report.form or "text"
        stats.chat_form = self.encoder.form.name if self.encoder.form and not stats.is_stream else None
        stats.blank, stats.other_split, stats.generated = report.blank, report.other_split, report.generated
        stats.bad, stats.bad_listed = report.bad.bad, report.bad.listed
        report.bad.check()
        if not stats.documents:
            why = [f"{n:,} {what}" for n, what in ((report.blank, "blank"), (report.other_split, "of the other split"),
                                                   (report.generated, "generated"), (stats.bad, "bad")) if n]  # fmt: skip
            raise DataError(
                f"data {self.corpus.label}: there is nothing in it"
                + (f" but rows that are {', '.join(why)}" if why else "")
            )
        if not stats.learnt:
            raise DataError(f"data {self.corpus.label}: not one of its {stats.tokens:,} tokens would be learnt")
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        hashes = np.fromfile(self.folder / "hashes.bin", dtype=np.uint64)
        stats.duplicates = len(hashes) - len(np.unique(hashes))
        stats.seconds = self.spent + time.monotonic() - self.started
        names = ["ids.bin", "ends.bin"] + ([] if stats.is_stream else ["learnt.bin"])
        expected = {
            "ids.bin": stats.tokens * self.encoder.dtype.itemsize,
            "ends.bin": stats.documents * 8,
            "learnt.bin": stats.tokens,
        }
        facts = {}
        for name in names:
            found = (self.folder / name).stat()
            assert found.st_size == expected[name], (name, found.st_size, expected[name])
            facts[name] = {
                "bytes": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "blake2b": _digest(self.folder / name),
            }
        for name in ("hashes.bin", "progress.json", *({"learnt.bin"} - set(names))):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "store.json").write_text(
            json.dumps({"stats": asdict(stats), "files": facts}, indent=1), encoding="utf-8"
        )
        log.info("data %s: %s documents, %s tokens (%s tok/s), %.0f %% learnt", stats.source, f"{stats.documents:,}", f"{stats.tokens:,}",
                 f"{stats.tokens / max(stats.seconds, 1e-9):,.0f}", 100 * stats.learnt / stats.tokens)  # fmt: skip
        for line in _remarks(stats):
            log.warning("data %s: %s", stats.source, line)


def decide_special(encoder: Encoder, examples: Sequence[Example], label: str) -> str:
    """`text` or `parse`: what a special token's name in a source's documents is, by the first of them.

    Conversations need no decision: their special tokens are the prompt form's.
    """
    if encoder.special_tokens != "auto":
        return encoder.special_tokens
    documents = [e for e in examples[:100] if not isinstance(e, Conversation) and not is_long(e)]
    holding = sum(any(map(encoder.holds_control, texts(e))) for e in documents)
    if documents and holding * 2 >= len(documents):
        log.info("data %s: %d of the first %d documents hold special tokens, so these are parsed; data.special_tokens=text "
                 "would read them as text", label, holding, len(documents))  # fmt: skip
        return "parse"
    return "text"


def _remarks(stats: StoreStats) -> Iterator[str]:
    if stats.bad:
        yield f"{stats.bad:,} rows cannot be used and were left out; the first: {'; '.join(stats.bad_listed[:3])}"
    if stats.special_text:
        yield (f"{stats.special_text:,} documents hold the name of a special token, read as the text that it is; "
               "data.special_tokens=parse makes tokens of them")  # fmt: skip
    if stats.duplicates > 0.1 * stats.documents:
        yield f"{stats.duplicates:,} of {stats.documents:,} documents are copies of earlier ones"


class _Progress:
    """A bar where a person looks on, a line every ten seconds elsewhere."""

    def __init__(self, label: str, tokens: int):
        self.label, self.first = label, tokens
        self.began = self.said = time.monotonic()
        self.first_share: float | None = None
        self.bar = None
        if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
            from tqdm import tqdm

            self.bar = tqdm(
                desc=f"tokenising {label}",
                total=1.0,
                bar_format="{desc}: {percentage:3.0f}% |{bar}| {postfix}",
                leave=False,
            )

    def show(self, tokens: int, share: float | None) -> None:
        """
        Args:
            share: about how much of the source has been read; None: that cannot be told.
        """
        now = time.monotonic()
        if self.first_share is None:
            self.first_share = share  # what a build that goes on has behind it took no time now
            self.began, self.first = now, tokens
            return
        speed = (tokens - self.first) / max(now - self.began, 1e-9)
        eta = ""
        if share is not None and self.first_share < share < 1:
            eta = f", {(now - self.began) * (1 - share) / (share - self.first_share):,.0f} s to go"
        if self.bar is not None:
            self.bar.n = share or 0.0
            self.bar.set_postfix_str(f"{tokens:,} tokens, {speed:,.0f} tok/s{eta}")
        elif now - self.said > 10:
            self.said = now
            log.info(
                "data %s: %s%s tokens, %s tok/s%s",
                self.label,
                f"{share:.0%}, " if share else "",
                f"{tokens:,}",
                f"{speed:,.0f}",
                eta,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
