"""What a step is asked to do, in numbers: model, strategy, batch, and which weights are trained. Nothing here is counted yet.

First the numbers, then what is trained by them, then how a recipe comes to them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from .config import TRAINED_WHOLE, Config, ExpertsConfig
from .errors import ConfigError, PlanError, listing
from .hardware import Hardware
from .optimizers import OPTIMIZERS, Optimizer, keeps_bf16_weights, masters_apart, resolve, states_bytes
from .shapes import EXPERTS, ModelShape
from .strategies import Strategy

FP32 = 4
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LARGE_VOCABULARY = 32_000
"""From so many ids on the loss is chunked, unless the recipe says otherwise."""


CPU_RANKS = 3  # without a GPU: the three-card run in miniature


@dataclass(frozen=True)
class Adapter:
    """LoRA (arXiv:2106.09685): which linear layers get a pair of narrow ones, how narrow, on which base; and what is trained
    beside them. rsLoRA differs in a factor only."""

    rank: int
    targets: tuple[str, ...]
    """Ends of the adapted modules' names, such as `q_proj`."""
    quantized: bool = False
    """The base in 4 bits (QLoRA, arXiv:2305.14314): nf4 with double quantisation, whole on every card."""
    dora: bool = False
    """The norm of each row of the adapted weights is trained too (DoRA, arXiv:2402.09353 §4)."""
    experts: bool = False
    """Every routed expert gets a pair for each of its two fused weights."""
    whole: tuple[str, ...] = ()
    """embed_tokens, lm_head: trained as a copy beside the frozen one."""
    tokens: int = 0
    """New tokens, of which only their own rows are trained ..."""
    tables: tuple[str, ...] = ()
    """... in these: embed_tokens, lm_head; a tied head is counted as the embedding."""

    def adapts(self, weight: str) -> bool:
        return weight.endswith(".weight") and weight.removesuffix(".weight").rsplit(".", 1)[-1] in self.targets

    def of(self, name: str, shape: tuple[int, ...]) -> int:
        """Trained numbers beside one weight of a layer: rank x (in + out), and a norm for each row of a DoRA."""
        if self.experts and name in EXPERTS:
            experts, out, into = shape
            return self.rank * experts * (into + out)
        if len(shape) != 2 or not self.adapts(name):
            return 0
        return self.rank * sum(shape) + (shape[0] if self.dora else 0)


