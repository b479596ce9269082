"""Blocks of `seq_len` as a view of tokens on disk.

`Blocks` lays a source's documents into rows: text one after the other, conversations by best fit. It is made anew at every
start, in a moment, so another `seq_len`, weight or mixture tokenises nothing again.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from .formats import Conversation
from .packing import best_fit
from .sources import Corpus
from .store import TokenStore, build_store

if TYPE_CHECKING:
    from .tokenise import Encoder

IGNORED = -100
log = logging.getLogger(__name__)


@dataclass
class BlockStats:
    """What became of the documents. Every token of the stores is in a block as often as its weight says, or reported:
    `tokens + cut_tokens + dropped_tokens` is what the stores hold, times the weights."""

    sources: list[str]
    documents: int
    text_bytes: int
    words: int
    tokens: int
    """In blocks, without padding."""
    blocks: int
    seq_len: int
    isolated: bool
    cut_rows: int = 0
    cut_tokens: int = 0
    dropped_rows: int = 0
    dropped_tokens: int = 0
    padding: int = 0
    per_source: dict[str, int] = field(default_factory=dict)
    """Tokens of each source in the blocks."""


class Blocks:
    """Rows of `seq_len` tokens over one or several stores; a sequence that a DataLoader can read.

    In the text part row i is the i-th `seq_len` tokens of all
    text, one document after the other; in the packed part it is the documents that best fit chose.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], seq_len: int, pad_id: int, isolate: bool = True,
                 overlong: str = "cut"):  # fmt: skip
        """
        Raises:
            DataError: the text is shorter than one block, or a row is longer and `overlong` is `error`.
        """
        self.stores, self.seq_len, self.pad_id, self.isolate = list(stores), seq_len, pad_id, isolate
        self.stats = BlockStats([s.stats.source for s in stores], sum(s.stats.documents for s in stores),
                                sum(s.stats.text_bytes for s in stores), sum(s.stats.words for s in stores), 0, 0, seq_len, isolate)  # fmt: skip
        self._lay_text(weights)
        self._lay_packed(weights, overlong)
        stats = self.stats
        stats.blocks = len(self)
        stats.padding = stats.blocks * seq_len - stats.tokens
        if not stats.blocks or (self._packed_rows == 0 and self._text_tokens < seq_len):
            raise DataError(f"data {' + '.join(stats.sources)}: {stats.documents:,} documents hold {stats.tokens:,} tokens, and one block "
                            f"takes data.seq_len={seq_len}; use a shorter data.seq_len or more text")  # fmt: skip

    # --------------------------------------------------------------------------------------------- layout

    def _lay_text(self, weights: Sequence[float]) -> None:
        """Extents of the text, in order, and where each begins in the whole."""
        extents = []
        for number, (store, weight) in enumerate(zip(self.stores, weights, strict=True)):
            if not store.stats.is_stream:
                continue
            size = len(store.ids)
            whole = int(weight)
            extents += [(number, 0, size)] * whole
            if weight > whole:  # up to the document's end that is nearest to the share
                wanted = (weight - whole) * size
                i = min(int(np.searchsorted(store.ends, wanted)), len(store.ends) - 1)
                if i and wanted - store.ends[i - 1] < store.ends[i] - wanted:
                    i -= 1
                extents.append((number, 0, int(store.ends[i])))
                self.stats.dropped_tokens += size - int(store.ends[i]) if not whole else 0
            self._count(store, sum(e[2] for e in extents if e[0] == number))
        self._extents = extents
        self._begins = [0, *itertools.accumulate(b - a for _, a, b in extents)]
        self._text_tokens = self._begins[-1]
        self._text_rows = -(-self._text_tokens // self.seq_len)

    def _count(self, store: TokenStore, tokens: int) -> None:
        self.stats.tokens += tokens
        self.stats.per_source[store.stats.source] = self.stats.per_source.get(store.stats.source, 0) + tokens

    def _lay_packed(self, weights: Sequence[float], overlong: str) -> None:
        """Which documents share a row: arrays of (store, start, length) in the order of the rows."""
        which, starts, lengths = [], [], []
        for number, (store, weight) in enumerate(zip(self.stores, weights, strict=True)):
            if store.stats.is_stream:
                continue
            begin, size = store.starts(), np.diff(store.ends, prepend=0)
            begin, size = self._shorten(store, begin, size, overlong)
            whole = int(weight)
            # A part of the documents, spread evenly: the same ones at every start.
            share = np.floor(np.arange(1, len(size) + 1) * (weight - whole) + 1e-9)
            some = np.flatnonzero(np.diff(share, prepend=0.0))
            take = np.concatenate([np.tile(np.arange(len(size)), whole), some]).astype(np.int64)
            if not whole:
                self.stats.dropped_rows += len(size) - len(some)
                self.stats.dropped_tokens += int(size.sum() - size[some].sum())
            which.append(np.full(len(take), number, np.int32))
            starts.append(begin[take])
            lengths.append(size[take])
            self._count(store, int(size[take].sum()))
        self._packed_rows = 0
        if not which or not sum(map(len, which)):
            return
        which, starts, lengths = map(np.concatenate, (which, starts, lengths))
        order, self._row_begins = best_fit(lengths, self.seq_len)
        self._which, self._starts, self._lengths = which[order], starts[order], lengths[order]
        self._packed_rows = len(self._row_begins) - 1

    def _shorten(self, store: TokenStore, begin: np.ndarray, size: np.ndarray, overlong: str):
        """Begin and size of each document, those longer than a block by the stated rule."""
        room = self.seq_len
        long = np.flatnonzero(size > room)
        begin, size = begin.copy(), size.copy()
        if len(long) and overlong == "error":
            worst = int(size[long].max())
            raise DataError(f"data {store.stats.source}: {len(long):,} rows are longer than data.seq_len={room}, the longest has {worst:,} "
                            "tokens; data.overlong=cut or drop says what becomes of them")  # fmt: skip
        if overlong == "drop":
            self.stats.dropped_rows += len(long)
            self.stats.dropped_tokens += int(size[long].sum())
            keep = np.setdiff1d(np.arange(len(size)), long)
            begin, size = begin[keep], size[keep]
        else:
            for i in long:
                a, b = cut_row(store.learnt[begin[i] : begin[i] + size[i]], room)
                self.stats.cut_rows += 1
                self.stats.cut_tokens += int(size[i] - (b - a))
                begin[i], size[i] = begin[i] + a, b - a
        return begin, size

    # ----------------------------------------------------------------------------------------------- rows

    def __len__(self) -> int:
        return self._text_rows + self._packed_rows

    def parts(self, i: int) -> tuple[list[np.ndarray], list[np.ndarray] | None, list[int]]:
        """What is in row `i`, as `lay_out` takes it: ids in as few pieces as they lie in, which of them are learnt, and the
        sizes of the documents, or parts of them."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        if i >= self._text_rows:
            which = slice(self._row_begins[i - self._text_rows], self._row_begins[i - self._text_rows + 1])
            ids, learnt, sizes = [], [], self._lengths[which].tolist()
            for number, start, size in zip(
                self._which[which].tolist(), self._starts[which].tolist(), sizes, strict=True
            ):
                ids.append(self.stores[number].ids[start : start + size])
                learnt.append(self.stores[number].learnt[start : start + size])
            return ids, learnt, sizes
        begin, end = i * self.seq_len, min((i + 1) * self.seq_len, self._text_tokens)
        ids, sizes = [], []
        j = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:
            number, first, _ = self._extents[j]
            until = min(end, self._begins[j + 1])
            a = first + begin - self._begins[j]
            b = a + until - begin
            store = self.stores[number]
            ids.append(store.ids[a:b])
            low, high = store.ends.searchsorted((a, b), side="right")
            for cut in store.ends[low:high].tolist():
                sizes.append(cut - a)
                a = cut
            if a < b:
                sizes.append(b - a)
            begin, j = until, j + 1
        return ids, None, sizes

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """A row as `lay_out` describes it."""
        return lay_out(*self.parts(i if i >= 0 else i + len(self)), self.seq_len, self.pad_id, self.isolate)

    def count_targets(self) -> int:
        """Tokens that a loss is taken of, row by row: a pass over everything."""
        return sum(int((row["labels"] != IGNORED).sum()) for row in self)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, np.ndarray]]:
        return [self[i] for i in rows]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[i] for i in range(len(self)))


def lay_out(
    ids: Sequence[np.ndarray], learnt: Sequence[np.ndarray] | None, sizes: Sequence[int], seq_len: int, pad_id: int, isolate: bool
) -> dict[str, np.ndarray]:  # fmt: skip
    """A row: `input_ids`, `labels` and, where documents are apart, `position_ids`; each (seq_len,) int64.

    A label of -100 is no target: the first token of a document, what is only read, and padding, which is at the row's
    end. Positions begin at 0 with each document; transformers' masks read from them who sees whom.

    Args:
        ids: what the row holds, in any number of pieces.
        learnt: the same pieces in 0 and 1; None: every token.
        sizes: tokens of each document, in order.
    """
    row, labels, positions = np.empty((3, seq_len), np.int64)
    at = 0
    for piece in ids:
        row[at : at + len(piece)] = piece
        at += len(piece)
    labels[:] = row
    if learnt is not None:
        labels[:at][np.concatenate(learnt) == 0] = IGNORED
    if at < seq_len:
        row[at:], labels[at:] = pad_id, IGNORED
        sizes = [*sizes, seq_len - at]  # padding is apart, too
    if not isolate:
        labels[0] = IGNORED
        return {"input_ids": row, "labels": labels}
    steps = _steps(seq_len)
    begin = 0
    for size in sizes:
        labels[begin] = IGNORED
        positions[begin : begin + size] = steps[:size]
        begin += size
    return {"input_ids": row, "labels": labels, "position_ids": positions}


@functools.lru_cache(maxsize=4)
def _steps(count: int) -> np.ndarray:
    return np.arange(count)


def cut_row(learnt: np.ndarray, room: int) -> tuple[int, int]:
    """Which `room` tokens of a longer row are kept, so that it never loses all its targets.

    From the row's beginning, where at least half of the room comes after its first target. Otherwise the prompt's
    beginning goes, so that half of the room, or all of the first answer if that is shorter, is for what is learnt.

    Returns:
        Begin and end.
    """
    first = int(np.argmax(learnt))
    if first <= room // 2:
        return 0, room
    rest = np.flatnonzero(learnt[first:] == 0)
    answer = int(rest[0]) if len(rest) else len(learnt) - first
    begin = first + min(answer, room - room // 2) - room
    return max(0, begin), max(0, begin) + room


def collate(rows: Sequence[dict], lengths: bool = False) -> dict:
    """Rows -> tensors (B, T).

    Args:
        lengths: also say where documents begin in the flattened batch, as flash attention wants it: it looks at positions
            only where there is one row, and with several would let documents see each other.
    """
    import torch

    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    if lengths and "position_ids" in batch:
        begins = torch.nonzero(batch["position_ids"].reshape(-1) == 0).reshape(-1).to(torch.int32)
        ends = torch.cat([begins, torch.tensor([batch["input_ids"].numel()], dtype=torch.int32)])
        longest = int(ends.diff().max())
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return batch


def load_blocks(
    corpora: Sequence[Corpus], weights: Sequence[float], encoder: Encoder, seq_len: int, cache_dir: Path, isolate: bool = True,
    overlong: str = "cut", pad_id: int | None = None,
) -> Blocks:  # fmt: skip
    """Blocks over all documents of all corpora, tokenised now or found in the cache.

    Raises:
        DataError: a source cannot be read, or there is not one block in all of it.
    """
    stores = [build_store(corpus, encoder, cache_dir) for corpus in corpora]
    blocks = Blocks(stores, weights, seq_len, encoder.eos if pad_id is None else pad_id, isolate, overlong)
    stats = blocks.stats
    log.info("data %s: %s blocks of %d, %s tokens, %.1f %% padding%s", " + ".join(stats.sources), f"{stats.blocks:,}", seq_len,
             f"{stats.tokens:,}", 100 * stats.padding / (stats.blocks * seq_len),
             f"; {stats.cut_rows:,} rows cut by {stats.cut_tokens:,} tokens" if stats.cut_rows else "")  # fmt: skip
    return blocks


def needs_form(corpora: Sequence[Corpus]) -> bool:
    """Whether any of them holds conversations, by their first examples."""
    firsts = (
        next(corpus.examples(), None) for corpus in corpora if corpus.has_rows
    )  # a long text is not begun for this
    return any(isinstance(example, Conversation) for example in firsts)
