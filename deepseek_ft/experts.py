"""Mixture of experts: blocks that hold under ZeRO-3, and what their routers decide.

A block is a router (`gate`) and routed experts (`experts`). transformers' own classes fuse the experts of a layer into two
parameters, which every rank gathers whole, whatever its tokens choose. Where experts are modules in a list, as in a
model's remote code, ZeRO-3 would gather each one when it is called; ranks whose tokens choose differently then wait for
each other for good, or take each other's shards. Such a block is gathered as a whole: DeepSpeed calls that a leaf.

Routers are watched by hooks, in the forward passes of training only: neither in evaluation, nor where gradient
checkpointing computes a layer again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .errors import RunError
from .losses import IGNORED

# How a router of transformers turns its logits into scores that sum to 1 over the experts.
_SCORES = {"DeepseekV2TopkRouter": "softmax", "DeepseekV3TopkRouter": "sigmoid"}
BIAS = "e_score_correction_bias"


# ------------------------------------------------------------------------------------------------ blocks


@dataclass(frozen=True)
class Block:
    """One layer's mixture of experts, as it stands in the model."""

    name: str
    module: nn.Module
    kind: str
    """`fused`: all experts in the same parameters. `list`: a module each. `unknown`: neither."""

    @property
    def gate(self) -> nn.Module | None:
        return getattr(self.module, "gate", None)


def find_blocks(model: nn.Module) -> list[Block]:
    """Every mixture of experts in a model, in order. By structure, not by a class's name or by one layer's example: in
    DeepSeek's models the first layers are dense."""
    blocks = []
    for name, module in model.named_modules():
        experts = module._modules.get("experts")
        if experts is not None:
            blocks.append(Block(name, module, _kind(experts)))
    return blocks


def _kind(experts: nn.Module) -> str:
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return "list"
    # Under ZeRO-3 a parameter is empty between its uses, and `ds_shape` is what it was.
    shapes = [getattr(p, "ds_shape", p.shape) for p in experts.parameters()]
    return "fused" if any(len(shape) == 3 for shape in shapes) else "unknown"


def keep_whole(model: nn.Module) -> list[str]:
    """Make leaves of the blocks whose experts are modules in a list, before DeepSpeed puts its hooks in.

    Returns:
        Names of their classes.
    """
    from deepspeed.utils import set_z3_leaf_module

    lists = [block for block in find_blocks(model) if block.kind == "list"]
    for block in lists:
        set_z3_leaf_module(block.module, True)
    return sorted({type(block.module).__name__ for block in lists})


def check_sharded(model: nn.Module) -> None:
    """Under ZeRO-3: no block's collectives depend on where its tokens go.

    Raises:
        RunError: a block is neither fused nor a leaf, or the config speaks of experts that are nowhere found.
    """
    from deepspeed.utils import z3_leaf_module

    blocks = find_blocks(model)
    config = getattr(model, "config", None)
    said = next((n for k in ("n_routed_experts", "num_local_experts", "num_experts") if (n := getattr(config, k, None))), 0)
    dense = getattr(config, "first_k_dense_replace", None) or 0
    if said and not blocks and dense < getattr(config, "num_hidden_layers", dense + 1):
        raise RunError(
            f"the config of {type(model).__name__} speaks of {said} routed experts, and no module of the model holds any as "
            "`experts`: whether ranks that route differently would wait for each other under ZeRO-3 cannot be told. Use "
            "strategy=zero2, or a model class of transformers"
        )
    loose = sorted({type(b.module).__name__ for b in blocks if b.kind != "fused" and not z3_leaf_module(b.module)})
    if loose:
        raise RunError(
            f"{', '.join(loose)}: its experts are neither fused into one parameter nor gathered as a whole (a ZeRO-3 leaf): "
            "ranks whose tokens choose different experts would wait for each other for good. Use strategy=zero2, or a "
            "model class of transformers"
        )


def freeze_routers(model: nn.Module) -> None:
    """Before the optimizer is made. A V3 router's bias is not a weight and may still be moved."""
    for block in find_blocks(model):
        if block.gate is not None:
            block.gate.requires_grad_(False)


# --------------------------------------------------------------------------------------------- arithmetic


def router_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores s of each expert, (…, N) in fp32, which sum to 1: softmax in V2 (arXiv:2405.04434 §2.2.1), sigmoid divided by
    its sum in V3 (arXiv:2412.19437 §2.1.2)."""
    logits = logits.float()
    if scoring == "softmax":
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / scores.sum(dim=-1, keepdim=True)


def counted_tokens(input_ids: torch.Tensor, labels: torch.Tensor, pad_id: int) -> torch.Tensor:
    """(B, T), false in the padding: the pad ids without a target at a row's end."""
    blank = (input_ids == pad_id) & (labels == IGNORED)
    return blank.flip(-1).cumprod(dim=-1).flip(-1) == 0


