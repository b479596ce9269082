"""How a recipe is laid over the hardware: one row per strategy.

A strategy that runs under DeepSpeed is called like its file in `ds_configs/`. To add one: one JSON file, one row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    name: str
    summary: str
    deepspeed: bool = True
    """Runs in a DeepSpeed engine; otherwise plain PyTorch (one process, or DDP)."""
    stage: int = 0
    """ZeRO stage: 1 shards the optimizer states, 2 the gradients too, 3 the weights too (arXiv:1910.02054 §3)."""
    offload_optimizer: bool = False
    """Optimizer states and update on the host (DeepSpeedCPUAdam, a C++ op)."""
    offload_params: bool = False
    """Weights rest on the host and are copied in per layer."""
    state_bytes: int = 12
    """Optimizer states and master weights, bytes per parameter: AdamW keeps fp32 master, m and v."""
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    many_ranks: bool = True
    """False: one process only."""


_ROWS = [
    Strategy("single", "one process, plain PyTorch", deepspeed=False, many_ranks=False),
    Strategy("ddp", "the whole model on every card (DistributedDataParallel)", deepspeed=False),
    Strategy("zero1", "optimizer states sharded", stage=1),
    Strategy("zero2", "optimizer states and gradients sharded", stage=2),
    Strategy("zero2_offload", "gradients sharded, optimizer on the host", stage=2, offload_optimizer=True),
    Strategy("zero3", "weights, gradients and optimizer states sharded", stage=3),
    Strategy("zero3_bf16", "as zero3 with bf16 master weights and states: 8 B per parameter in all",
             stage=3, state_bytes=4, precisions=("bf16",)),
    Strategy("zero3_warmup", "as zero3, with DeepSpeed's own AdamW and WarmupLR", stage=3),
    Strategy("zero3_offload", "as zero3, optimizer on the host", stage=3, offload_optimizer=True),
    Strategy("zero3_offload_all", "as zero3, optimizer and weights on the host", stage=3, offload_optimizer=True,
             offload_params=True),
]  # fmt: skip

STRATEGIES: dict[str, Strategy] = {row.name: row for row in _ROWS}
