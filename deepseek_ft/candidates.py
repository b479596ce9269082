"""A strategy laid over the hardware: what it would take, and why it cannot be used. Of those that can, which is the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from . import deepspeed_config
from .config import Config, ExpertsConfig
from .hardware import GIB, Hardware
from .memory import Memory, estimate, resident_bytes
from .optimizers import OPTIMIZERS, ROUNDINGS, Optimizer, refused, resolve, rounding
from .recipe import resource_dir
from .shapes import ModelShape
from .strategies import Strategy
from .timing import Timing, estimate_time
from .workload import Workload, cards_of, splits_of, workload_of

MARGIN = 0.95
"""Share of the usable memory that `auto` fills: estimates are not promises."""
DRIVER = 0.98
"""Share of a card's memory, as NVML reports it, that CUDA can allocate: a 4090 of 24,564 MiB offers 23.5 GiB."""
HOST_RESERVE = (0.1, 2 * GIB)
"""Of the host's memory for the system itself: a share, and its upper end."""


@dataclass(frozen=True)
class Candidate:
    """A strategy, what it would take, and why it cannot be used (nothing when it can)."""

    strategy: Strategy
    memory: Memory | None = None
    """None when the model's numbers are not known."""
    timing: Timing | None = None
    """None on CPU ranks, or for cards without figures."""
    reasons: tuple[str, ...] = ()
    forbidden: bool = False
    """No amount of memory would help: precision, ranks, layers, cards."""
    fullness: float = 0.0
    """The largest share of what there is that it would take, of a card or the host. Above 1 it does not fit."""
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline."""

    @property
    def rounding(self) -> str:
        """What becomes of small updates, one of `optimizers.ROUNDINGS`."""
        return rounding(self.optimizer, self.strategy)

    @property
    def tight(self) -> bool:
        """It fits, but with less than the margin that `auto` wants."""
        return MARGIN < self.fullness <= 1

    @property
    def fits(self) -> bool:
        return not self.reasons


def usable_gpu_bytes(hardware: Hardware, world_size: int) -> int:
    """Of the smallest card that takes part."""
    return int(DRIVER * min(gpu.memory_bytes for gpu in hardware.gpus[:world_size]))


def usable_host_bytes(hardware: Hardware) -> int:
    share, most = HOST_RESERVE
    return int(hardware.host_memory_bytes - min(share * hardware.host_memory_bytes, most))


@lru_cache(maxsize=64)
def shipped(name: str) -> dict:
    return deepspeed_config.read(str(resource_dir("ds_configs") / f"{name}.json"))


def forbidden(
    config: Config, shape: ModelShape | None, strategy: Strategy, world_size: int, hardware: Hardware, cards: int | None = None
) -> Iterator[str]:
    """What no amount of memory would change.

    Args:
        cards: over which one process spreads; None: as many as ranks.
    """
    precision = config.train.precision
    if precision not in strategy.precisions:
        yield f"runs in {' or '.join(strategy.precisions)} only, got train.precision={precision}"
    if not strategy.many_ranks and world_size != 1:
        yield f"is one process, and there are {world_size} ranks"
    parts = world_size if cards is None else cards
    if strategy.split and parts == 1:
        yield "spreads the layers over several cards, and there is one"
    if strategy.staged and shape is None:
        yield f"cuts a model whose layers are known, and {config.model.path} is not known before its download"
    elif strategy.staged:
        yield from _wrong_stages(config, shape, parts)
    if strategy.staged and config.experts != ExpertsConfig():
        yield "knows no options of experts: leave out experts, or use another strategy"
    if strategy.pipeline and config.model.new_tokens:
        yield "cannot add tokens: leave out model.new_tokens, or use another strategy"
    if strategy.tensor and config.method.kind != "full":
        yield "trains every weight"
    if strategy.sequence and config.data.seq_len % world_size:
        yield (f"cuts blocks in equal parts, and data.seq_len={config.data.seq_len} does not divide by {world_size} ranks: "
               f"data.seq_len={config.data.seq_len // world_size * world_size}")  # fmt: skip
    if strategy.shared and config.experts.balance_loss is not None:
        yield "shares each row among its ranks, and a balance loss is of whole rows: leave out experts.balance_loss, or use another strategy"
    if strategy.pipeline and strategy.offload_optimizer and config.method.kind != "full":
        yield "keeps states on the host, and an adapter's are next to nothing: strategy=pipeline"
    if strategy.pipeline and config.method.train_also:
        yield "cannot train embedding or head beside an adapter: leave out method.train_also, or use another strategy"
    if strategy.shared and world_size == 1:
        yield "needs at least 2 ranks"
    if (
        strategy.shared
        and shape is not None
        and (shape.heads % world_size or shape.kv_heads % world_size)
    ):
        heads = f"{shape.heads} heads" + (f" and {shape.kv_heads} key heads" if shape.kv_heads != shape.heads else "")
        fitting = [n for n in range(2, 9) if shape.heads % n == 0 and shape.kv_heads % n == 0]
        yield f"{heads} do not divide by {world_size} ranks" + (
            f", but by {', '.join(map(str, fitting))}" if fitting else ""
        )
    if strategy.quantized_gathers and hardware.device == "cpu":
        yield "quantises with a CUDA kernel, and there is no GPU"
    if strategy.quantized_gathers and shape is not None and (uneven := _uneven_pieces(shape, world_size)):
        name, size = uneven
        able = [str(n) for n in range(2, 9) if _uneven_pieces(shape, n) is None]
        yield (f"quantises pieces of a multiple of 8 elements, and one of {world_size} of {name} has {size:,}"
               + (f": {' or '.join(able)} ranks" if able else ""))  # fmt: skip
    yield from refused(resolve(config.optim.name, strategy), strategy, precision, config.method.kind)
    if config.method.kind == "qlora" and strategy.stage == 3:
        yield "cannot shard a 4-bit base"
    if config.method.variant == "dora" and strategy.stage == 3:
        yield "has a layer's weights in parts when DoRA takes their norms: method.variant=lora, or a strategy up to zero2"
    if config.method.experts and strategy.stage == 3:
        yield "has the experts' weights in parts when peft adds their adapters: method.experts=false, or a strategy up to zero2"
    old = [gpu.name for gpu in hardware.gpus[:world_size] if not gpu.has_bf16]
    if precision == "bf16" and old:
        yield f"bf16 needs an Ampere card or newer, and {old[0]} is older: train.precision=fp16"
    if hardware.device == "cpu" and precision == "fp16" and not strategy.deepspeed:
        yield "has no fp16 on the CPU: train.precision=bf16, or a zero strategy"


def _uneven_pieces(shape: ModelShape, world_size: int) -> tuple[str, int] | None:
    """The first weight whose shard DeepSpeed 0.19 cannot quantise (CUDAQuantizer.quantize in partition_parameters.py)."""
    for name, sizes in shape.names():
        piece = -(-math.prod(sizes) // world_size)
        if piece % 8:
            return name, piece
    return None


def _wrong_stages(config: Config, shape: ModelShape, world_size: int) -> Iterator[str]:
    sizes = config.stages
    if sizes is None:
        if world_size > shape.layers:
            yield f"needs a layer for each stage: {shape.layers} layers, {world_size} ranks"
        return
    said = f"stages={list(sizes)}"
    if not sizes or min(sizes) < 1 or sum(sizes) != shape.layers:
        yield f"{said} is not a cut of {shape.layers} layers, each stage with one at least, such as {shape.stages(min(world_size, shape.layers), config.data.seq_len)}"
    elif world_size % len(sizes):
        yield f"{said} needs a number of ranks that {len(sizes)} divides, and there are {world_size}"


def _short_of(memory: Memory, hardware: Hardware, world_size: int) -> Iterator[tuple[str, float]]:
    """(reason in numbers, share of what there is) for card and host."""
    if hardware.gpus:
        usable = usable_gpu_bytes(hardware, world_size)
        yield (
            f"needs {memory.gpu_bytes / GIB:.1f} GiB per GPU, {usable / GIB:.1f} are usable",
            memory.gpu_bytes / usable,
        )
    usable = usable_host_bytes(hardware)
    yield (f"needs {memory.host_bytes / GIB:.1f} GiB of host memory, {usable / GIB:.1f} of {hardware.host_memory_bytes / GIB:.0f} are usable",
           memory.host_bytes / max(1, usable))  # fmt: skip


def short_of_disk(candidate: Candidate, hardware: Hardware) -> tuple[str, ...]:
    """No part of the choice: the free disk changes while a run goes, and another strategy is no cure for it."""
    memory, free = candidate.memory, hardware.disk_free_bytes
    if memory is None or free is None or memory.disk_bytes <= free:
        return ()
    return (f"needs {memory.disk_bytes / GIB:.1f} GiB of disk, {free / GIB:.1f} are free: train.save_total_limit and "
            "train.save_steps decide",)  # fmt: skip


def assess(config: Config, shape: ModelShape | None, strategy: Strategy, world_size: int, accumulation: int,
            hardware: Hardware, deepspeed: Mapping | None = None) -> Candidate:  # fmt: skip
    cards = cards_of(config, strategy, world_size, hardware)
    if not strategy.many_ranks and config.strategy != strategy.name:  # in the table of others: the same batch
        accumulation, world_size = accumulation * world_size, 1
    reasons = list(forbidden(config, shape, strategy, world_size, hardware, cards))
    optimizer = resolve(config.optim.name, strategy)
    if shape is None or (strategy.staged and any(_wrong_stages(config, shape, cards))) or (strategy.tensor and reasons):
        return Candidate(strategy, reasons=tuple(reasons), forbidden=bool(reasons), optimizer=optimizer)
    if deepspeed is None and strategy.deepspeed:
        deepspeed = shipped(strategy.file or strategy.name)
    load: Workload | None = None
    checkpoints = config.train.save_total_limit + 1 if config.train.save_steps else 0
    for split in splits_of(config, shape, strategy, cards):
        tried = workload_of(config, shape, strategy, world_size, accumulation, hardware, deepspeed, split)
        if load is not None and hardware.gpus and resident_bytes(tried)[0] > usable_gpu_bytes(hardware, cards):
            continue
        held = estimate(tried, checkpoints)
        short = list(_short_of(held, hardware, cards))
        fits = all(share <= 1 for _, share in short)
        if fits or load is None:  # the fastest split that fits; where none does, the fastest
            load, memory, shares = tried, held, short
        if fits:
            break
    hopeless = bool(reasons)
    reasons += [reason for reason, share in shares if share > 1]
    fullness = max(share for _, share in shares)
    return Candidate(strategy, memory, estimate_time(load, hardware), tuple(reasons), hopeless, fullness, optimizer, load.stages)


def states_fit(
    config: Config, shape: ModelShape, strategy: Strategy, world_size: int, accumulation: int, hardware: Hardware
) -> bool:
    """The cheap half of `assess`: whether at least what stays on card and host has room, before any activation."""
    if not can_choose(strategy, world_size):
        return False
    deepspeed = shipped(strategy.file or strategy.name) if strategy.deepspeed else None
    room = usable_gpu_bytes(hardware, world_size) if hardware.gpus else math.inf
    for split in splits_of(config, shape, strategy, world_size):
        load = workload_of(config, shape, strategy, world_size, accumulation, hardware, deepspeed, split)
        card, host = resident_bytes(load)
        if card <= room and host <= usable_host_bytes(hardware):
            return True
    return False


def can_choose(strategy: Strategy, world_size: int) -> bool:
    return strategy.chosen and (strategy.many_ranks or world_size == 1)


def fastest(candidates: list[Candidate], world_size: int) -> Candidate | None:
    """Of those that fit: exact updates before rounded ones, stochastically rounded before lost ones, with a margin before without, then the fastest.

    Within 5 %, which is more than the estimate can tell apart, and where there is no estimate, the table's order decides:
    from the least sharding to the most.
    """
    able = [c for c in candidates if c.fits and can_choose(c.strategy, world_size)]
    if not able:
        return None

    def rank(candidate: Candidate) -> tuple[int, bool]:
        return ROUNDINGS.index(candidate.rounding), candidate.tight

    best = min(map(rank, able))
    peers = [c for c in able if rank(c) == best]
    best_speed = max((c.timing.tokens_per_second for c in peers if c.timing), default=0.0)
    return next(c for c in peers if not c.timing or c.timing.tokens_per_second >= 0.95 * best_speed)


def figures(candidate: Candidate) -> str:
    """A candidate's figures in a few words."""
    memory, timing = candidate.memory, candidate.timing
    words = []
    if memory is not None:
        each = "GPU" if "CUDA context and NCCL" in memory.gpu else "rank"
        words = [f"{memory.gpu_bytes / GIB:.1f} GiB per {each}, {memory.host_bytes / GIB:.0f} GiB host"]
    if timing is not None:
        words.append(f"about {timing.tokens_per_second:,.0f} tokens/s")
    return ", ".join(words)


def candidate_dict(candidate: Candidate) -> dict:
    memory, timing = candidate.memory, candidate.timing
    return {
        "strategy": candidate.strategy.name,
        "fits": candidate.fits,
        "tight": candidate.tight,
        "reasons": list(candidate.reasons),
        "memory": None if memory is None else {
            "gpu_bytes": memory.gpu_bytes, "tensor_bytes": memory.tensor_bytes, "gpu": dict(memory.gpu), "moment": memory.moment,
            "host_bytes": memory.host_bytes, "host": dict(memory.host), "disk_bytes": memory.disk_bytes, "disk": dict(memory.disk)},
        "timing": None if timing is None else {
            "estimate": True, "step_seconds": timing.step_seconds, "step_seconds_range": list(timing.step_seconds_range),
            "tokens_per_second": timing.tokens_per_second, "tokens_per_second_range": list(timing.tokens_per_second_range),
            "mfu": timing.mfu, "bottleneck": timing.bottleneck, "parts_seconds": dict(timing.parts)},
    }  # fmt: skip
