"""From (config, hardware) to a `Plan`: a pure function, the same on every rank, without torch or a download."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from . import deepspeed_config
from . import ops as ops_module
from .config import Config, resource_dir
from .errors import ConfigError, PlanError, listing
from .hardware import GIB, Hardware, probe
from .shapes import ModelShape, find_shape
from .strategies import STRATEGIES, Strategy

CPU_RANKS = 3  # without a GPU: the three-card run in miniature


@dataclass(frozen=True)
class Plan:
    """Every derived value of a run, decided once."""

    strategy: Strategy
    world_size: int
    device: str
    """cuda | cpu"""
    micro_batch_size: int
    grad_accum_steps: int
    tokens_per_step: int
    deepspeed: dict | None
    """The DeepSpeed config that Trainer gets, "auto" where it fills in the recipe's value."""
    ops: tuple[str, ...]
    """DeepSpeed C++ ops that must be built before the ranks start."""
    shape: ModelShape | None
    hardware: Hardware
    notes: tuple[str, ...]
    """What the user should know before the run, one line each."""

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def steps_per_epoch(self, blocks: int) -> int:
        """Optimizer steps over `blocks` blocks: the last batch, rank and accumulation may be short."""
        batches_per_rank = math.ceil(math.ceil(blocks / self.micro_batch_size) / self.world_size)
        return max(1, math.ceil(batches_per_rank / self.grad_accum_steps))

    def total_steps(self, config: Config, blocks: int) -> int:
        if config.train.max_steps is not None:
            return config.train.max_steps
        return math.ceil(config.train.epochs * self.steps_per_epoch(blocks))

    def describe(self) -> str:
        ranks = (
            f"{self.world_size} {'GPU' if self.device == 'cuda' else 'CPU'} rank{'s' if self.world_size > 1 else ''}"
        )
        return (f"{self.strategy.name} on {ranks} | batch {self.global_batch_size} = {self.micro_batch_size} micro x "
                f"{self.grad_accum_steps} accumulated x {self.world_size} | {self.tokens_per_step:,} tokens per step")  # fmt: skip


def warmup_steps(config: Config, total_steps: int) -> int:
    """Steps of warm-up in a run of `total_steps`; a ratio is rounded up, as Trainer does."""
    if config.optim.warmup_ratio is not None:
        return math.ceil(config.optim.warmup_ratio * total_steps)
    return config.optim.warmup_steps or 0


def _state_bytes_per_gpu(strategy: Strategy, parameters: int, world_size: int) -> float:
    """Weights, gradients and optimizer states that stay on a card (ZeRO, arXiv:1910.02054 §3.1), 16-bit compute."""
    shard = 1 / world_size
    weights = 0 if strategy.offload_params else 2 * (shard if strategy.stage == 3 else 1)
    gradients = 2 * (shard if strategy.stage >= 2 else 1)
    states = 0 if strategy.offload_optimizer else strategy.state_bytes * (shard if strategy.stage >= 1 else 1)
    return parameters * (weights + gradients + states)


_AUTO_ORDER = ("single", "ddp", "zero1", "zero2", "zero3", "zero3_bf16", "zero2_offload", "zero3_offload",
               "zero3_offload_all")  # fmt: skip


def _choose(config: Config, hardware: Hardware, world_size: int, shape: ModelShape | None) -> tuple[Strategy, str]:
    if hardware.device == "cpu":
        name = "single" if world_size == 1 else "zero3"
        return STRATEGIES[name], f"strategy {name}: what {world_size} CPU rank{'s' * (world_size > 1)} can rehearse"
    if shape is None:
        name = "zero3_offload"
        return STRATEGIES[name], f"strategy {name}: the size of {config.model.path} is not known before its download"
    room = 0.7 * min(gpu.memory_bytes for gpu in hardware.gpus[:world_size])
    for name in _AUTO_ORDER:
        strategy = STRATEGIES[name]
        if config.train.precision not in strategy.precisions or (name == "single") != (world_size == 1):
            continue
        need = _state_bytes_per_gpu(strategy, shape.parameters, world_size)
        if need <= room:
            return strategy, (f"strategy {name}: the first whose model states, {need / GIB:.1f} GiB per card, leave 30 % "
                              "of the card for activations and the loss (which are not computed yet)")  # fmt: skip
    raise PlanError(
        f"no strategy fits {config.model.path} ({shape.parameters / 1e9:.1f} B parameters, full fine-tune): even "
        f"zero3_offload_all needs {need / GIB:.1f} GiB of states per card, and {room / GIB:.1f} GiB are usable.\n"
        "  Use more cards (ranks=...) or a smaller model."
    )


