"""Blocks of a corpus that is read and tokenised while it is trained on, and never stored whole.

A stream is a pure function of sources, tokenizer, options and seed, and its rows have numbers. Every rank makes the whole
stream, which costs little beside training, and takes the rows that its sampler asks for; so any number of ranks sees the
same rows in the same order, and a run that is resumed asks for the next number. Where each chunk of rows begins in the
sources is noted on disk: going on reads from there, not from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from .blocks import cut_row, lay_out
from .formats import Example, Text, is_long, texts
from .packing import best_fit
from .sources import START, Corpus, Position, Report
from .store import decide_special, store_key
from .tokenise import Row

if TYPE_CHECKING:
    from ..config import DataConfig
    from .tokenise import Encoder

_BATCH_CHARACTERS = 1 << 20
log = logging.getLogger(__name__)


@dataclass
class StreamStats:
    sources: list[str]
    seq_len: int
    isolated: bool
    streaming: bool = True


class _Source:
    """One source's place in the stream."""

    def __init__(self, corpus: Corpus, weight: float):
        self.corpus, self.weight = corpus, weight
        self.position: Position = START
        self.report = Report(bad=corpus.bad())
        self.tokens = 0
        self.given = 0
        """Rows since its beginning."""
        self.special: str | None = None
        self._reader: Iterator[tuple[Position, Example]] | None = None

    def state(self) -> dict:
        return {
            "position": self.position,
            "report": self.report.to_dict(),
            "tokens": self.tokens,
            "given": self.given,
            "special": self.special,
        }

    def restore(self, state: dict) -> None:
        self.position, self.report = tuple(state["position"]), Report.from_dict(state["report"])
        self.tokens, self.given, self.special, self._reader = state["tokens"], state["given"], state["special"], None

    def batch(self) -> list[Example]:
        """The next examples; an empty list at the source's end, after which it begins anew."""
        if self._reader is None:
            self._reader = self.corpus.read(self.position, self.report)
        examples: list[Example] = []
        size = 0
        for position, example in self._reader:
            examples.append(example)
            self.position = position
            size += example.text.bytes if is_long(example) else sum(map(len, texts(example)))
            if size >= _BATCH_CHARACTERS:
                return examples
        if not examples:
            if not self.given:
                why = "" if self.position == START else " but rows that are left out"
                raise DataError(f"data {self.corpus.label}: there is nothing in it{why}")
            self.position, self._reader, self.given = START, None, 0
            self.report = Report(form=self.report.form, bad=self.corpus.bad())
        return examples


