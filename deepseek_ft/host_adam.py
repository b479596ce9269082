"""AdamW on the host for weights on a card, in a process that knows no DeepSpeed engine: DeepSpeed's C++ update, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


class HostAdamW(torch.optim.Optimizer):
    """fp32 master weights and moments on the host, 12 bytes per parameter; the weights may be of any type and anywhere.

    Gradients are added up in fp32 where the weights are. A step takes one after another to the host, updates its masters there, and
    brings the weights back: beside the states the host holds one gradient at a time.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        mine = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype != torch.float32:
                    p.grad_dtype = torch.float32
            masters = [p.detach().to("cpu", torch.float32, copy=True) for p in group["params"]]
            mine.append({"params": masters, "weight_decay": group["weight_decay"]})
        self.inner = DeepSpeedCPUAdam(mine, lr=lr, betas=betas, eps=eps, adamw_mode=True, fp32_optimizer_states=True)
        self.whole = _Whole(self)

    @property
    def masters(self) -> list[torch.Tensor]:
        """In the order of the weights."""
        return [master for group in self.inner.param_groups for master in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for p, master in zip(weights, self.masters, strict=True):
            if p.grad is None:
                continue
            master.grad = p.grad.to("cpu", torch.float32)
            self.inner.step()  # of those that have a gradient, which is this one
            master.grad = None
            p.copy_(master)


class _Whole:
    """What a checkpoint must hold of a `HostAdamW`. Its own state_dict() is left as it was born, empty: accelerate takes that to the
    card and back when it wraps an optimizer."""

    def __init__(self, optimizer: HostAdamW):
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._optimizer
        return {"masters": optimizer.masters, "moments": optimizer.inner.state_dict(), "groups": optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        optimizer = self._optimizer
        optimizer.load_state_dict(saved["groups"])
        optimizer.inner.load_state_dict(saved["moments"])
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        for p, master, was in zip(weights, optimizer.masters, saved["masters"], strict=True):
            master.copy_(was)
            p.copy_(master)