def choices(index: torch.Tensor, counted: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert was chosen in each row by tokens that count, (B, N).

    Args:
        index: (B*T, k), the chosen experts; one that is no expert's (a token that is sent nowhere) is not counted.
        counted: (B, T).
    """
    rows = counted.shape[0]
    index = index.reshape(rows, -1)
    ones = counted[..., None].expand(*counted.shape, index.shape[1] // counted.shape[1]).reshape(rows, -1)
    ones = (ones & (index < experts)).long()
    return ones.new_zeros(rows, experts).scatter_add_(1, index.clamp(max=experts - 1), ones)


def sequence_balance(logits: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor, top_k: int, scoring: str) -> torch.Tensor:
    """Sum over the rows of tokens x sum_i f_i P_i, the sequence-wise balance loss of one layer before its coefficient
    (arXiv:2405.04434 §2.2.3, arXiv:2412.19437 §2.1.2, equations 17 to 20). A row that is spread evenly gives its tokens.

    Args:
        logits: (B*T, N), with their graph.
        chosen: (B, N), of `choices`.
        counted: (B, T).
    """
    rows, length = counted.shape
    experts = logits.shape[-1]
    tokens = counted.sum(dim=1, keepdim=True)
    f = chosen * (experts / top_k) / tokens.clamp(min=1)
    sums = torch.einsum("bt,btn->bn", counted.float(), router_scores(logits.view(rows, length, experts), scoring))
    return (f * sums).sum()


# ------------------------------------------------------------------------------------------------ routers


@dataclass(frozen=True)
class Figures:
    """What routers did since the last time that somebody asked, over all ranks."""

    numbers: dict[str, float | int]
    """For metrics.jsonl."""
    layers: dict[str, list]
    """Per layer, for experts.jsonl."""


class Routers:
    """The routers of a model while it trains: what they choose, a loss and a bias that spread it.

    Nothing here waits for the device, but `figures`, which is asked when a line is logged.
    """

    def __init__(self, model: nn.Module, pad_id: int, balance: float | None = None, speed: float | None = None):
        """
        Args:
            balance: coefficient of the sequence-wise balance loss.
            speed: by how much V3's bias of an expert is moved after each step.

        Raises:
            RunError: one of them is asked for, and the model has no router that is known here.
        """
        self.blocks = [b for b in find_blocks(model) if type(b.gate).__name__ in _SCORES]
        self.pad_id, self.balance, self.speed = pad_id, balance, speed
        if not self.blocks:
            if balance is not None or speed is not None:
                raise RunError(f"{type(model).__name__} has no router of a kind that is known here ({', '.join(_SCORES)}): "
                               "experts.balance_loss and experts.bias_update_speed cannot be had")  # fmt: skip
            return
        gate = self.blocks[0].gate
        self.experts, self.top_k, self.scoring = gate.num_experts, gate.top_k, _SCORES[type(gate).__name__]
        self._counted: torch.Tensor | None = None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of this forward pass, layer by layer: logits with their graph, choices of each row."""
        self._step_tokens: torch.Tensor | None = None
        self._added: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0
        """Since the sums began."""
        for layer, block in enumerate(self.blocks):
            # Before DeepSpeed's own hooks, so that the logits are the router's own and not a copy for its bookkeeping.
            block.gate.register_forward_hook(lambda module, args, output, layer=layer: self._see(layer, module, output))

    @property
    def biases(self) -> list[torch.Tensor]:
        return [getattr(block.gate, BIAS) for block in self.blocks]

    def check(self) -> None:
        """Once everything is wrapped: a bias that is to be moved is a buffer of fp32.

        Raises:
            RunError: it is a parameter, which ZeRO-3 cuts up, or of 16 bits, in which small steps are rounded away.
        """
        if self.speed is None:
            return
        for block in self.blocks:
            bias = block.gate._buffers.get(BIAS)
            if bias is None or bias.dtype is not torch.float32:
                what = "no buffer" if bias is None else f"a buffer of {str(bias.dtype).removeprefix('torch.')}"
                raise RunError(
                    f"experts.bias_update_speed: {BIAS} of {block.name} is {what}; steps of {self.speed:g} need one of fp32"
                )

    # ------------------------------------------------------------------------------------- a forward pass

    def begin_step(self, batches: Sequence[dict], device: torch.device) -> None:
        """Of all batches of an optimizer step, on all ranks: how many tokens a balance loss is divided by."""
        if self.balance is None:
            return
        here = [counted_tokens(b["input_ids"], b["labels"], self.pad_id).sum() for b in batches]
        self._step_tokens = torch.stack(here).sum().to(device) if here else torch.zeros((), dtype=torch.long, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._step_tokens)

    @contextlib.contextmanager
    def watching(self, batch: dict) -> Iterator[None]:
        """Inside, routers are counted. A layer that is computed again in the backward pass is outside."""
        self._kept = []
        self._device = batch["input_ids"].device
        self._counted = counted_tokens(batch["input_ids"], batch["labels"], self.pad_id)
        self._sum("expected", (), torch.long).add_(self._counted.sum() * (self.top_k * len(self.blocks)))
        try:
            yield
        finally:
            self._last, self._counted = self._counted, None

    def _sum(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A sum on the device, begun with zeros."""
        if name not in self._sums:
            self._sums[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._sums[name]

    def _see(self, layer: int, gate: nn.Module, output: tuple) -> None:
        counted = self._counted
        if counted is None:
            return
        logits, _, index = output
        shape = len(self.blocks), self.experts
        with torch.no_grad():  # a checkpointed layer must save the same when it is computed again
            chosen = choices(index, counted, self.experts)
            scores = router_scores(logits, self.scoring)
            self._sum("step loads", shape, torch.long)[layer] += chosen.sum(dim=0)
            self._sum("scores", shape, torch.float64)[layer] += counted.reshape(-1).float() @ scores
            if self.balance is not None and self.scoring == "sigmoid":
                # V3's f counts the largest scores, without the bias that also steers the choice.
                chosen = choices(scores.topk(self.top_k, dim=-1, sorted=False)[1], counted, self.experts)
        if self.balance is not None:
            self._kept.append((logits, chosen))

    def balance_loss(self) -> torch.Tensor:
        """What the last forward pass adds to the loss: the coefficient times the mean over the step's rows, each weighing
        as much as its tokens, summed over the layers. Summed over ranks and micro-batches it is that of the step,
        however the step is cut."""
        total = torch.zeros((), device=self._last.device)
        for _ in self.blocks:
            logits, chosen = self._kept.pop(0)
            total = total + sequence_balance(logits, chosen, self._last, self.top_k, self.scoring)
            del logits
        added = total * (self.balance / self._step_tokens.clamp(min=1))
        self._added = added.detach()
        self._sum("balance", (), torch.float64).add_(self._added)
        return added

    def taken_off(self, loss: torch.Tensor, ranks: int) -> torch.Tensor:
        """The language-model loss alone, of a sum that `balance_loss` times `ranks` is part of."""
        return loss if self._added is None else loss - self._added * ranks

    # ---------------------------------------------------------------------------------- after a step

    def _all(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
        if dist.is_initialized() and dist.get_world_size() > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, op=op)
        return tensor

    def end_step(self, updated: bool = True) -> None:
        """Count the step, and move the biases of experts that had more than the mean down, of the others up
        (arXiv:2408.15664 §3).

        Args:
            updated: false where the optimizer left the step out, as after an overflow.
        """
        if "step loads" not in self._sums:
            return
        self._steps += 1
        loads = self._sums.pop("step loads")
        self._sum("loads", tuple(loads.shape), torch.long).add_(loads)
        if self.speed is None or not updated:
            return
        loads = self._all(loads).double()
        for bias, load in zip(self.biases, loads, strict=True):
            bias += self.speed * torch.sign(load.mean() - load).to(bias.dtype)

    def figures(self) -> Figures | None:
        """Collective: every rank asks at the same time. None when nothing has been seen since.

        Raises:
            RunError: the ranks' biases are not the same.
        """
        if "loads" not in self._sums:
            return None
        sums, self._sums = self._sums, {}
        steps, self._steps = self._steps, 0
        loads = self._all(sums["loads"])
        least = self._all(sums["loads"], dist.ReduceOp.MIN)
        mean = self._all(sums["scores"])
        expected = int(self._all(sums["expected"]))
        loads, least, mean = loads.cpu(), least.cpu(), mean.cpu()
        per_layer = loads.sum(dim=1, keepdim=True) / self.experts
        share = loads / per_layer.clamp(min=1e-9)
        mean = mean / mean.sum(dim=1, keepdim=True).clamp(min=1e-9)
        entropy = -(mean * mean.clamp(min=1e-30).log()).sum(dim=1) / math.log(max(2, self.experts))
        numbers: dict[str, float | int] = {
            "expert_load_max": share.max().item(),
            "expert_load_min": share.min().item(),
            "experts_idle": (loads == 0).double().mean().item(),
            "experts_idle_on_a_rank": (least == 0).double().mean().item(),
            "router_entropy": entropy.min().item(),
            "expert_tokens_dropped": expected - int(loads.sum()),
        }
        layers = {"layers": [block.name for block in self.blocks], "load": loads.tolist(), "entropy": entropy.tolist()}
        if "balance" in sums:
            numbers["balance_loss"] = float(self._all(sums["balance"])) / max(1, steps)
        if self.speed is not None:
            biases = torch.stack(self.biases)
            if not torch.equal(self._all(biases, dist.ReduceOp.MAX), self._all(biases, dist.ReduceOp.MIN)):
                raise RunError(f"{BIAS} is not the same on every rank: their tokens would be routed by different rules")
            numbers["expert_bias_max"] = biases.abs().max().item()
            layers["bias"] = biases.tolist()
        return Figures(numbers, layers)