def _world_size(config: Config, hardware: Hardware, launched: int | None, single: bool) -> int:
    if launched is not None:
        if config.ranks is not None and config.ranks != launched:
            raise PlanError(
                f"ranks={config.ranks}, but the launcher started {launched}; leave ranks out, or start as many"
            )
        if single and launched != 1:
            raise PlanError(f"strategy single is one process, but the launcher started {launched}; use strategy=ddp")
        return launched
    if single:
        if config.ranks not in (None, 1):
            raise PlanError(f"strategy single is one process, got ranks={config.ranks}; use strategy=ddp or a zero one")
        return 1
    if hardware.gpus and config.ranks is not None and config.ranks > len(hardware.gpus):
        raise PlanError(
            f"ranks={config.ranks}, but {len(hardware.gpus)} GPU{'s are' * (len(hardware.gpus) > 1) or ' is'} visible "
            f"({hardware.describe()}); check CUDA_VISIBLE_DEVICES or ask for fewer"
        )
    return config.ranks or len(hardware.gpus) or CPU_RANKS


def _accumulation(config: Config, world_size: int) -> int:
    train = config.train
    if train.global_batch_size is None:
        return train.grad_accum_steps or 1
    unit = train.micro_batch_size * world_size
    if train.global_batch_size % unit:
        low = train.global_batch_size // unit * unit
        near = " or ".join(str(n) for n in (low, low + unit) if n)
        raise PlanError(
            f"train.global_batch_size={train.global_batch_size} cannot be cut into {world_size} rank"
            f"{'s' * (world_size > 1)} x micro-batch {train.micro_batch_size} = {unit} blocks; "
            f"use {near}, or another train.micro_batch_size"
        )
    return train.global_batch_size // unit


