"""Every rank a part of every matrix (DeepSpeed's AutoTP, arXiv:1909.08053 §3): what it is told about these models, and a Trainer for it.

Heads and feed-forward columns are split; embedding, head, norms, routers and routed experts are whole on every rank. All ranks see
the same rows.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import DS_IS_REPLACED_MODULE, GatherReplacedLayerParams
from torch import nn
from transformers import PreTrainedModel

from .trainer import FineTuneTrainer

log = logging.getLogger(__name__)

SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(q|k|v|q_b|kv_b|gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
        # What is applied to a rank's heads only has a part of its gradient there.
        {"patterns": [r".*\.self_attn\.(q|k)_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
    ],
}
"""`tensor_parallel.partition_config` of llama, qwen2, qwen3, deepseek_v2 and deepseek_v3."""


class _UsedByAllHeads(torch.autograd.Function):
    """As it is; its gradient is the sum of those that the ranks' heads have for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


def share_rotary_keys(model: PreTrainedModel) -> None:
    """Of latent attention, the rotary part of the key is one for all heads, past every matrix that AutoTP splits: the ranks' gradients
    of it are added here."""

    def shared(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split([output.shape[-1] - rope, rope], dim=-1)
        return torch.cat([latent, _UsedByAllHeads.apply(rotary)], dim=-1)

    rope = getattr(model.config, "qk_rope_head_dim", 0)
    for name, module in model.named_modules():
        if name.endswith(".kv_a_proj_with_mqa"):
            module.register_forward_hook(shared)


def whole_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All tensors of a model that is in parts, module by module, on the host; empty but on rank 0. Collective.

    DeepSpeed's own (engine.py, _replace_module_consolidated_state_dict) leaves out buffers, and V3's routers have one.
    """
    found: dict[str, torch.Tensor] = {}
    first = dist.get_rank() == 0
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        parameters = dict(module.named_parameters(recurse=False))
        with torch.no_grad(), GatherReplacedLayerParams(list(parameters.values()), module):
            named = {**parameters, **dict(module.named_buffers(recurse=False))} if first else {}
            found |= {dot + name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()
                      if name not in module._non_persistent_buffers_set}  # fmt: skip
    return found


DRIFT = 1e-5
"""Relative difference between ranks, of the norm of a weight that all have whole, from which on it is said."""


def drift(model: PreTrainedModel) -> float:
    """The largest relative difference between ranks of the norm of a weight that all have whole: nothing brings them together again,
    and a kernel that sums in no fixed order takes them apart. Collective.
    """
    squares = [p.detach().double().square().sum() for p in model.parameters() if not getattr(p, DS_IS_REPLACED_MODULE, False)]
    low = torch.stack(squares)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return float(((high - low) / high.clamp(min=1e-30)).max() / 2)


class TensorTrainer(FineTuneTrainer):
    """`FineTuneTrainer` whose ranks share every row and every matrix."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.replica, self.replicas, self.copies = 0, 1, self.args.world_size
        share_rotary_keys(self.model)

    def save_model(self, output_dir=None, _internal_call=False):
        apart = drift(self.model)
        if apart > DRIFT and self.args.should_save:
            log.warning("note: weights that every rank has whole differ between ranks, in their norms by up to %.1e; rank 0's are saved", apart)
        weights = whole_weights(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
