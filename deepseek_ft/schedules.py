"""Learning-rate curves: one pure function, and the scheduler that applies it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .config import OptimConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def lr_factor(optim: OptimConfig, step: int, total_steps: int, warmup_steps: int) -> float:
    """Learning rate of the update number `step` (from 0) of `total_steps`, as a share of `optim.lr`.

    The warm-up's first update has factor 0 and update number `warmup_steps` is the first at the peak, as in
    transformers' schedules and DeepSpeed's WarmupLR (deepspeed/runtime/lr_schedules.py), whose `log` ramp is
    log(step + 1) / log(warmup_steps) and which takes at least 2 steps.
    """
    if step < warmup_steps:
        if optim.warmup_type == "log":
            return min(1.0, math.log(step + 1) / math.log(max(2, warmup_steps)))
        return step / warmup_steps
    floor = optim.min_lr_ratio
    after, span = step - warmup_steps, max(1, total_steps - warmup_steps)
    if optim.schedule in ("constant", "warmup"):
        return 1.0
    if optim.schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, after / span)))
    if optim.schedule == "linear":
        return floor + (1 - floor) * max(0.0, 1 - after / span)
    if optim.schedule == "wsd":
        decay = max(1, round(optim.decay_ratio * total_steps))
        return floor + (1 - floor) * min(1.0, max(0.0, (total_steps - step) / decay))
    raise ValueError(optim.schedule)


def build_scheduler(optimizer: Optimizer, optim: OptimConfig, total_steps: int, warmup_steps: int) -> LambdaLR:
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: lr_factor(optim, step, total_steps, warmup_steps))
