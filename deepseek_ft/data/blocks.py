"""Documents -> blocks of `seq_len` token ids, in a memory-mapped file that is cached by what made it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError
from .sources import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1  # part of every key: raise it when the same input should give other blocks
_BATCH_BYTES = 4 << 20  # text per call of the tokenizer: enough to keep all cores busy, little enough to hold
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockStats:
    """What went in and what came out: `tokens == blocks * seq_len + dropped_tokens`."""

    sources: list[str]
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    words: int
    """White-space separated words of the documents."""
    tokens: int
    """Including one end-of-sentence token per document."""
    blocks: int
    seq_len: int
    dropped_tokens: int
    """The last, partial block."""
    dtype: str


class Blocks:
    """A read-only sequence of blocks; opening it costs nothing, whatever its size."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stats = BlockStats(**json.loads((folder / "stats.json").read_text(encoding="utf-8")))
        shape = (self.stats.blocks, self.stats.seq_len)
        size = (folder / "tokens.bin").stat().st_size
        if size != shape[0] * shape[1] * np.dtype(self.stats.dtype).itemsize:
            raise ValueError(f"tokens.bin has {size} bytes, which is not {shape[0]} x {shape[1]} tokens")
        self.ids = np.memmap(folder / "tokens.bin", dtype=self.stats.dtype, mode="r", shape=shape)

    def __len__(self) -> int:
        return self.stats.blocks

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, both `(seq_len,)` int64: every token of a block is a target but its first."""
        row = self.ids[i].astype(np.int64)
        return {"input_ids": row, "labels": row}


def blocks_key(corpora: list[Corpus], tokenizer_id: str, seq_len: int) -> str:
    made_of = {
        "format": FORMAT,
        "corpora": [c.fingerprint for c in corpora],
        "tokenizer": tokenizer_id,
        "seq_len": seq_len,
    }
    return hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def build_blocks(
    corpora: list[Corpus], tokenizer: Tokenizer, tokenizer_id: str, eos_id: int, seq_len: int, cache_dir: Path
) -> Blocks:
    """Blocks over all documents of all corpora in order, an end-of-sentence token after each document.

    They come from the cache when content, tokenizer and `seq_len` are those of an earlier call. Two processes that
    want the same blocks at once build them once; an interrupted build leaves nothing that a later one would take.

    Raises:
        DataError: a source cannot be read, or all of it is shorter than one block.
    """
    from filelock import FileLock

    key = blocks_key(corpora, tokenizer_id, seq_len)
    folder = cache_dir / "blocks" / key
    label = " + ".join(c.label for c in corpora)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            try:
                blocks = Blocks(folder)
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning("data %s: the cache %s is damaged (%s) and made again", label, folder, error)
                shutil.rmtree(folder)
            else:
                log.info("data %s: %s blocks of %d tokens from the cache", label, f"{len(blocks):,}", seq_len)
                return blocks
        building = folder.with_suffix(".building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            stats = _tokenise(corpora, tokenizer, eos_id, seq_len, building / "tokens.bin", label)
            (building / "stats.json").write_text(json.dumps(asdict(stats), indent=1), encoding="utf-8")
            building.replace(folder)
        except OSError as error:
            raise DataError(f"the token cache {building} cannot be written: {error.strerror or error}; set data.cache_dir "
                            "or $DEEPSEEK_FT_CACHE to a disk with room") from None  # fmt: skip
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return Blocks(folder)


def _tokenise(
    corpora: list[Corpus], tokenizer: Tokenizer, eos_id: int, seq_len: int, path: Path, label: str
) -> BlockStats:
    dtype = np.uint16 if tokenizer.get_vocab_size(with_added_tokens=True) <= 2**16 else np.uint32
    documents = text_bytes = words = tokens = 0
    started = said = time.monotonic()
    with open(path, "wb") as file:
        for corpus in corpora:
            for batch in _batches(corpus.documents()):
                rows = []
                for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                    rows.append(np.array([*encoding.ids, eos_id], dtype=dtype))
                ids = np.concatenate(rows)
                ids.tofile(file)
                documents += len(batch)
                tokens += len(ids)
                text_bytes += sum(len(d.encode("utf-8")) for d in batch)
                words += sum(len(d.split()) for d in batch)
                if time.monotonic() - said > 5:
                    said = time.monotonic()
                    log.info("data %s: %s tokens, %s tok/s", label, f"{tokens:,}", f"{tokens / (said - started):,.0f}")
        blocks = tokens // seq_len
        if blocks == 0:
            raise DataError(f"data {label}: {documents:,} documents hold {tokens:,} tokens, and one block takes data.seq_len="
                            f"{seq_len}; use a shorter data.seq_len or more text")  # fmt: skip
        file.truncate(blocks * seq_len * np.dtype(dtype).itemsize)
        file.flush()
        os.fsync(file.fileno())
    dropped = tokens - blocks * seq_len
    seconds = time.monotonic() - started
    log.info("data %s: %s documents, %s tokens (%s tok/s) -> %s blocks of %d; the last %d tokens are no full block",
             label, f"{documents:,}", f"{tokens:,}", f"{tokens / seconds:,.0f}", f"{blocks:,}", seq_len, dropped)  # fmt: skip
    return BlockStats([c.label for c in corpora], documents, text_bytes, words, tokens, blocks, seq_len, dropped,
                      np.dtype(dtype).name)  # fmt: skip