# What DeepSpeed 0.19 takes for a key that a file leaves out (deepspeed/runtime/zero/config.py).
_DEEPSPEED_DEFAULTS = {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000,
                       "stage3_max_reuse_distance": 1_000_000_000, "sub_group_size": 1_000_000_000}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Everything that decides what a step holds."""

    shape: ModelShape
    strategy: Strategy
    world_size: int
    micro_batch_size: int
    seq_len: int
    grad_accum_steps: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty: one stage a rank."""
    precision: str = "bf16"
    checkpointing: bool = True
    loss: str = "naive"
    """naive | chunked (`losses.head_loss`, which holds `LOSS_ELEMENTS` logits at a time) | liger."""
    checkpoint_every: int = 1
    """Of the layers, 0, n, 2n, ... are computed again."""
    offload_activations: bool = False
    """What enters those waits on the host."""
    tiled_mlp: int = 1
    """Pieces of the sequence in which a dense feed-forward is computed."""
    adapter: Adapter | None = None
    balance_loss: bool = False
    """Of a mixture of experts: the logits of every router wait for it."""
    frozen: tuple[str, ...] = ()
    """Patterns of the weights that a full fine-tune leaves as they are (`matches`)."""
    isolated: bool = False
    """Documents of a block do not see each other, by a mask: every attention but flash's needs one."""
    device: str = "cuda"
    ranks_per_host: int | None = None
    """None: all on one host."""
    deepspeed: Mapping | None = None
    """The completed DeepSpeed config, for bucket sizes; None takes the shipped file's."""
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    optimizer_rank: int = 128
    """Of those that project gradients to a low rank."""
    row_parts: int = 1
    """Cards that each hold `seq_len` tokens of a row; attention sees all of it."""
    states_elsewhere: bool = False
    """What is offloaded to a disk does not lie beside the run."""
    fused_optimizer: bool = True
    """Torch's fused AdamW has no temporaries; the other kind has two of the size of what it updates."""

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def attended(self) -> int:
        """Tokens of a row that attention sees."""
        return self.seq_len * self.row_parts

    @property
    def element(self) -> int:
        """Bytes of a weight and an activation in the forward pass."""
        return ELEMENT_BYTES[self.precision]

    @property
    def autocast(self) -> bool:
        """Plain PyTorch keeps fp32 weights and casts them on the way, unless the optimizer writes bf16 ones; DeepSpeed casts the model."""
        return not masters_apart(self.strategy) and self.element < FP32 and self.adapter is None and not self.bf16_weights

    @property
    def bf16_weights(self) -> bool:
        """Plain PyTorch with bf16 weights and no others."""
        return keeps_bf16_weights(self.optimizer, self.strategy)

    @property
    def moment_bytes(self) -> float:
        """Bytes per trained parameter of the optimizer's states."""
        element = 2 if self.bf16_weights else self.strategy.moment_bytes // 2
        if self.adapter is not None or not self.shape.kinds:
            n = 2**20  # so narrow matrices that every choice keeps about as much as for a vector
            return self.optimizer.states((n,), False, element, self.optimizer_rank) / n
        table = (self.shape.vocab_size, self.shape.hidden_size)
        total = states_bytes(self.optimizer, {"embedding": (table, 1 if self.shape.tied else 2), "norm": ((table[1],), 1)},
                             element, self.optimizer_rank)  # fmt: skip
        for kind in self.shape.kinds:
            weights = {name: (shape, kind.count) for name, shape in kind.weights.items()}
            total += states_bytes(self.optimizer, weights, element, self.optimizer_rank)
        return total / self.shape.parameters

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each stage of a pipeline."""
        return self.stages or tuple(self.shape.stages(self.world_size, self.seq_len))

    @property
    def cards(self) -> int:
        """That take part in it."""
        return len(self.stage_sizes) if self.strategy.split else self.world_size

    @property
    def recomputed(self) -> list[bool]:
        """Whether each layer, in order, is computed again in the backward pass."""
        return [self.checkpointing and i % self.checkpoint_every == 0 for i in range(self.shape.layers)]

    @property
    def trained_element(self) -> int:
        """Bytes of a trained weight and its gradient: plain PyTorch keeps what it updates in fp32, DeepSpeed has masters for it."""
        return self.element if masters_apart(self.strategy) or self.bf16_weights else FP32

    @property
    def flash(self) -> bool:
        """Whether attention keeps no (heads, T, T) matrix. On the CPU, torch's kernel wants equal head widths."""
        return self.device == "cuda" or self.shape.qk_head_dim == self.shape.v_head_dim

    @property
    def mask(self) -> int:
        """Bytes per token of the mask as numbers, which each layer's attention makes of it for itself and saves."""
        return self.element * self.attended * self.row_parts if self.isolated and self.flash else 0  # a card has all of it

    def zero(self, key: str, default: int) -> int:
        """A number of the zero_optimization section; "auto" is what Trainer fills in from the hidden size h.

        Args:
            default: the shipped files' value, for when there is no file; what a file leaves out is DeepSpeed's own.
        """
        h = self.shape.hidden_size
        auto = {
            "reduce_bucket_size": h * h,
            "stage3_prefetch_bucket_size": int(0.9 * h * h),
            "stage3_param_persistence_threshold": 10 * h,
        }
        if self.deepspeed is not None:
            default = _DEEPSPEED_DEFAULTS.get(key, default)
        value = ((self.deepspeed or {}).get("zero_optimization") or {}).get(key, default)
        return auto[key] if value == "auto" else int(value)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced while others are made, which takes a second bucket; DeepSpeed's own default is stage 3 only."""
        zero = (self.deepspeed or {}).get("zero_optimization") or {}
        return bool(zero.get("overlap_comm", self.deepspeed is None or self.strategy.stage == 3))

    @property
    def all_reduces(self) -> bool:
        """Of ZeRO-1 and 2: whether buckets are all-reduced, as is DeepSpeed's default, and not reduced to the ranks that keep them."""
        zero = (self.deepspeed or {}).get("zero_optimization") or {}
        return bool(zero.get("use_multi_rank_bucket_allreduce", self.deepspeed is not None))

    @property
    def ranks_here(self) -> int:
        """Of all ranks, those on this host."""
        return self.ranks_per_host or self.world_size


# ---------------------------------------------------------------------------------------------- what is trained


def adapter_parameters(shape: ModelShape, adapter: Adapter) -> int:
    """Trained numbers of an adapter, and of what is trained beside it."""
    layers = sum(kind.count * adapter.of(name, weight) for kind in shape.kinds for name, weight in kind.weights.items())
    return layers + (len(adapter.whole) * shape.vocab_size + len(adapter.tables) * adapter.tokens) * shape.hidden_size


