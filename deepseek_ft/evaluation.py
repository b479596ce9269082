"""Perplexity on held-out blocks: sums of negative log likelihood, whatever the batch size and the ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .data.blocks import IGNORED, Blocks, collate
from .losses import Head


def needs_lengths(model: Callable) -> bool:
    """Whether a batch must say where documents begin (`collate`): for flash attention.

    Asked of the model itself: of its wrappers DDP has no `config`, and DeepSpeed's is another.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    return str(getattr(config, "_attn_implementation", None)).startswith("flash")


@torch.no_grad()
def block_nll(
    model: Callable,
    blocks: Blocks | Sequence[dict],
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    head: Head | None = None,
    copies: int = 1,
) -> np.ndarray:
    """Negative log likelihood of each block's targets, in nats, shape `(len(blocks),)`, the same on every rank.

    Each of `world_size` ranks (or pipelines) takes every so-manieth batch. One that has run out computes one more batch for
    nothing: under ZeRO-3 every forward pass is collective.

    Args:
        copies: how many ranks have the same figures of a batch, for they compute it together.
        head: the model's, to do without its logits (B, T, V); without it one row's at a time are also held in fp32.
    """
    was_training = getattr(model, "training", False)
    lengths = needs_lengths(model)
    model.eval()
    sums = torch.zeros(len(blocks), dtype=torch.float64, device=device)
    starts = range(0, len(blocks), batch_size)
    for turn in range(math.ceil(len(starts) / world_size)):
        mine = turn * world_size + rank
        start = starts[mine] if mine < len(starts) else 0
        rows = range(start, min(start + batch_size, len(blocks)))
        batch = collate([blocks[i] for i in rows], lengths=lengths)
        batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        labels = batch.pop("labels")
        with head.scoring(labels) if head is not None else contextlib.nullcontext():
            logits = model(**batch, use_cache=False).logits  # a cache would make documents of one block see each other
        if mine < len(starts):
            for i, row in enumerate(rows):
                sums[row] = logits[i].double().sum() if head is not None else torch.nn.functional.cross_entropy(
                    logits[i, :-1].float(), labels[i, 1:], ignore_index=IGNORED, reduction="sum"
                )  # fmt: skip
        del logits
    if dist.is_initialized():
        dist.all_reduce(sums)
        sums /= copies
    if was_training:
        model.train()
    return sums.cpu().numpy()


def summarise(nll: np.ndarray, blocks: Blocks, bytes_of_token: np.ndarray) -> dict[str, float]:
    """Token-weighted figures of `block_nll`.

    loss: nats per target token. perplexity: its exponential. bits_per_byte: bits per UTF-8 byte of the targets,
    comparable between tokenizers (special tokens are scored and have no bytes). word_perplexity: exp(nats per byte
    x bytes per white-space separated word), which for WikiText is the word-level perplexity of the literature up to
    its end-of-line tokens. tokens: how many targets were scored; each block's first token has no prediction.
    """
    tokens, total, target_bytes = 0, float(nll.sum()), 0
    for row in blocks:
        targets = row["labels"][row["labels"] != IGNORED]
        tokens += targets.size
        target_bytes += int(bytes_of_token[targets].sum())
    loss = total / tokens
    figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
    if target_bytes:
        nats_per_byte = total / target_bytes
        figures["bits_per_byte"] = nats_per_byte / math.log(2)
        if any(source.startswith("wikitext") for source in blocks.stats.sources):
            per_word = nats_per_byte * blocks.stats.text_bytes / max(1, blocks.stats.words)
            figures["word_perplexity"] = math.exp(min(per_word, 700.0))
    return figures
