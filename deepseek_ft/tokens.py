"""Tokens that a recipe adds: to the tokenizer, as rows of embedding and head, and beside a frozen base as the only rows that
are trained."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .errors import ConfigError, listing
from .ranks import whole, within

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

_IDS = 1 << 24
_BLOCK = 8192
"""Rows that are summed at a time: a table in fp64 would be four times itself."""


# ------------------------------------------------------------------------------------------ in the tokenizer


def add(tokenizer: PreTrainedTokenizerFast, names: Sequence[str], source: str) -> None:
    """Give the tokenizer these tokens, in this order, behind all the ids that it has.

    Raises:
        ConfigError: some are tokens already, or the tokenizer would read them otherwise than as one token.
    """
    from transformers import AddedToken

    if not names:
        return
    vocabulary = tokenizer.get_vocab()
    known = [f"{name!r} is already its token {vocabulary[name]:,}" for name in names if name in vocabulary]
    if known:
        raise ConfigError(listing(f"model.new_tokens: the tokenizer of {source} has some of them; leave those out", known))
    first = max(vocabulary.values()) + 1
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    wrong = []
    for i, name in enumerate(names, start=first):
        ids = tokenizer.backend_tokenizer.encode(name, add_special_tokens=False).ids
        if tokenizer.convert_tokens_to_ids(name) != i:
            wrong.append(f"{name!r} became id {tokenizer.convert_tokens_to_ids(name):,}, not {i:,}: its vocabulary has holes")
        elif ids != [i]:
            wrong.append(f"{name!r} is read as the ids {ids}, not as {i}: another token is its beginning")
    if wrong:
        raise ConfigError(listing(f"model.new_tokens: the tokenizer of {source} cannot have them", wrong))


def ids_of(tokenizer: PreTrainedTokenizerFast, names: Sequence[str]) -> range:
    """The ids of tokens that `add` has added, which follow each other."""
    first = tokenizer.convert_tokens_to_ids(names[0])
    return range(first, first + len(names))


def unseen(stores: Sequence[Any], tokenizer: PreTrainedTokenizerFast, names: Sequence[str]) -> list[str]:
    """Those of them that no document holds: their rows would learn what they are not, and nothing else."""
    new, found = ids_of(tokenizer, names), np.zeros(len(names), bool)
    for store in stores:
        for start in range(0, len(store.ids), _IDS):
            ids = np.asarray(store.ids[start : start + _IDS])
            found[ids[(ids >= new.start) & (ids < new.stop)] - new.start] = True
    return [name for name, yes in zip(names, found, strict=True) if not yes]


# ---------------------------------------------------------------------------------------------- in the model


def make_room(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, names: Sequence[str]) -> None:
    """A row for each new token in embedding and head: one of the model's spare rows, or where these end, one that is put on.

    They begin as the mean of the rows that the tokenizer's other ids use: a spare row was never trained, and the head's would
    take part in every softmax with whatever it held. transformers' own resize draws them from a normal distribution around
    that mean, of a billionth of the rows' covariance; here they are the same under every strategy, and under ZeRO-3 the new
    tables are sharded like the old ones.
    """
    new = ids_of(tokenizer, names)
    used = sorted(i for i in tokenizer.get_vocab().values() if i not in new)
    before = model.config.vocab_size
    resize(model, new.stop)
    for module in _tables(model):
        with whole([module.weight], writer=0), torch.no_grad():
            module.weight[new.start : new.stop] = _mean(module.weight, used).to(module.weight.dtype)
    where = f"the model had {before:,} rows and has {new.stop:,} now" if new.stop > before else f"in spare ones of the model's {before:,} rows"
    log.info("new tokens: %d, with the ids %d to %d, %s; their rows begin as the mean of the others", len(names), new[0], new[-1], where)


def resize(model: PreTrainedModel, rows: int) -> None:
    """At least so many rows in embedding and head; those that are put on are zero."""
    if model.config.vocab_size >= rows:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    for module in _tables(model):
        old = module.weight
        with whole([old]):
            more = old.new_zeros(rows - old.shape[0], old.shape[1])
            weight = nn.Parameter(torch.cat([old.detach(), more]), requires_grad=old.requires_grad)
        if hasattr(old, "ds_id"):  # ZeRO-3: transformers' resize leaves the head whole on every rank
            old.convert_to_zero_parameters([weight])
        module.weight = weight
    if tied:
        head.weight = embedding.weight
    embedding.num_embeddings = head.out_features = rows
    model.config.get_text_config().vocab_size = model.vocab_size = rows


def _tables(model: PreTrainedModel) -> list[nn.Module]:
    """Embedding, and the head where it has a weight of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return [embedding] if head.weight is embedding.weight else [embedding, head]


