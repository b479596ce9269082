"""What the forward pass leaves for the backward pass: which layers keep it, where it lies, and the feed-forward in tiles."""

from __future__ import annotations

import functools
import logging
import types

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .errors import PlanError

log = logging.getLogger(__name__)


def apply(model: nn.Module, config: ModelConfig) -> None:
    """Set a model up as the recipe says; before it is wrapped.

    Raises:
        PlanError: its layers cannot be checkpointed, or no feed-forward of it can be cut into tiles.
    """
    if config.tiled_mlp is not None:
        tiled = tile_feed_forward(model, config.tiled_mlp)
        if not tiled:
            raise PlanError("model.tiled_mlp: this model has no dense feed-forward of the llama and qwen kind; use null")
        layers = model.config.get_text_config().num_hidden_layers
        if tiled < layers:
            log.info("the feed-forward of %d of %d layers is in %d tiles; layers of experts are left alone", tiled, layers, config.tiled_mlp)
    if config.gradient_checkpointing:
        recompute_layers(model, config.checkpoint_every, config.offload_activations)


def recompute_layers(model: nn.Module, every: int = 1, offload: bool = False) -> None:
    """Checkpoint layers 0, n, 2n, ...: they keep what enters them, and are computed again in the backward pass.

    Without `use_reentrant`, so that a frozen base, whose embeddings need no gradient, passes gradients on to the adapters
    above, and ZeRO-3 gathers a layer's weights for the second time as for the first.

    Args:
        offload: what enters a checkpointed layer waits in the host's memory, pinned where there is a card. transformers'
            own `offload` always pins, which torch refuses where there is none; the copies are the same.
    """
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    # transformers lets what the embedding gives need a gradient, for the reentrant kind: frozen layers above it would be
    # computed again, backward and forward, for nothing.
    model.disable_input_require_grads()
    if not offload:
        return
    pinned = torch.cuda.is_available()

    def on_host(plain, function, *args, **kwargs):
        with save_on_cpu(pin_memory=pinned):
            return plain(function, *args, **kwargs)

    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = functools.partial(on_host, module._gradient_checkpointing_func)


def tile_feed_forward(model: nn.Module, tiles: int) -> int:
    """Compute each layer's dense feed-forward a tile of the sequence at a time, forward and, once more, backward.

    Only one tile's (tokens, width) tensors exist at a time, for one more forward pass of the feed-forward. Autograd adds
    the tiles' weight gradients up before it hands them on, so every strategy sees each of them once.

    Returns:
        How many layers it was done in. Experts, routed and shared, are left alone.
    """
    found = [module for name, module in model.named_modules()
             if name.endswith(".mlp") and all(hasattr(module, f"{part}_proj") for part in ("gate", "up", "down"))]  # fmt: skip
    for module in found:
        module.forward = types.MethodType(functools.partial(_in_tiles, module.forward, tiles), module)
    return len(found)


def _in_tiles(plain, tiles: int, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    pieces = hidden.split(-(-hidden.shape[-2] // tiles), dim=-2)
    if not torch.is_grad_enabled():
        return torch.cat([plain(piece) for piece in pieces], dim=-2)
    return torch.cat([checkpoint(plain, piece, use_reentrant=False) for piece in pieces], dim=-2)
