"""From (config, hardware) to a `Plan`: a pure function, the same on every rank, without torch or a download.

Every strategy is assessed (`candidates`): what it holds on the card, the host and the disk (`memory`), how long a step takes
(`timing`), and what arithmetic forbids. `auto` takes the fastest that fits; when nothing does, `offers` says what would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import deepspeed_config
from . import ops as ops_module
from .candidates import (
    Candidate,
    assess,
    can_choose,
    candidate_dict,
    fastest,
    forbidden,
    shipped,
    short_of_disk,
    usable_gpu_bytes,
)
from .config import Config
from .errors import ConfigError, PlanError, listing
from .hardware import GIB, Hardware, probe
from .memory import Memory
from .offers import Offer, better_batch, nearest, offer_lines
from .optimizers import Optimizer
from .shapes import ModelShape, find_shape
from .strategies import STRATEGIES, Strategy
from .timing import Timing
from .workload import CPU_RANKS, accumulation_of, check_experts, loss_of


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
    stages: tuple[int, ...]
    """Layers of each stage under a pipeline strategy; otherwise empty."""
    loss: str
    """naive, or one that never holds the logits of a whole micro-batch: chunked (`losses.head_loss`) or liger."""
    deepspeed: dict | None
    """The DeepSpeed config that Trainer gets, "auto" where it fills in the recipe's value."""
    ops: tuple[str, ...]
    """DeepSpeed C++ ops that must be built before the ranks start."""
    shape: ModelShape | None
    hardware: Hardware
    candidates: tuple[Candidate, ...]
    """Every strategy with its figures, in the order of the table; the chosen one among them."""
    offers: tuple[Offer, ...]
    """When nothing fits: the nearest changes that would."""
    notes: tuple[str, ...]
    """What the user should know before the run, one line each."""

    @property
    def chosen(self) -> Candidate:
        return next(c for c in self.candidates if c.strategy == self.strategy)

    @property
    def optimizer(self) -> Optimizer:
        return self.chosen.optimizer

    @property
    def memory(self) -> Memory | None:
        return self.chosen.memory

    @property
    def timing(self) -> Timing | None:
        return self.chosen.timing

    @property
    def misfits(self) -> tuple[str, ...]:
        """What is short for the chosen strategy, in numbers; empty when it fits."""
        return self.chosen.reasons + short_of_disk(self.chosen, self.hardware)

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    @property
    def cards(self) -> int:
        """One a rank; under `layer_split` all that its process has."""
        return len(self.stages) if self.strategy.split else self.world_size

    @property
    def _ranks_of_a_model(self) -> int:
        """That see the same rows."""
        return len(self.stages) if self.strategy.pipeline else self.world_size if self.strategy.shared else 1

    @property
    def replicas(self) -> int:
        """How many copies of the model share a batch."""
        return self.world_size // self._ranks_of_a_model

    @property
    def micro_batches(self) -> int:
        """Of a step, in each replica."""
        return self.grad_accum_steps * self._ranks_of_a_model

    @property
    def rows_at_once(self) -> int:
        """That a rank reads: its micro-batch, of which all stages see the same; of several pipelines each takes its own rows."""
        return self.micro_batch_size * (self.replicas if self.strategy.pipeline else 1)

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
        ranks += f", layers {' + '.join(map(str, self.stages))}" if self.stages else ""
        ranks += f" x {self.replicas} pipelines" if self.strategy.pipeline and self.replicas > 1 else ""
        return (f"{self.strategy.name} on {ranks} | batch {self.global_batch_size} = {self.micro_batch_size} micro x "
                f"{self.grad_accum_steps} accumulated x {self.world_size} | {self.tokens_per_step:,} tokens per step")  # fmt: skip

    def __str__(self) -> str:
        from .plan_view import text

        return text(self)

    def _repr_html_(self) -> str:
        from .plan_view import html

        return html(self)


@dataclass(frozen=True)
class Schedule:
    """Steps and time of a run."""

    steps: int
    warmup_steps: int
    tokens: int
    seconds: float | None
    """Estimated; None where a step's time is not."""
    seconds_range: tuple[float, float] | None
    epoch_seconds: float | None
    guessed: bool
    """The data's size is a guess from file sizes, or from what is known of the data set."""