class StreamedBlocks:
    """Rows by number, as `Blocks`; `len` is as many as are asked for (`length`), the stream itself has no end.

    Rows are shuffled within chunks of about `shuffle_rows`. Several sources are mixed so that their tokens keep the
    proportion of their weights.
    """

    def __init__(
        self, corpora: Sequence[Corpus], weights: Sequence[float], encoder: Encoder, data: DataConfig, seed: int, pad_id: int,
        cache_dir: Path, length: int = 1 << 40,
    ):  # fmt: skip
        self.encoder, self.data, self.seed, self.pad_id, self.length = encoder, data, seed, pad_id, length
        self.stats = StreamStats([c.label for c in corpora], data.seq_len, data.isolate)
        self._sources = [_Source(c, w) for c, w in zip(corpora, weights, strict=True)]
        made_of = [[store_key(c, encoder) for c in corpora], list(weights), data.seq_len, data.shuffle_rows, data.isolate,
                   data.overlong, seed]  # fmt: skip
        key = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()
        self.folder = cache_dir / "streams" / key
        self._tail: list[np.ndarray] = []
        """Text that is not a whole row yet: one array per document, or part of one."""
        self._first = self._next = 0
        self._rows: list[dict[str, np.ndarray]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < self.length:
            raise IndexError(i)
        if not self._first <= i < self._next:
            self._seek(i)
        while i >= self._next:
            self._make_chunk()
        return self._rows[i - self._first]

    # ------------------------------------------------------------------------------------------ where we are

    def _seek(self, i: int) -> None:
        """To the last noted place from which row `i` comes, unless we are between the two already."""
        noted = sorted(int(p.stem) for p in self.folder.glob("[0-9]*.json")) if self.folder.is_dir() else []
        best = max((n for n in noted if n <= i), default=0)
        if self._next <= i and best <= self._next:
            return
        for first in [n for n in reversed(noted) if n <= i]:
            try:
                state = json.loads((self.folder / f"{first}.json").read_text(encoding="utf-8"))
                for source, saved in zip(self._sources, state["sources"], strict=True):
                    source.restore(saved)
                self._tail = [np.array(part, self.encoder.dtype) for part in state["tail"]]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # cut off while it was written
            self._first = self._next = first
            self._rows = []
            return
        for source in self._sources:
            source.restore(_Source(source.corpus, source.weight).state())
        self._tail, self._rows, self._first, self._next = [], [], 0, 0

    def _note(self) -> None:
        place = self.folder / f"{self._next}.json"
        if place.exists():
            return
        state = {"sources": [s.state() for s in self._sources], "tail": [part.tolist() for part in self._tail]}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = place.with_suffix(f".{id(self)}.new")
            partial.write_text(json.dumps(state), encoding="utf-8")
            partial.replace(place)
        except OSError as error:  # without it a resumed run reads from the beginning: slow, and right
            log.warning("the stream's place cannot be noted in %s: %s", self.folder, error.strerror or error)

    # ---------------------------------------------------------------------------------------------- its rows

    def _make_chunk(self) -> None:
        """The next rows: as many documents as fill `shuffle_rows`, packed and shuffled."""
        self._note()
        wanted = self.data.shuffle_rows * self.data.seq_len
        rows: list[dict[str, np.ndarray]] = []
        whole: list[Row] = []  # conversations and the like
        got = sum(map(len, self._tail))
        while got < wanted or not (rows or whole or got >= self.data.seq_len):
            source = min(self._sources, key=lambda s: s.tokens / s.weight)
            examples = source.batch()
            if not examples:
                if len(self._sources) == 1:
                    if self._tail:
                        rows += self._cut_tail(everything=True)
                    if rows or whole:  # the end of an epoch is the end of a chunk
                        break
                continue
            for row in self._encoded(source, examples):
                source.tokens += len(row.ids)
                source.given += 1
                got += len(row.ids)
                if row.learnt is None:
                    self._tail.append(row.ids)
                else:
                    whole.append(row)
        rows += self._cut_tail()
        rows += self._packed(whole)
        if self.data.shuffle_rows > 1:
            order = np.random.default_rng([self.seed, self._next]).permutation(len(rows))
            rows = [rows[k] for k in order]
        self._rows, self._first = rows, self._next
        self._next += len(rows)

    def _encoded(self, source: _Source, examples: list[Example]) -> list[Row]:
        if source.special is None:
            source.special = decide_special(self.encoder, examples, source.corpus.label)
        examples = [Text("".join(e.text.pieces())) if is_long(e) else e for e in examples]
        encoded = self.encoder.reading(source.special).encode(examples, source.corpus.is_code)
        for _, why in encoded.rejected:
            source.report.bad.rows -= 1
            source.report.bad(f"data {source.corpus.label}: a row near {source.corpus.where(source.position)}", why)
        return [fitting for row in encoded.rows if (fitting := self._fitting(row)) is not None]

    def _fitting(self, row: Row) -> Row | None:
        """A row that is longer than a block, by the stated rule."""
        room = self.data.seq_len
        if row.learnt is None or len(row.ids) <= room:
            return row
        if self.data.overlong == "error":
            raise DataError(f"data: a row has {len(row.ids):,} tokens, more than data.seq_len={room}; data.overlong=cut or drop says "
                            "what becomes of it")  # fmt: skip
        if self.data.overlong == "drop":
            return None
        a, b = cut_row(row.learnt, room)
        return Row(row.ids[a:b], row.learnt[a:b])

    def _cut_tail(self, everything: bool = False) -> list[dict[str, np.ndarray]]:
        """Rows of what text has come together; with `everything` the last one is padded."""
        rows, parts, size, room = [], [], 0, self.data.seq_len
        for part in self._tail:
            at = 0
            while at < len(part):
                piece = part[at : at + room - size]
                parts.append(piece)
                size += len(piece)
                at += len(piece)
                if size == room:
                    rows.append(lay_out(parts, None, [len(p) for p in parts], room, self.pad_id, self.data.isolate))
                    parts, size = [], 0
        if everything and parts:
            rows.append(lay_out(parts, None, [len(p) for p in parts], room, self.pad_id, self.data.isolate))
            parts = []
        self._tail = parts
        return rows

    def _packed(self, whole: list[Row]) -> list[dict[str, np.ndarray]]:
        room = self.data.seq_len
        if not whole:
            return []
        order, begins = best_fit(np.array([len(row.ids) for row in whole]), room)
        rows = []
        for a, b in zip(begins[:-1], begins[1:], strict=True):
            ids, learnt = zip(*((whole[k].ids, whole[k].learnt) for k in order[a:b]), strict=True)
            rows.append(lay_out(ids, learnt, list(map(len, ids)), room, self.pad_id, self.data.isolate))
        return rows