def adapted_modules(shape: ModelShape, adapter: Adapter) -> dict[str, int]:
    """How many modules of each kind get an adapter, or are trained whole."""
    counts: dict[str, int] = {}
    for kind in shape.kinds:
        for name, weight in kind.weights.items():
            if adapter.of(name, weight):
                end = name.removesuffix(".weight").rsplit(".", 1)[-1]
                end = f"experts.{end}" if name in EXPERTS else end
                counts[end] = counts.get(end, 0) + kind.count
    return counts | dict.fromkeys((*adapter.whole, *adapter.tables), 1)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of `method.freeze` means a weight: its parts stand, in a row, among those of the weight's name.

    A part is a word with `*` and `?`, or a range of layers such as 0-11, both ends included.
    """

    def same(part: str, word: str) -> bool:
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            return word.isdecimal() and int(first) <= int(word) <= int(last)
        return fnmatch.fnmatchcase(word, part)

    parts, words = pattern.split("."), name.split(".")
    starts = range(len(words) - len(parts) + 1)
    return any(all(map(same, parts, words[start:])) for start in starts)


@lru_cache(maxsize=256)
def is_frozen(patterns: tuple[str, ...], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def trained_sizes(load: Workload) -> tuple[int, list[int], int, int]:
    """Trained numbers of the embedding, of each layer, and of last norm and head; a tied head is counted as the embedding."""
    shape, adapter = load.shape, load.adapter
    table = shape.vocab_size * shape.hidden_size
    if adapter is not None:
        layers = [size for k in shape.kinds for size in [sum(adapter.of(n, s) for n, s in k.weights.items())] * k.count]
        rows = adapter.tokens * shape.hidden_size
        embedding, head = (table * (n in adapter.whole) + rows * (n in adapter.tables) for n in ("embed_tokens", "lm_head"))
        return embedding, layers, 0, head

    def trained(name: str) -> bool:
        return not is_frozen(load.frozen, name)

    layers: list[int] = []
    for kind in shape.kinds:
        if not load.frozen:
            layers += [kind.parameters] * kind.count
            continue
        for i in range(len(layers), len(layers) + kind.count):
            layers.append(sum(math.prod(s) for n, s in kind.weights.items() if trained(f"model.layers.{i}.{n}")))
    return (table * trained("model.embed_tokens.weight"), layers, shape.hidden_size * trained("model.norm.weight"),
            0 if shape.tied else table * trained("lm_head.weight"))  # fmt: skip


def untouched_layers(load: Workload) -> int:
    """How many layers lie below the first trained weight: no backward pass comes there."""
    embedding, layers, _, _ = trained_sizes(load)
    return 0 if embedding else next((i for i, size in enumerate(layers) if size), len(layers))


def trained_parameters(load: Workload) -> int:
    if load.adapter is not None:
        return adapter_parameters(load.shape, load.adapter)
    if not load.frozen:
        return load.shape.parameters
    embedding, layers, norm, head = trained_sizes(load)
    return embedding + sum(layers) + norm + head


# ------------------------------------------------------------------------------------------------ from a recipe


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


def cards_of(config: Config, strategy: Strategy, world_size: int, hardware: Hardware) -> int:
    """How many cards take part: one a rank, but under `layer_split`, whose process has all of them."""
    if not strategy.split:
        return world_size if strategy.many_ranks or config.strategy == strategy.name else 1
    if config.stages is not None:
        return len(config.stages)
    return world_size if config.strategy != strategy.name else config.ranks or len(hardware.gpus) or CPU_RANKS


def splits_of(config: Config, shape: ModelShape, strategy: Strategy, world_size: int) -> list[tuple[int, ...]]:
    """Layers of each stage of a pipeline: the few best ways to cut it, the fastest first; one, without stages, of other strategies."""
    if not strategy.staged:
        return [()]
    if config.stages is not None:
        return [tuple(config.stages)]
    return [tuple(sizes) for sizes in shape.splits(world_size, config.data.seq_len)[:6]]


def loss_of(config: Config, shape: ModelShape | None) -> str:
    if config.train.loss == "auto":
        return "chunked" if shape is not None and shape.vocab_size >= LARGE_VOCABULARY else "naive"
    return config.train.loss


def accumulation_of(config: Config, world_size: int) -> int:
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


def workload_of(config: Config, shape: ModelShape, strategy: Strategy, world_size: int, accumulation: int, hardware: Hardware,
              deepspeed: Mapping | None, stages: tuple[int, ...] = ()) -> Workload:  # fmt: skip
    return Workload(
        shape=shape,
        strategy=strategy,
        world_size=world_size,
        micro_batch_size=config.train.micro_batch_size,
        seq_len=config.data.seq_len,
        grad_accum_steps=accumulation,
        stages=stages,
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
        states_elsewhere=config.offload_dir is not None,
    )
