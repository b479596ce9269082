"""From (config, hardware) to a `Plan`: a pure function, the same on every rank, without torch or a download.

Every strategy is assessed: what it holds on the card, the host and the disk (`memory`), how long a step takes
(`timing`), and what arithmetic forbids. `auto` takes the fastest that fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import deepspeed_config
from . import ops as ops_module
from .config import TRAINED_WHOLE, Config, ExpertsConfig
from .errors import ConfigError, PlanError, listing
from .hardware import GIB, Hardware, probe
from .memory import Memory, estimate, resident_bytes
from .optimizers import OPTIMIZERS, ROUNDINGS, Optimizer, refused, resolve, rounding
from .recipe import resource_dir
from .shapes import ModelShape, find_shape
from .strategies import STRATEGIES, Strategy
from .timing import Timing, estimate_time
from .workload import Adapter, Workload, matches

CPU_RANKS = 3  # without a GPU: the three-card run in miniature
MARGIN = 0.95
"""Share of the usable memory that `auto` fills: estimates are not promises."""
DRIVER = 0.98
"""Share of a card's memory, as NVML reports it, that CUDA can allocate: a 4090 of 24,564 MiB offers 23.5 GiB."""
LARGE_VOCABULARY = 32_000
HOST_RESERVE = (0.1, 2 * GIB)
"""Of the host's memory for the system itself: a share, and its upper end."""


# ------------------------------------------------------------------------------------------------ the answer


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


@dataclass(frozen=True)
class Offer:
    """A change of the recipe under which something fits."""

    overrides: tuple[str, ...]
    candidate: Candidate


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
        return self.chosen.reasons + _short_of_disk(self.chosen, self.hardware)

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


# -------------------------------------------------------------------------------------- what can be used, and why not


def usable_gpu_bytes(hardware: Hardware, world_size: int) -> int:
    """Of the smallest card that takes part."""
    return int(DRIVER * min(gpu.memory_bytes for gpu in hardware.gpus[:world_size]))


def usable_host_bytes(hardware: Hardware) -> int:
    share, most = HOST_RESERVE
    return int(hardware.host_memory_bytes - min(share * hardware.host_memory_bytes, most))


def adapter_of(config: Config, shape: ModelShape) -> Adapter | None:
    """The adapter that the recipe asks for, on its targets or the architecture's usual ones.

    Raises:
        ConfigError: something that the model does not have, or that cannot be had together.
    """
    method = config.method
    if method.kind == "full":
        return None
    names = sorted({n.removesuffix(".weight").rsplit(".", 1)[-1] for k in shape.kinds for n, s in k.weights.items()
                    if len(s) == 2 and n.endswith("_proj.weight") or n.endswith("_mqa.weight")})  # fmt: skip
    problems = []
    fused = [n for n in ("gate_proj", "up_proj", "down_proj") if shape.model_type.startswith("deepseek") and method.variant == "dora"]
    if method.targets is None:
        names = [n for n in names if n not in fused]
    targets = tuple(names if method.targets is None else method.targets)
    if wrong := [t for t in targets if t in fused]:
        problems.append(f"method.variant=dora: peft cannot load a DoRA on {', '.join(wrong)} of a V2 or V3 model again, whose names it takes "
                        "for the routed experts'; leave them out of method.targets, or use lora or rslora")  # fmt: skip
    unknown = [t for t in targets if t not in names]
    if unknown:
        problems.append(
            f"method.targets: {', '.join(unknown)} is no linear layer of {config.model.path}; it has {', '.join(names)}"
        )
    if method.experts and not shape.experts:
        problems.append(f"method.experts: {config.model.path} has no routed experts; leave it out")
    if method.train_also and shape.tied:
        problems.append(
            f"method.train_also: embedding and head of {config.model.path} are one weight, and peft would train a copy of one of "
            "them; leave it out"
        )
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else listing("method cannot be used with this model", problems))
    return Adapter(
        method.rank,
        targets,
        quantized=method.kind == "qlora",
        dora=method.variant == "dora",
        experts=method.experts,
        whole=tuple(method.train_also),
        tokens=len(config.model.new_tokens),
        tables=tuple(t for t in (("embed_tokens",) if shape.tied else TRAINED_WHOLE) if config.model.new_tokens and t not in method.train_also),
    )


