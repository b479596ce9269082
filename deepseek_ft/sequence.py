"""Every rank a part of every sequence (Ulysses, arXiv:2309.14509): ZeRO-3, but for attention, where ranks exchange tokens for heads.

All ranks read the same rows, and each computes a run of their tokens. Within attention a rank has all tokens of its share of the heads;
before and after it the ranks exchange what they have. Positions, targets and the documents of a row are those of the whole row.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .data.blocks import IGNORED
from .errors import RunError
from .trainer import FineTuneTrainer

NAME = "deepseek_ft_sequence"
"""What the exchange is called among transformers' attention functions."""


class _Exchange(torch.autograd.Function):
    """Pieces along one dimension go to their ranks, and what comes is put together along another. Its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, apart: int, together: int) -> torch.Tensor:
        ctx.way = together, apart
        pieces = torch.stack(x.chunk(dist.get_world_size(), apart))
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces)
        return torch.cat(arrived.unbind(), together)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Exchange.apply(gradient, *ctx.way), None, None


def exchange(x: torch.Tensor, apart: int, together: int) -> torch.Tensor:
    """All ranks' tensors, cut along `apart` and put together along `together` in the order of the ranks.

    With `apart` the heads and `together` the tokens, (B, H, t, D) becomes (B, H / W, W t, D). Collective.
    """
    return _Exchange.apply(x, apart, together)


class Parts:
    """This rank's part of every row of a model's batches, and attention over whole rows."""

    def __init__(self, model: PreTrainedModel, rank: int, count: int):
        self.config, self.rank, self.count = model.config, rank, count
        self.usual: str = self.config._attn_implementation
        self._positions: torch.Tensor | None = None
        """(B, T) of the whole rows at work, where documents in them do not see each other."""
        self._mask: torch.Tensor | None = None
        self.calls = 0
        """Of attention over whole rows so far."""
        ALL_ATTENTION_FUNCTIONS.register(NAME, self.attention)

    def of(self, batch: dict) -> dict:
        """A batch (B, T) cut to (B, T / W), with explicit positions, and as `shift_labels` each token's next.

        What tells flash attention where documents begin stays: it is of the whole rows.
        """
        ids, labels = batch["input_ids"], batch["labels"]
        length = ids.shape[1] // self.count
        here = slice(self.rank * length, (self.rank + 1) * length)
        restarts = batch.get("position_ids")
        positions = torch.arange(ids.shape[1]).expand_as(ids) if restarts is None else restarts
        following = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return batch | {"input_ids": ids[:, here], "labels": labels[:, here], "shift_labels": following[:, here],
                        "position_ids": positions[:, here], "whole_positions": restarts}  # fmt: skip

    @contextlib.contextmanager
    def together(self, whole_positions: torch.Tensor | None) -> Iterator[None]:
        """Inside, the model's attention is over whole rows."""
        self._positions, self._mask = whole_positions, None
        self.config._attn_implementation = NAME
        try:
            yield
        finally:
            self.config._attn_implementation = self.usual
            self._positions = self._mask = None

    def attention(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
                  **more: Any) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """transformers' attention function: (B, H, t, D) of queries, keys, values -> (B, t, H, D)."""
        self.calls += 1
        query, key, value = (exchange(x, 1, 2) for x in (query, key, value))
        usual = ALL_ATTENTION_FUNCTIONS.get_interface(self.usual, sys.modules[type(module).__module__].eager_attention_forward)
        if "position_ids" in more and self._positions is not None:
            more["position_ids"] = self._positions
        mixed, weights = usual(module, query, key, value, self._whole_mask(query), **more)
        return exchange(mixed, 1, 2), weights

    def _whole_mask(self, query: torch.Tensor) -> torch.Tensor | None:
        """Causal, and within documents; None where the attention at work needs none. (B or 1, 1, T, T), the same for all layers."""
        if self.usual.startswith("flash") or (self.usual == "sdpa" and self._positions is None):
            return None
        if self._mask is None:
            tokens = query.shape[2]
            sees = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()[None, None]
            if self._positions is not None:
                document = (self._positions == 0).cumsum(-1)
                sees = sees & (document[:, None, :, None] == document[:, None, None, :])
            if self.usual != "sdpa":
                sees = torch.zeros_like(sees, dtype=query.dtype).masked_fill(~sees, torch.finfo(query.dtype).min)
            self._mask = sees
        return self._mask


class SequenceTrainer(FineTuneTrainer):
    """`FineTuneTrainer` whose ranks share every row. Held-out rows are scored whole, each by one rank: without gradients they fit."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.parts = Parts(base, self.args.process_index, self.args.world_size)

    def get_train_dataloader(self) -> DataLoader:
        """The same rows on every rank, in the order of a single process."""
        loader = DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, sampler=self._get_train_sampler(),
                            collate_fn=self.data_collator, pin_memory=self.args.dataloader_pin_memory)  # fmt: skip
        return prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False, use_seedable_sampler=True,
                                   data_seed=self.args.data_seed)  # fmt: skip

    def _get_num_items_in_batch(self, batch_samples, device):
        """Trainer adds up what all ranks have counted, and all have counted the same."""
        return super()._get_num_items_in_batch(batch_samples, device) // self.args.world_size

    def own_part(self, samples):
        return [self.parts.of(batch) for batch in samples]

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = dict(inputs)
        whole = inputs.pop("whole_positions")
        before = self.parts.calls
        with self.parts.together(None if whole is None else whole.to(self.args.device)):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.parts.calls - before < self.parts.config.num_hidden_layers:
            raise RunError(
                f"of {self.parts.config.num_hidden_layers} layers {self.parts.calls - before} attended to whole rows: the others do not look "
                "their attention up where transformers keeps it, and would see a rank's part of a row only. Use strategy=zero3"
            )
        return loss

    def engine_facts(self) -> dict:
        return super().engine_facts() | {"row_parts": self.parts.count}
