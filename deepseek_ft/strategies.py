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
    nvme: bool = False
    """What is offloaded lies on a disk and passes through the host."""
    quantized_gathers: bool = False
    """Weights travel between the cards in 8 bits, and are what forward and backward pass see."""
    split: bool = False
    """One process spreads its layers over the cards, and they work one after another."""
    pipeline: bool = False
    """Each card holds a run of consecutive layers, and micro-batches pass through."""
    tensor: bool = False
    """Each card holds a part of every layer's matrices, and all work on the same tokens."""
    sequence: bool = False
    """Each card holds a part of every sequence (Ulysses, arXiv:2309.14509), and ZeRO-3's shard of the weights."""
    file: str | None = None
    """Its DeepSpeed file, where that is another strategy's."""
    master_bytes: int = 4
    """Bytes per parameter of the master weights, and of the gradients at the update."""
    moment_bytes: int = 8
    """AdamW's two moments together, where the optimizer takes the master weights' type (see `optimizers`)."""
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    many_ranks: bool = True
    """False: one process only."""
    chosen: bool = True
    """False: only by name. `auto` has no reason to take it."""

    @property
    def shared(self) -> bool:
        """All ranks work on the same rows."""
        return self.tensor or self.sequence

    @property
    def staged(self) -> bool:
        """Cards hold runs of layers, not parts of each."""
        return self.pipeline or self.split


_BF16_STATES = {"master_bytes": 2, "moment_bytes": 4, "precisions": ("bf16",)}
_ROWS = [
    Strategy("single", "one process, plain PyTorch", deepspeed=False, many_ranks=False),
    Strategy("layer_split", "layers over the cards of one process, one card at work at a time: room, no speed", deepspeed=False,
             split=True, many_ranks=False, chosen=False),  # pipeline has the same room and all cards at work
    Strategy("ddp", "the whole model on every card (DistributedDataParallel)", deepspeed=False),
    Strategy("zero1", "optimizer states sharded", stage=1),
    Strategy("zero2", "optimizer states and gradients sharded", stage=2),
    Strategy("zero2_offload", "gradients sharded, optimizer on the host", stage=2, offload_optimizer=True),
    Strategy("zero2_offload_bf16", "as zero2_offload with bf16 master weights and states: half the host memory",
             stage=2, offload_optimizer=True, **_BF16_STATES),
    Strategy("zero3", "weights, gradients and optimizer states sharded", stage=3),
    Strategy("zero3_bf16", "as zero3 with bf16 master weights and states: 8 B per parameter in all",
             stage=3, **_BF16_STATES),
    Strategy("zero3_warmup", "as zero3, with DeepSpeed's own AdamW and WarmupLR", stage=3, chosen=False),
    Strategy("zero3_offload", "as zero3, optimizer on the host", stage=3, offload_optimizer=True),
    Strategy("zero3_offload_bf16", "as zero3_offload with bf16 master weights and states: half the host memory",
             stage=3, offload_optimizer=True, **_BF16_STATES),
    Strategy("zero3_offload_all", "as zero3, optimizer and weights on the host", stage=3, offload_optimizer=True,
             offload_params=True),
    Strategy("zero3_nvme", "as zero3_offload, master weights and states on a disk: the slowest, for a host whose memory is short",
             stage=3, offload_optimizer=True, nvme=True, chosen=False),
    Strategy("zeropp", "as zero3, weights gathered in 8 bits (ZeRO++, arXiv:2306.10209 §3.1): half the traffic, rounded weights; not run "
             "on a card yet", stage=3, quantized_gathers=True, precisions=("bf16", "fp16"), chosen=False),
    Strategy("pipeline", "layers in stages, one per card, micro-batches in a row (1F1B)", deepspeed=False, pipeline=True,
             precisions=("bf16", "fp32")),
    Strategy("pipeline_bf16", "as pipeline with bf16 weights and states: 8 B per parameter in all", deepspeed=False, pipeline=True,
             **_BF16_STATES),
    Strategy("pipeline_offload", "as pipeline, master weights, states and update on the host: the most room with exact updates",
             deepspeed=False, pipeline=True, offload_optimizer=True, precisions=("bf16", "fp32")),
    Strategy("tensor", "heads and feed-forward columns in parts, one per card (DeepSpeed's AutoTP)", stage=1, tensor=True, file="zero1"),
    Strategy("sequence", "every sequence in parts, one per card (Ulysses), weights as zero3: for rows that no card has room for", stage=3,
             sequence=True, file="zero3"),
]  # fmt: skip

STRATEGIES: dict[str, Strategy] = {row.name: row for row in _ROWS}