def frozen_of(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """The patterns of `method.freeze`, each of which means something, and which leave something to train.

    Raises:
        ConfigError: one does not, or they do not.
    """
    patterns = tuple(config.method.freeze)
    if not patterns:
        return ()
    names = [name for name, _ in shape.names()]
    idle = [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]
    if idle:
        kinds = sorted({part for name in names for part in name.split(".") if not part.isdecimal()} - {"model", "weight", "bias"})
        raise ConfigError(
            f"method.freeze: {', '.join(idle)} means no weight of {config.model.path}; it has layers.0-{shape.layers - 1} and "
            f"{', '.join(k for k in kinds if k != 'layers')}"
        )
    if all(any(matches(pattern, name) for pattern in patterns) for name in names):
        raise ConfigError(f"method.freeze: {', '.join(patterns)} is every weight of {config.model.path}: nothing is left to train")
    return patterns


def balance_coefficient(config: Config, shape: ModelShape | None) -> float | None:
    """Of the routers' balance loss; None where there is none."""
    wanted = config.experts.balance_loss
    if wanted == "config":
        return shape.balance_loss if shape is not None else None
    return wanted


def check_experts(config: Config, shape: ModelShape) -> None:
    """
    Raises:
        ConfigError: options for a mixture of experts that this model has no use for; all of them at once.
    """
    asked, model, problems = config.experts, config.model.path, []
    if not shape.experts:
        usual = ExpertsConfig()
        problems += [f"experts.{f.name}: {model} is a dense model, it has no router; leave it out"
                     for f in dataclasses.fields(usual) if getattr(asked, f.name) != getattr(usual, f.name)]  # fmt: skip
    else:
        if asked.balance_loss == "config" and shape.balance_loss is None:
            problems.append(f"experts.balance_loss=config: the config.json of {model} names neither aux_loss_alpha nor "
                            "router_aux_loss_coef; give a number, such as 0.001")  # fmt: skip
        if asked.bias_update_speed is not None and shape.model_type != "deepseek_v3":
            problems.append(f"experts.bias_update_speed: {model} is a {shape.model_type} model, whose routers choose by their scores alone; "
                            "only V3's add a bias to them. experts.balance_loss is what V2 was trained with")  # fmt: skip
    if problems:
        raise ConfigError(listing("the recipe and the model do not go together", problems))


@lru_cache(maxsize=64)
def _shipped(name: str) -> dict:
    return deepspeed_config.read(str(resource_dir("ds_configs") / f"{name}.json"))


def _workload(config: Config, shape: ModelShape, strategy: Strategy, world_size: int, accumulation: int, hardware: Hardware,
              deepspeed: Mapping | None) -> Workload:  # fmt: skip
    return Workload(
        shape=shape,
        strategy=strategy,
        world_size=world_size,
        micro_batch_size=config.train.micro_batch_size,
        seq_len=config.data.seq_len,
        grad_accum_steps=accumulation,
        precision=config.train.precision,
        checkpointing=config.model.gradient_checkpointing,
        loss=loss_of(config, shape),
        checkpoint_every=config.model.checkpoint_every,
        offload_activations=config.model.offload_activations,
        tiled_mlp=config.model.tiled_mlp or 1,
        adapter=adapter_of(config, shape),
        balance_loss=config.experts.balance_loss is not None,
        frozen=frozen_of(config, shape),
        isolated=config.data.isolate and not config.model.attention.startswith("flash"),
        device=hardware.device,
        deepspeed=deepspeed,
        ranks_per_host=min(world_size, len(hardware.gpus)) if hardware.gpus else None,
        optimizer=resolve(config.optim.name, strategy),
        optimizer_rank=config.optim.rank,
    )


def loss_of(config: Config, shape: ModelShape | None) -> str:
    if config.train.loss == "auto":
        return "chunked" if shape is not None and shape.vocab_size >= LARGE_VOCABULARY else "naive"
    return config.train.loss


def _forbidden(
    config: Config, shape: ModelShape | None, strategy: Strategy, world_size: int, hardware: Hardware
) -> Iterator[str]:
    """What no amount of memory would change."""
    precision = config.train.precision
    if precision not in strategy.precisions:
        yield f"runs in {' or '.join(strategy.precisions)} only, got train.precision={precision}"
    if not strategy.many_ranks and world_size != 1:
        yield f"is one process, and there are {world_size} ranks"
    if strategy.pipeline and shape is not None and world_size > shape.layers:
        yield f"needs a layer for each stage: {shape.layers} layers, {world_size} ranks"
    if (strategy.pipeline or strategy.tensor or strategy.sequence) and config.method.kind != "full":
        yield "trains every weight"
    if (strategy.tensor or strategy.sequence) and world_size == 1:
        yield "needs at least 2 ranks"
    if (
        (strategy.tensor or strategy.sequence)
        and shape is not None
        and (shape.heads % world_size or shape.kv_heads % world_size)
    ):
        heads = f"{shape.heads} heads" + (f" and {shape.kv_heads} key heads" if shape.kv_heads != shape.heads else "")
        fitting = [n for n in range(2, 9) if shape.heads % n == 0 and shape.kv_heads % n == 0]
        yield f"{heads} do not divide by {world_size} ranks" + (
            f", but by {', '.join(map(str, fitting))}" if fitting else ""
        )
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


def _short_of_disk(candidate: Candidate, hardware: Hardware) -> tuple[str, ...]:
    """No part of the choice: the free disk changes while a run goes, and another strategy is no cure for it."""
    memory, free = candidate.memory, hardware.disk_free_bytes
    if memory is None or free is None or memory.disk_bytes <= free:
        return ()
    return (f"needs {memory.disk_bytes / GIB:.1f} GiB of disk, {free / GIB:.1f} are free: train.save_total_limit and "
            "train.save_steps decide",)  # fmt: skip


def _assess(config: Config, shape: ModelShape | None, strategy: Strategy, world_size: int, accumulation: int,
            hardware: Hardware, deepspeed: Mapping | None = None) -> Candidate:  # fmt: skip
    if (
        not strategy.many_ranks and config.strategy != strategy.name
    ):  # the table's baseline: one of the cards, the same batch
        accumulation, world_size = accumulation * world_size, 1
    reasons = list(_forbidden(config, shape, strategy, world_size, hardware))
    optimizer = resolve(config.optim.name, strategy)
    if shape is None or (strategy.pipeline and world_size > shape.layers) or (strategy.tensor and reasons):
        return Candidate(strategy, reasons=tuple(reasons), forbidden=bool(reasons), optimizer=optimizer)
    if deepspeed is None and strategy.deepspeed:
        deepspeed = _shipped(strategy.name)
    load = _workload(config, shape, strategy, world_size, accumulation, hardware, deepspeed)
    checkpoints = config.train.save_total_limit + 1 if config.train.save_steps else 0
    memory = estimate(load, checkpoints)
    shares = list(_short_of(memory, hardware, world_size))
    forbidden = bool(reasons)
    reasons += [reason for reason, share in shares if share > 1]
    fullness = max(share for _, share in shares)
    return Candidate(strategy, memory, estimate_time(load, hardware), tuple(reasons), forbidden, fullness, optimizer)


def _states_fit(
    config: Config, shape: ModelShape, strategy: Strategy, world_size: int, accumulation: int, hardware: Hardware
) -> bool:
    """The cheap half of `_assess`: whether at least what stays on card and host has room, before any activation."""
    if not _can_choose(strategy, world_size):
        return False
    deepspeed = _shipped(strategy.name) if strategy.deepspeed else None
    card, host = resident_bytes(_workload(config, shape, strategy, world_size, accumulation, hardware, deepspeed))
    return (not hardware.gpus or card <= usable_gpu_bytes(hardware, world_size)) and host <= usable_host_bytes(hardware)


def _can_choose(strategy: Strategy, world_size: int) -> bool:
    return strategy.runs and strategy.chosen and (strategy.many_ranks or world_size == 1)


def _fastest(candidates: list[Candidate], world_size: int) -> Candidate | None:
    """Of those that fit: exact updates before rounded ones, stochastically rounded before lost ones, with a margin before without, then the fastest.

    Within 5 %, which is more than the estimate can tell apart, and where there is no estimate, the table's order decides:
    from the least sharding to the most.
    """
    able = [c for c in candidates if c.fits and _can_choose(c.strategy, world_size)]
    if not able:
        return None

    def rank(candidate: Candidate) -> tuple[int, bool]:
        return ROUNDINGS.index(candidate.rounding), candidate.tight

    best = min(map(rank, able))
    peers = [c for c in able if rank(c) == best]
    fastest = max((c.timing.tokens_per_second for c in peers if c.timing), default=0.0)
    return next(c for c in peers if not c.timing or c.timing.tokens_per_second >= 0.95 * fastest)


# ---------------------------------------------------------------------------------------- when nothing fits


def _changes(config: Config, accumulation: int) -> Iterator[tuple[tuple[str, ...], Config]]:
    """The recipe changed in one way, from the mildest to the most drastic; the global batch stays."""
    train, data = config.train, config.data
    if train.loss == "naive":
        yield ("train.loss=chunked",), dataclasses.replace(config, train=dataclasses.replace(train, loss="chunked"))
    if not config.model.gradient_checkpointing:
        yield (("model.gradient_checkpointing=true",),
               dataclasses.replace(config, model=dataclasses.replace(config.model, gradient_checkpointing=True)))  # fmt: skip
    elif config.model.checkpoint_every > 1:
        yield (("model.checkpoint_every=1",),
               dataclasses.replace(config, model=dataclasses.replace(config.model, checkpoint_every=1)))  # fmt: skip
    micro = train.micro_batch_size
    while micro > 1:
        micro //= 2
        if train.micro_batch_size % micro:
            continue
        steps = accumulation * train.micro_batch_size // micro
        changed = dataclasses.replace(
            train, micro_batch_size=micro, grad_accum_steps=None if train.global_batch_size else steps
        )
        words = (
            f"train.micro_batch_size={micro}",
            *(() if train.global_batch_size else (f"train.grad_accum_steps={steps}",)),
        )
        yield words, dataclasses.replace(config, train=changed)
    if train.precision == "bf16":  # on cards that have none
        yield ("train.precision=fp16",), dataclasses.replace(config, train=dataclasses.replace(train, precision="fp16"))
    if train.precision in ("fp32", "fp16"):
        yield ("train.precision=bf16",), dataclasses.replace(config, train=dataclasses.replace(train, precision="bf16"))
    if train.save_steps:
        if train.save_total_limit > 1:
            yield (("train.save_total_limit=1",),
                   dataclasses.replace(config, train=dataclasses.replace(train, save_total_limit=1)))  # fmt: skip
        yield ("train.save_steps=null",), dataclasses.replace(config, train=dataclasses.replace(train, save_steps=None))
    seq_len = data.seq_len
    while seq_len > 512:
        seq_len //= 2
        yield (f"data.seq_len={seq_len}",), dataclasses.replace(config, data=dataclasses.replace(data, seq_len=seq_len))
    for kind in ("lora", "qlora"):
        if config.method.kind == "full":
            yield (
                (f"method.kind={kind}",),
                dataclasses.replace(config, method=dataclasses.replace(config.method, kind=kind)),
            )


def _offers(config: Config, shape: ModelShape, names: list[str], world_size: int, accumulation: int, hardware: Hardware,
            limit: int = 4) -> tuple[Offer, ...]:  # fmt: skip
    """The mildest changes under which a strategy fits; two changes at once where one is not enough."""

    def fitting(changed: Config) -> Candidate | None:
        steps = _accumulation(changed, world_size)
        possible = [n for n in names if _states_fit(changed, shape, STRATEGIES[n], world_size, steps, hardware)]
        best = _fastest(
            [_assess(changed, shape, STRATEGIES[n], world_size, steps, hardware) for n in possible], world_size
        )
        return best if best is not None and not _short_of_disk(best, hardware) else None

    found: list[Offer] = []
    kinds: set[str] = set()  # one offer of each kind is enough: the largest micro-batch, the longest sequence

    def consider(words: tuple[str, ...], changed: Config) -> None:
        keys = {
            w if w.startswith("method") else w.split("=")[0].replace("grad_accum_steps", "micro_batch_size")
            for w in words
        }
        kind = "+".join(sorted(keys))
        if kind in kinds:
            return
        if len(found) < limit and (candidate := fitting(changed)) is not None:
            kinds.add(kind)
            found.append(Offer(words, candidate))

    singles = list(_changes(config, accumulation))
    for words, changed in singles:
        consider(words, changed)
    # Nothing keeps full fine-tuning yet: two changes at once, and only then adapters with another change.
    for with_adapter in (False, True):
        if any(not o.overrides[0].startswith("method") for o in found) or (with_adapter and found):
            break
        for words, changed in singles:
            if words[0].startswith("method") != with_adapter:
                continue
            for more, twice in _changes(changed, _accumulation(changed, world_size)):
                if more[0].split("=")[0] != words[0].split("=")[0] and not more[0].startswith("method"):
                    consider(tuple(dict.fromkeys((*words, *more))), twice)
    return tuple(found)


# --------------------------------------------------------------------------------------------------- the plan


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


def _own_strategy(path: str, ds: Mapping) -> Strategy:
    """The row that a user's own DeepSpeed file stands for. DeepSpeed offloads the optimizer from stage 1, weights at stage 3."""
    zero, bf16 = ds["zero_optimization"], ds.get("bf16") or {}
    stage = zero["stage"]
    devices = {k: (zero.get(k) or {}).get("device", "none") for k in ("offload_optimizer", "offload_param")}
    return Strategy(
        Path(path).name, "your own DeepSpeed file", stage=stage,
        offload_optimizer=stage >= 1 and devices["offload_optimizer"] != "none",
        offload_params=stage == 3 and devices["offload_param"] != "none", nvme=stage == 3 and "nvme" in devices.values(),
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
    world_size = _world_size(config, hardware, launched_ranks, config.strategy == "single")
    accumulation = _accumulation(config, world_size)
    batch = deepspeed_config.Batch(config.train.micro_batch_size, accumulation, world_size)

    # -- every strategy, and the one that is taken
    candidates = [_assess(config, shape, s, world_size, accumulation, hardware) for s in STRATEGIES.values()]
    own, notes = None, []
    if config.deepspeed is not None:
        own, notes = _checked(deepspeed_config.read(config.deepspeed), config.deepspeed, config, batch)
        strategy = _own_strategy(config.deepspeed, own)
        candidates.append(_assess(config, shape, strategy, world_size, accumulation, hardware, own))
    else:
        strategy, why = _pick(config, shape, candidates, world_size, hardware, can_build_ops)
        notes += why
    chosen = next(c for c in candidates if c.strategy == strategy)
    named = config.strategy != "auto" or own is not None
    if chosen.forbidden and (named or shape is None):
        raise PlanError(f"strategy {strategy.name} " + "; ".join(chosen.reasons))
    ds = own
    if own is None and strategy.deepspeed and not chosen.forbidden:
        ds, more = _checked(_shipped(strategy.name), f"{strategy.name}.json", config, batch)
        notes += more

    # -- whether it fits, and what would
    offers: tuple[Offer, ...] = ()
    short = chosen.reasons + _short_of_disk(chosen, hardware)
    if short and shape is not None:
        pinned = named or hardware.device == "cpu"  # CPU ranks rehearse one strategy
        names = [] if own is not None else [strategy.name] if pinned else list(STRATEGIES)
        offers = _offers(config, shape, names, world_size, accumulation, hardware)
        if named and chosen.reasons:
            offers = (*_another_strategy(config, hardware, launched_ranks), *offers)
        if not force:
            raise PlanError(refusal(config, chosen, short, candidates, offers, hardware, world_size))

    # -- what must be built for it
    ops = _ops_of(strategy, hardware, world_size)
    if ops and not (ops_module.available(ops) if can_build_ops is None else can_build_ops):
        notes.append(_without_compiler(config, strategy, ops, hardware, world_size, launched_ranks))
        accumulation, world_size = accumulation * world_size, 1
        strategy, ds, ops = STRATEGIES["single"], None, ()
        if forbidden := list(_forbidden(config, shape, strategy, 1, hardware)):
            raise PlanError(f"strategy single {'; '.join(forbidden)}")
        candidates = [_assess(config, shape, s, 1, accumulation, hardware) if s == strategy else c
                      for s, c in zip(STRATEGIES.values(), candidates, strict=False)]  # fmt: skip

    notes += _rounds(strategy, next(c for c in candidates if c.strategy == strategy))
    notes += _remarks(config, shape, strategy)
    if own is None and chosen.timing is not None and chosen.fits:
        notes += _better_batch(config, shape, chosen, world_size, accumulation, hardware)
    micro = config.train.micro_batch_size
    return Plan(
        strategy=strategy,
        world_size=world_size,
        device=hardware.device,
        micro_batch_size=micro,
        grad_accum_steps=accumulation,
        tokens_per_step=micro * accumulation * world_size * config.data.seq_len,
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

    def forbidden(name: str) -> bool:
        return next(c.forbidden for c in candidates if c.strategy.name == name)

    if hardware.device == "cpu":
        rehearsed = ("single",) if world_size == 1 else ("zero3", "zero2", "zero3_bf16", "ddp")
        name = next((n for n in rehearsed if not forbidden(n)), rehearsed[0])  # not everything goes with ZeRO
        return STRATEGIES[name], [f"strategy {name}: what {world_size} CPU rank{'s' * (world_size > 1)} can rehearse"]
    if shape is None:
        name = "zero2" if forbidden("zero3_offload") else "zero3_offload"
        return STRATEGIES[name], [f"strategy {name}: the size of {config.model.path} is not known before its download"]
    best = _fastest(candidates, world_size)
    if (
        best is not None
        and best.strategy.offload_optimizer
        and not (ops_module.available(["cpu_adam"]) if can_build_ops is None else can_build_ops)
    ):  # without a compiler there is no optimizer on the host
        best = _fastest([c for c in candidates if not c.strategy.offload_optimizer], world_size) or best
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


def _ops_of(strategy: Strategy, hardware: Hardware, world_size: int) -> tuple[str, ...]:
    ops = ["shm_comm"] if strategy.deepspeed and hardware.device == "cpu" and world_size > 1 else []
    return (*ops, "cpu_adam") if strategy.offload_optimizer else tuple(ops)


def _without_compiler(config: Config, strategy: Strategy, ops: tuple[str, ...], hardware: Hardware, world_size: int,
                      launched_ranks: int | None) -> str:  # fmt: skip
    """The note on falling back to one process.

    Raises:
        PlanError: with cards, or ranks that are there already, there is no falling back.
    """
    cure = "install one (Debian, Ubuntu: apt-get install g++ python3-dev)"
    if hardware.device == "cuda" or launched_ranks is not None:
        raise PlanError(
            f"strategy {strategy.name} needs DeepSpeed's {' and '.join(ops)} op, which is not built yet, and there is no "
            f"C++ compiler (with Python's headers) to build it; {cure}"
            + (", or use a strategy without offload" if strategy.offload_optimizer else "")
        )
    return (f"there is no C++ compiler (with Python's headers), which DeepSpeed needs on the CPU: falling back from {strategy.name} on "
            f"{world_size} ranks to one process with the same batch; {cure} to see {strategy.name}")  # fmt: skip


def _least_short(candidates: list[Candidate], world_size: int) -> Strategy:
    """When nothing fits: what nothing forbids, if there is any, and of that what is short of the least."""
    able = [c for c in candidates if _can_choose(c.strategy, world_size)]
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
            why = "this version plans it and does not run it yet" if not other.strategy.runs else (
                "it rounds updates to bf16, so it is only taken by name" if other.rounding != "none" else "")  # fmt: skip
            if why:
                yield f"{other.strategy.name} would be about {ratio:.1f}x as fast; {why}"


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


def _better_batch(config: Config, shape: ModelShape, chosen: Candidate, world_size: int, accumulation: int,
                  hardware: Hardware) -> Iterator[str]:  # fmt: skip
    """The same batch in larger micro-batches: what is gathered and launched for each of them is paid less often."""
    train = config.train
    allowed = list(STRATEGIES) if config.strategy == "auto" else [chosen.strategy.name]
    best = None
    micro, steps = train.micro_batch_size, accumulation
    while steps % 2 == 0:
        micro, steps = 2 * micro, steps // 2
        changed = dataclasses.replace(
            config,
            train=dataclasses.replace(train, micro_batch_size=micro, grad_accum_steps=steps, global_batch_size=None),
        )
        possible = [n for n in allowed if _states_fit(changed, shape, STRATEGIES[n], world_size, steps, hardware)]
        other = _fastest(
            [_assess(changed, shape, STRATEGIES[n], world_size, steps, hardware) for n in possible], world_size
        )
        if other is None or (other.rounding != "none" and chosen.rounding == "none"):
            break
        if other.timing and (best is None or other.timing.tokens_per_second > best[2].timing.tokens_per_second):
            best = micro, steps, other
    if best is not None and best[2].timing.tokens_per_second > 1.15 * chosen.timing.tokens_per_second:
        micro, steps, other = best
        words = f"train.micro_batch_size={micro}" + (
            "" if train.global_batch_size else f" train.grad_accum_steps={steps}"
        )
        yield (f"{words} is the same batch, about {other.timing.tokens_per_second / chosen.timing.tokens_per_second:.1f}x as fast "
               f"({other.strategy.name}, {figures(other)})")  # fmt: skip


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
    if config.method.kind == "qlora":
        yield ("the 4-bit base lies whole on every card" if shape is None or not shape.experts else
               "the 4-bit base lies whole on every card, and its routed experts stay in 16 bits: they are fused weights, which "
               "bitsandbytes does not quantise")  # fmt: skip
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
    rows = [(c.strategy.name, c.reasons) for c in candidates if _can_choose(c.strategy, world_size) and c.memory]
    rows = [(chosen.strategy.name, short)] if named else rows
    width = max(len(name) for name, _ in rows)
    lines = [f"{head} {what} on {where}, {host}."]
    lines += [f"  {name:{width}}  {'; '.join(reasons)}" for name, reasons in rows]
    return "\n".join([*lines, *offer_lines(offers), "  --force (force=True) starts all the same."])


def offer_lines(offers: tuple[Offer, ...]) -> list[str]:
    if not offers:
        return [
            "  No change of sequence length, micro-batch, precision or adapters fits: more or larger cards, or a smaller model."
        ]
    return ["  Nearest that fits:"] + [
        f"    {' '.join(o.overrides)}  ({o.candidate.strategy.name}, {figures(o.candidate)})"
        for o in offers
    ]


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
        "ops": list(plan.ops),
        "parameters": plan.shape.parameters if plan.shape else None,
        "hardware": plan.hardware.describe(),
        "candidates": [candidate_dict(c) for c in plan.candidates],
        "offers": [{"overrides": list(o.overrides), **candidate_dict(o.candidate)} for o in plan.offers],
        "notes": list(plan.notes),
    }


def candidate_dict(candidate: Candidate) -> dict:
    memory, timing = candidate.memory, candidate.timing
    return {
        "strategy": candidate.strategy.name,
        "fits": candidate.fits,
        "tight": candidate.tight,
        "runs": candidate.strategy.runs,
        "reasons": list(candidate.reasons),
        "memory": None if memory is None else {
            "gpu_bytes": memory.gpu_bytes, "tensor_bytes": memory.tensor_bytes, "gpu": dict(memory.gpu), "moment": memory.moment,
            "host_bytes": memory.host_bytes, "host": dict(memory.host), "disk_bytes": memory.disk_bytes, "disk": dict(memory.disk)},
        "timing": None if timing is None else {
            "estimate": True, "step_seconds": timing.step_seconds, "step_seconds_range": list(timing.step_seconds_range),
            "tokens_per_second": timing.tokens_per_second, "tokens_per_second_range": list(timing.tokens_per_second_range),
            "mfu": timing.mfu, "bottleneck": timing.bottleneck, "parts_seconds": dict(timing.parts)},
    }  # fmt: skip