def schedule_run(plan: Plan, config: Config, train_tokens: int | None, guessed: bool = True) -> Schedule | None:
    """How many steps a run takes and how long; None when neither `max_steps` nor the data's size is known.

    Args:
        train_tokens: tokens of the training data.
    """
    seq_len = config.data.seq_len
    blocks = max(1, train_tokens // seq_len) if train_tokens else None
    if config.train.max_steps is None and blocks is None:
        return None
    steps = plan.total_steps(config, blocks or 0) if blocks or config.train.max_steps else 0
    timing = plan.timing
    return Schedule(
        steps=steps,
        warmup_steps=warmup_steps(config, steps),
        tokens=steps * plan.tokens_per_step,
        seconds=timing.step_seconds * steps if timing else None,
        seconds_range=(timing.step_seconds_range[0] * steps, timing.step_seconds_range[1] * steps) if timing else None,
        epoch_seconds=timing.step_seconds * plan.steps_per_epoch(blocks) if timing and blocks else None,
        guessed=guessed and config.train.max_steps is None,
    )


def warmup_steps(config: Config, total_steps: int) -> int:
    """Steps of warm-up in a run of `total_steps`; a ratio is rounded up, as Trainer does."""
    if config.optim.warmup_ratio is not None:
        return math.ceil(config.optim.warmup_ratio * total_steps)
    return config.optim.warmup_steps or 0


# --------------------------------------------------------------------------------------------------- the plan


def _world_size(config: Config, hardware: Hardware, launched: int | None) -> int:
    strategy = STRATEGIES.get(config.strategy)
    alone = strategy is not None and not strategy.many_ranks
    if launched is not None:
        if config.ranks is not None and config.ranks != launched:
            raise PlanError(
                f"ranks={config.ranks}, but the launcher started {launched}; leave ranks out, or start as many"
            )
        if alone and launched != 1:
            raise PlanError(f"strategy {strategy.name} is one process, but the launcher started {launched}; use strategy=ddp")
        return launched
    if alone and not strategy.split:
        if config.ranks not in (None, 1):
            raise PlanError(f"strategy {strategy.name} is one process, got ranks={config.ranks}; use strategy=ddp or a zero one")
        return 1
    if hardware.gpus and config.ranks is not None and config.ranks > len(hardware.gpus):
        raise PlanError(
            f"ranks={config.ranks}, but {len(hardware.gpus)} GPU{'s are' * (len(hardware.gpus) > 1) or ' is'} visible "
            f"({hardware.describe()}); check CUDA_VISIBLE_DEVICES or ask for fewer"
        )
    return 1 if alone else config.ranks or len(hardware.gpus) or CPU_RANKS


def _own_strategy(path: str, ds: Mapping) -> Strategy:
    """The row that a user's own DeepSpeed file stands for. DeepSpeed offloads the optimizer from stage 1, weights at stage 3."""
    zero, bf16 = ds["zero_optimization"], ds.get("bf16") or {}
    stage = zero["stage"]
    devices = {k: (zero.get(k) or {}).get("device", "none") for k in ("offload_optimizer", "offload_param")}
    return Strategy(
        Path(path).name, "your own DeepSpeed file", stage=stage,
        offload_optimizer=stage >= 1 and devices["offload_optimizer"] != "none",
        offload_params=stage == 3 and devices["offload_param"] != "none", nvme=stage == 3 and "nvme" in devices.values(),
        quantized_gathers=stage == 3 and bool(zero.get("zero_quantized_weights")),
        master_bytes=2 if bf16.get("bf16_master_weights_and_grads") else 4,
        moment_bytes=4 if bf16.get("bf16_optimizer_states") else 8, chosen=False,
    )  # fmt: skip


def plan_run(
    config: Config,
    hardware: Hardware | None = None,
    *,
    launched_ranks: int | None = None,
    can_build_ops: bool | None = None,
    force: bool = False,
) -> Plan:
    """Decide strategy, ranks and batch, and check everything that can be checked without the model.

    Args:
        hardware: the machine to plan for; this one when not given.
        launched_ranks: how many ranks a launcher has already started, if one has.
        can_build_ops: whether DeepSpeed's C++ ops can be had (a compiler, or built before); probed when not given.
        force: give a plan even when it does not fit (`Plan.misfits` says what is short).

    Raises:
        PlanError: it cannot work on this hardware.
        ConfigError: the model path, or a DeepSpeed file that contradicts the recipe.
    """
    hardware = hardware or probe(config.output_dir)
    shape = find_shape(config.model.path, config.model.tokenizer, len(config.model.new_tokens))
    if shape is not None:
        check_experts(config, shape)
    world_size = _world_size(config, hardware, launched_ranks)
    accumulation = accumulation_of(config, world_size)
    batch = deepspeed_config.Batch(config.train.micro_batch_size, accumulation, world_size)

    # -- every strategy, and the one that is taken
    candidates = [assess(config, shape, s, world_size, accumulation, hardware) for s in STRATEGIES.values()]
    own, notes = None, []
    if config.deepspeed is not None:
        own, notes = _checked(deepspeed_config.read(config.deepspeed), config.deepspeed, config, batch)
        strategy = _own_strategy(config.deepspeed, own)
        candidates.append(assess(config, shape, strategy, world_size, accumulation, hardware, own))
    else:
        strategy, why = _pick(config, shape, candidates, world_size, hardware, can_build_ops)
        notes += why
    chosen = next(c for c in candidates if c.strategy == strategy)
    named = config.strategy != "auto" or own is not None
    if chosen.forbidden and (named or shape is None):
        raise PlanError(f"strategy {strategy.name} " + "; ".join(chosen.reasons))
    ds = own
    if own is None and strategy.deepspeed and not chosen.forbidden:
        file = strategy.file or strategy.name
        ds, more = _checked(shipped(file), f"{file}.json", config, batch)
        notes += more

    # -- whether it fits, and what would
    offers: tuple[Offer, ...] = ()
    short = chosen.reasons + short_of_disk(chosen, hardware)
    if short and shape is not None:
        pinned = named or hardware.device == "cpu"  # CPU ranks rehearse one strategy
        names = [] if own is not None else [strategy.name] if pinned else list(STRATEGIES)
        offers = nearest(config, shape, names, world_size, accumulation, hardware)
        if named and chosen.reasons:
            offers = (*_another_strategy(config, hardware, launched_ranks), *offers)
        if not force:
            raise PlanError(refusal(config, chosen, short, candidates, offers, hardware, world_size))

    # -- what must be built for it
    ops = _ops_of(strategy, hardware)
    if ops and not (ops_module.available(ops) if can_build_ops is None else can_build_ops):
        notes.append(_without_compiler(config, strategy, ops, hardware, world_size, launched_ranks))
        accumulation, world_size = accumulation * world_size, 1
        strategy, ds, ops = STRATEGIES["single"], None, ()
        if reasons := list(forbidden(config, shape, strategy, 1, hardware)):
            raise PlanError(f"strategy single {'; '.join(reasons)}")
        candidates = [assess(config, shape, s, 1, accumulation, hardware) if s == strategy else c
                      for s, c in zip(STRATEGIES.values(), candidates, strict=False)]  # fmt: skip

    notes += _rounds(strategy, next(c for c in candidates if c.strategy == strategy))
    notes += _remarks(config, shape, strategy)
    if own is None and chosen.timing is not None and chosen.fits:
        notes += better_batch(config, shape, chosen, world_size, accumulation, hardware)
    micro = config.train.micro_batch_size
    return Plan(
        strategy=strategy,
        world_size=world_size,
        device=hardware.device,
        micro_batch_size=micro,
        grad_accum_steps=accumulation,
        tokens_per_step=micro * accumulation * world_size * config.data.seq_len,
        stages=next(c for c in candidates if c.strategy == strategy).stages,
        loss=loss_of(config, shape),
        deepspeed=ds,
        ops=ops,
        shape=shape,
        hardware=hardware,
        candidates=tuple(candidates),
        offers=offers,
        notes=tuple(notes),
    )


def _checked(ds: dict, origin: str, config: Config, batch: deepspeed_config.Batch) -> tuple[dict, list[str]]:
    """A DeepSpeed file held against the recipe and completed, with notes.

    Raises:
        ConfigError: they contradict each other; all of it at once.
    """
    completed, problems, notes = deepspeed_config.check(ds, origin, config, batch)
    if problems:
        raise ConfigError(listing("the DeepSpeed file and the recipe do not agree", problems))
    return completed, notes


def _pick(config: Config, shape: ModelShape | None, candidates: list[Candidate], world_size: int, hardware: Hardware,
          can_build_ops: bool | None) -> tuple[Strategy, list[str]]:  # fmt: skip
    """The strategy that the recipe names, or `auto`'s, with its reasons."""
    if config.strategy != "auto":
        return STRATEGIES[config.strategy], []

    def impossible(name: str) -> bool:
        return next(c.forbidden for c in candidates if c.strategy.name == name)

    if hardware.device == "cpu":
        rehearsed = ("single",) if world_size == 1 else ("zero3", "zero2", "zero3_bf16", "ddp")
        name = next((n for n in rehearsed if not impossible(n)), rehearsed[0])  # not everything goes with ZeRO
        return STRATEGIES[name], [f"strategy {name}: what {world_size} CPU rank{'s' * (world_size > 1)} can rehearse"]
    if shape is None:
        name = "zero2" if impossible("zero3_offload") else "zero3_offload"
        return STRATEGIES[name], [f"strategy {name}: the size of {config.model.path} is not known before its download"]
    best = fastest(candidates, world_size)
    if (
        best is not None
        and best.strategy.offload_optimizer
        and not (ops_module.available(["cpu_adam"]) if can_build_ops is None else can_build_ops)
    ):  # without a compiler there is no optimizer on the host
        best = fastest([c for c in candidates if not c.strategy.offload_optimizer], world_size) or best
    if best is None:
        return _least_short(candidates, world_size), []
    return best.strategy, list(_why(best, candidates))


def _another_strategy(config: Config, hardware: Hardware, launched_ranks: int | None) -> tuple[Offer, ...]:
    """When a named strategy does not fit: what `auto` would take, with the ranks that it would have."""
    free = dataclasses.replace(config, strategy="auto", deepspeed=None)
    try:
        plan = plan_run(free, hardware, launched_ranks=launched_ranks, can_build_ops=True, force=True)
    except (PlanError, ConfigError):
        return ()
    return (Offer((f"strategy={plan.strategy.name}",), plan.chosen),) if plan.chosen.fits and not plan.misfits else ()


def _ops_of(strategy: Strategy, hardware: Hardware) -> tuple[str, ...]:
    ops = ["shm_comm"] if strategy.deepspeed and hardware.device == "cpu" else []  # which one rank loads too
    ops += ["cpu_adam"] if strategy.offload_optimizer else []
    ops += ["async_io"] if strategy.nvme else []
    ops += ["quantizer"] if strategy.quantized_gathers else []
    return tuple(ops)


def _without_compiler(config: Config, strategy: Strategy, ops: tuple[str, ...], hardware: Hardware, world_size: int,
                      launched_ranks: int | None) -> str:  # fmt: skip
    """The note on falling back to one process.

    Raises:
        PlanError: with cards, or ranks that are there already, there is no falling back.
    """
    cure = "install one (Debian, Ubuntu: apt-get install g++ python3-dev)"
    missing = ops_module.missing_for_builds(ops)
    if hardware.device == "cuda" or launched_ranks is not None or strategy.nvme:
        what = " and ".join(missing) or "C++ compiler"
        ops = [op for op in ops if not ops_module.is_built(op)] or ops
        how = " && ".join(ops_module.CURES[part] for part in missing) or cure
        raise PlanError(
            f"strategy {strategy.name} needs DeepSpeed's {' and '.join(ops)} op, which is not built yet, and there is no "
            f"{what.removeprefix('a ')} to build it (Debian, Ubuntu: {how})"
            + (", or use a strategy without offload" if strategy.offload_optimizer else "")
        )
    return (f"there is no C++ compiler (with Python's headers), which DeepSpeed needs on the CPU: falling back from {strategy.name} on "
            f"{world_size} ranks to one process with the same batch; {cure} to see {strategy.name}")  # fmt: skip


def _least_short(candidates: list[Candidate], world_size: int) -> Strategy:
    """When nothing fits: what nothing forbids, if there is any, and of that what is short of the least."""
    able = [c for c in candidates if can_choose(c.strategy, world_size)]
    return min(able, key=lambda c: (c.forbidden, c.fullness <= 1, c.fullness)).strategy


def _why(best: Candidate, candidates: list[Candidate]) -> Iterator[str]:
    """Why `auto` took this one, and what would be faster."""
    speed = best.timing.tokens_per_second if best.timing else None
    what = f"about {speed:,.0f} tokens/s" if speed else "the least sharding"
    margin = "" if not best.tight else ", though with little to spare"
    yield f"strategy {best.strategy.name}: {best.strategy.summary}; the fastest that fits ({what}){margin}"
    for other in candidates:
        if speed and other.fits and other.timing and other.timing.tokens_per_second > 1.1 * speed:
            ratio = other.timing.tokens_per_second / speed
            if other.rounding != "none":
                yield f"{other.strategy.name} would be about {ratio:.1f}x as fast; it rounds updates to bf16, so it is only taken by name"


def _rounds(strategy: Strategy, candidate: Candidate) -> Iterator[str]:
    """What the user should know where no fp32 weights are kept."""
    where = f"{strategy.name} keeps bf16 {'master weights' if strategy.deepspeed else 'weights only'}"
    if candidate.rounding == "stochastic":
        yield (f"{where} and rounds updates stochastically (optim.name={candidate.optimizer.name}): small updates are not lost, but "
               "noisy")  # fmt: skip
    elif candidate.rounding == "plain":
        why = "the update on the host has no stochastic rounding" if strategy.offload_optimizer else "optim.name=adamw_bf16 keeps them"
        yield (f"{where}: updates smaller than about 1/256 of a weight are rounded away, and at small learning rates most weights "
               f"do not move; {why}")  # fmt: skip


def _remarks(config: Config, shape: ModelShape | None, strategy: Strategy) -> Iterator[str]:
    train, optim = config.train, config.optim
    if shape is not None and shape.max_positions and config.data.seq_len > shape.max_positions:
        yield (f"data.seq_len {config.data.seq_len} is longer than the {shape.max_positions} positions that "
               f"{config.model.path} was made for")  # fmt: skip
    if shape is not None and shape.dtype == "bfloat16" and train.precision == "fp16":
        yield (f"{config.model.path} is a bf16 checkpoint and fp16 ends at 65,504: overflows are likely; "
               "train.precision=bf16 is the safer choice on RTX 30 and 40 cards")  # fmt: skip
    if train.max_steps is not None and warmup_steps(config, train.max_steps) >= train.max_steps:
        yield (f"the warm-up of {warmup_steps(config, train.max_steps)} steps is not over when the run ends "
               f"after {train.max_steps}: the learning rate stays below its peak")  # fmt: skip
    if config.method.kind == "qlora" and not strategy.staged:
        yield ("the 4-bit base lies whole on every card" if shape is None or not shape.experts else
               "the 4-bit base lies whole on every card, and its routed experts stay in 16 bits: they are fused weights, which "
               "bitsandbytes does not quantise")  # fmt: skip
    if strategy.nvme and shape is not None:
        written = shape.parameters * (2 * strategy.master_bytes + strategy.moment_bytes) / 1e12
        yield (f"zero3_nvme writes {written:.2f} TB to the disk in each step, and reads as much: consumer drives are rated for some hundreds "
               "of TB in all")  # fmt: skip
    elif config.offload_dir is not None:
        yield f"offload_dir is where zero3_nvme keeps its states; {strategy.name} keeps nothing there"
    if strategy.quantized_gathers:
        yield "zeropp computes with weights rounded to 8 bits: its losses are not those of the other strategies"
    if optim.schedule == "warmup":
        yield f"schedule warmup: the learning rate stays at {optim.lr:g} after the warm-up, it never decays"


def refusal(config: Config, chosen: Candidate, short: tuple[str, ...], candidates: list[Candidate], offers: tuple[Offer, ...],
            hardware: Hardware, world_size: int) -> str:  # fmt: skip
    """The error when it does not fit: what, got, why, what to do."""
    where = (
        f"{world_size} x {usable_gpu_bytes(hardware, world_size) / GIB:.1f} GiB"
        if hardware.gpus
        else f"{world_size} CPU ranks"
    )
    host = f"{hardware.host_memory_bytes / GIB:.0f} GiB host"
    what = f"{config.model.path} ({config.method.kind} fine-tune, seq_len {config.data.seq_len}, micro-batch {config.train.micro_batch_size})"
    named = config.strategy != "auto" or config.deepspeed is not None or not chosen.reasons
    head = f"strategy {chosen.strategy.name} does not fit" if named else "no strategy fits"
    rows = [(c.strategy.name, c.reasons) for c in candidates if can_choose(c.strategy, world_size) and c.memory]
    rows = [(chosen.strategy.name, short)] if named else rows
    width = max(len(name) for name, _ in rows)
    lines = [f"{head} {what} on {where}, {host}."]
    lines += [f"  {name:{width}}  {'; '.join(reasons)}" for name, reasons in rows]
    return "\n".join([*lines, *offer_lines(offers), "  --force (force=True) starts all the same."])


def to_dict(plan: Plan) -> dict:
    """Plain containers for run.json: the decisions, and what was predicted."""
    keep = (
        "world_size",
        "device",
        "micro_batch_size",
        "grad_accum_steps",
        "tokens_per_step",
        "loss",
        "deepspeed",
    )
    return {
        "strategy": plan.strategy.name,
        "optimizer": plan.optimizer.name,
        **{name: getattr(plan, name) for name in keep},
        "global_batch_size": plan.global_batch_size,
        "stages": list(plan.stages),
        "ops": list(plan.ops),
        "parameters": plan.shape.parameters if plan.shape else None,
        "hardware": plan.hardware.describe(),
        "candidates": [candidate_dict(c) for c in plan.candidates],
        "offers": [{"overrides": list(o.overrides), **candidate_dict(o.candidate)} for o in plan.offers],
        "notes": list(plan.notes),
    }