def _mean(weight: torch.Tensor, used: list[int]) -> torch.Tensor:
    total = weight.new_zeros(weight.shape[1], dtype=torch.float64)
    for start in range(0, len(used), _BLOCK):
        total += weight[torch.tensor(used[start : start + _BLOCK], device=weight.device)].double().sum(dim=0)
    return total / len(used)


# --------------------------------------------------------------------------------------- beside a frozen base


@contextlib.contextmanager
def tables_at_hand(model: PreTrainedModel) -> Iterator[None]:
    """While peft takes its copies of the new rows. Under ZeRO-3 it would gather the tables itself, but on CUDA only."""
    from peft.tuners.trainable_tokens import layer

    usual = layer.check_deepspeed_zero3_enabled
    layer.check_deepspeed_zero3_enabled = lambda: False
    try:
        with whole([module.weight for module in _tables(model)]):
            yield
    finally:
        layer.check_deepspeed_zero3_enabled = usual


def wrapped(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> embedding or head of which single rows are trained, in peft's wrapper."""
    from peft.utils.other import TrainableTokensWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, TrainableTokensWrapper)}


def is_tied(wrapper: nn.Module) -> bool:
    """Whether its rows are those of another wrapper."""
    return wrapper.token_adapter.tied_adapter is not None


def compute_rows_apart(model: nn.Module) -> None:
    """Replace the results of the new rows, where peft replaces the rows.

    peft copies the whole table at each call, makes a gradient of the whole copy, and under ZeRO-3 finds the table in parts.
    The numbers are the same; the files are peft's.
    """
    for wrapper in wrapped(model).values():
        usual = wrapper.forward
        by = _embedded if isinstance(wrapper.token_adapter.base_layer, nn.Embedding) else _scored

        def forward(wrapper: nn.Module, x: torch.Tensor, usual=usual, by=by) -> torch.Tensor:
            rows = rows_of(wrapper)
            return usual(x) if rows is None else by(wrapper.token_adapter.base_layer(x), x, *rows)

        wrapper.forward = types.MethodType(forward, wrapper)


def rows_of(wrapper: nn.Module) -> tuple[int, Any, str] | None:
    """First id, the module that holds the rows, and their name in it; None while the adapter is switched off or merged."""
    adapter = wrapper.token_adapter
    if wrapper.disable_adapters or adapter.merged or not wrapper.active_adapters:
        return None
    (name,) = wrapper.active_adapters
    return adapter.token_indices[name][0], adapter.trainable_tokens_delta, name


def _embedded(embedded: torch.Tensor, ids: torch.Tensor, first: int, holder: Any, name: str) -> torch.Tensor:
    def replaced() -> torch.Tensor:
        rows = holder[name]
        own = nn.functional.embedding((ids - first).clamp(0, len(rows) - 1), rows).to(embedded.dtype)
        is_new = (ids >= first) & (ids < first + len(rows))
        return torch.where(is_new[..., None], own, embedded)

    return within(holder, replaced)


def _scored(logits: torch.Tensor, hidden: torch.Tensor, first: int, holder: Any, name: str) -> torch.Tensor:
    def replaced() -> torch.Tensor:
        own = nn.functional.linear(hidden, holder[name].to(hidden.dtype)).to(logits.dtype)
        return logits.slice_scatter(own, dim=-1, start=first, end=first + own.shape[-1])

    return within(holder, replaced)
