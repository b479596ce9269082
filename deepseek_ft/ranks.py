"""What the ranks of a run tell each other, and weights that ZeRO-3 keeps in parts, whole for a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def from_all(mine: Any) -> list:
    """What every rank gives, in the order of the ranks. Collective."""
    if not dist.is_initialized():
        return [mine]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@contextlib.contextmanager
def whole(parameters: Sequence[nn.Parameter], writer: int | None = None) -> Iterator[None]:
    """Inside, parameters are whole on every rank; under ZeRO-3 collective.

    Args:
        writer: the rank whose changes are kept.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


def within(module: nn.Module, then: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`then()` in the place of the module's own computation, where ZeRO-3 has made its weight whole, for the backward pass too."""
    own = module.__dict__.get("forward")
    module.forward = lambda *_: then()
    try:
        return nn.Module.__call__(module, next(module.parameters()))  # a ParameterDict's own refuses
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