def plan_run(
    config: Config,
    hardware: Hardware | None = None,
    *,
    launched_ranks: int | None = None,
    can_build_ops: bool | None = None,
) -> Plan:
    """Decide strategy, ranks and batch, and check everything that can be checked without the model.

    Args:
        hardware: the machine to plan for; this one when not given.
        launched_ranks: how many ranks a launcher has already started, if one has.
        can_build_ops: whether DeepSpeed's C++ ops can be had (a compiler, or built before); probed when not given.

    Raises:
        PlanError: it cannot work on this hardware.
        ConfigError: the model path, or a DeepSpeed file that contradicts the recipe.
    """
    hardware = hardware or probe()
    shape = find_shape(config.model.path)
    notes: list[str] = []
    single = config.strategy == "single"
    world_size = _world_size(config, hardware, launched_ranks, single)
    accumulation = _accumulation(config, world_size)

    if config.deepspeed is not None:
        strategy, ds = None, deepspeed_config.read(config.deepspeed)
    else:
        if config.strategy == "auto":
            strategy, why = _choose(config, hardware, world_size, shape)
            notes.append(why)
        else:
            strategy = STRATEGIES[config.strategy]
        if config.train.precision not in strategy.precisions:
            raise PlanError(f"strategy {strategy.name} runs in {' or '.join(strategy.precisions)} only, got "
                            f"train.precision={config.train.precision}")  # fmt: skip
        ds = (
            deepspeed_config.read(str(resource_dir("ds_configs") / f"{strategy.name}.json"))
            if strategy.deepspeed
            else None
        )
    if ds is not None:
        batch = deepspeed_config.Batch(config.train.micro_batch_size, accumulation, world_size)
        origin = config.deepspeed or f"{strategy.name}.json"
        ds, problems, ds_notes = deepspeed_config.check(ds, origin, config, batch)
        if problems:
            raise ConfigError(listing("the DeepSpeed file and the recipe do not agree", problems))
        notes += ds_notes
        if strategy is None:
            zero = ds["zero_optimization"]
            offload = {
                k: zero.get(k, {}).get("device", "none") != "none" for k in ("offload_optimizer", "offload_param")
            }
            strategy = Strategy(Path(config.deepspeed).name, "your own DeepSpeed file", stage=zero["stage"],
                                offload_optimizer=offload["offload_optimizer"], offload_params=offload["offload_param"])  # fmt: skip

    ops = []
    if strategy.deepspeed and hardware.device == "cpu" and world_size > 1:
        ops.append("shm_comm")
    if strategy.offload_optimizer:
        ops.append("cpu_adam")
    if ops and not (ops_module.available(ops) if can_build_ops is None else can_build_ops):
        cure = "install one (Debian, Ubuntu: apt-get install g++ python3-dev)"
        if hardware.device == "cuda" or launched_ranks is not None:
            raise PlanError(
                f"strategy {strategy.name} needs DeepSpeed's {' and '.join(ops)} op, which is not built yet, and there is no "
                f"C++ compiler (with Python's headers) to build it; {cure}"
                + (", or use a strategy without offload" if strategy.offload_optimizer else "")
            )
        notes.append(
            f"there is no C++ compiler (with Python's headers), which DeepSpeed needs on the CPU: falling back from {strategy.name} on {world_size} "
            f"ranks to one process with the same batch; {cure} to see {strategy.name}"
        )
        strategy, ds, ops = STRATEGIES["single"], None, []
        accumulation, world_size = accumulation * world_size, 1
    if hardware.device == "cpu" and config.train.precision == "fp16" and not strategy.deepspeed:
        raise PlanError(
            f"strategy {strategy.name} has no fp16 on the CPU; use train.precision=bf16, or a zero strategy"
        )

    if shape is not None and shape.max_positions and config.data.seq_len > shape.max_positions:
        notes.append(f"data.seq_len {config.data.seq_len} is longer than the {shape.max_positions} positions that "
                     f"{config.model.path} was made for")  # fmt: skip
    if shape is not None and shape.dtype == "bfloat16" and config.train.precision == "fp16":
        notes.append(f"{config.model.path} is a bf16 checkpoint and fp16 ends at 65,504: overflows are likely; "
                     "train.precision=bf16 is the safer choice on RTX 30 and 40 cards")  # fmt: skip
    if config.train.max_steps is not None and warmup_steps(config, config.train.max_steps) >= config.train.max_steps:
        notes.append(f"the warm-up of {warmup_steps(config, config.train.max_steps)} steps is not over when the run ends "
                     f"after {config.train.max_steps}: the learning rate stays below its peak")  # fmt: skip
    if config.optim.schedule == "warmup":
        notes.append(
            f"schedule warmup: the learning rate stays at {config.optim.lr:g} after the warm-up, it never decays"
        )

    micro = config.train.micro_batch_size
    return Plan(
        strategy=strategy,
        world_size=world_size,
        device=hardware.device,
        micro_batch_size=micro,
        grad_accum_steps=accumulation,
        tokens_per_step=micro * accumulation * world_size * config.data.seq_len,
        deepspeed=ds,
        ops=tuple(ops),
        shape=shape,
        hardware=hardware,
        notes=tuple(notes),
    )


def to_dict(plan: Plan) -> dict:
    """Plain containers for run.json."""
    fields = dataclasses.asdict(plan)
    fields["strategy"] = plan.strategy.name
    fields["hardware"] = plan.hardware.describe()
    fields["global_batch_size"] = plan.global_batch_size
    return fields
