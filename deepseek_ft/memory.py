"""What a training step holds: per GPU moment by moment, on the host, on disk. Arithmetic only; every component named.

Activations are not a formula but a tape (`tape.py`). Walking it backwards gives the fullest moment, which depends on the model:
the loss of a large vocabulary, the feed-forward of a wide one, or the optimizer step. What DeepSpeed 0.19 allocates is read off
its code and named after its variables where a comment says so. `benchmarks/memory.py` holds all of it against torch's count of
real training steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .optimizers import masters_apart
from .shapes import EXPERTS, LayerKind, ModelShape
from .tape import NF4_BYTES, Op, is_in_four_bits, layer_tape
from .workload import FP32, Workload, adapter_parameters, is_frozen, trained_parameters, trained_sizes, untouched_layers

FP64 = 8
# A CUDA context with the libraries' kernels and NCCL's channels: a 4090 shows about 0.9 GiB before a model loads.
CONTEXT_BYTES = int(0.9 * 1024**3)
# What PyTorch's caching allocator holds beyond the live tensors: blocks cut to 2 MiB, and gaps. Assumed, not measured.
SLACK = 0.04


def process_bytes(device: str, precision: str) -> int:
    """A rank's Python and libraries, resident on the host: assumed with CUDA, measured without (docs/benchmarks.md).

    CPU ranks are forks and share some of it; those that another launcher starts take 0.1 to 0.2 GiB more. 16-bit products
    bring oneDNN's repacked weights and scratch along.
    """
    gib = 2.0 if device == "cuda" else 0.5 if precision == "fp32" else 0.8
    return int(gib * 1024**3)


LOSS_ELEMENTS = 2**25
"""Logits that the chunked loss holds at a time, in elements."""
SUB_GROUP = 1_000_000_000
"""DeepSpeed's default sub_group_size: how many elements ZeRO-3 updates at a time."""


@dataclass(frozen=True)
class Memory:
    """Bytes by component. `gpu` is one card (or one rank on the CPU) at its fullest moment; host and disk are totals."""

    gpu: Mapping[str, int]
    moment: str
    """What the fullest moment is."""
    moments: Mapping[str, int]
    """Tensors alive at each moment that could be the fullest, without context and slack."""
    host: Mapping[str, int]
    host_moment: str
    disk: Mapping[str, int]

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values())

    @property
    def tensor_bytes(self) -> int:
        """What a count of live tensors shows: the GPU figure without context and allocator slack."""
        return max(self.moments.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())


def _base_bytes(load: Workload) -> float:
    """The weights of the forward pass, whole."""
    shape = load.shape
    if load.adapter is None:
        return shape.parameters * (FP32 if load.autocast else load.element)
    frozen = shape.parameters * load.element
    if load.adapter.quantized:
        linear = sum(k.count * math.prod(s) for k in shape.kinds for n, s in k.weights.items() if is_in_four_bits(n, s))
        frozen -= linear * (load.element - NF4_BYTES)
    return frozen + adapter_parameters(shape, load.adapter) * load.trained_element


def _largest(shape: ModelShape) -> int:
    """Elements of the largest single parameter."""
    return max(shape.vocab_size * shape.hidden_size, *(math.prod(s) for k in shape.kinds for s in k.weights.values()))


def _resident(load: Workload) -> dict[str, float]:
    """What stays on the card from the first step to the last."""
    s, n, w, e = load.strategy, trained_parameters(load), load.world_size, load.element
    weights = _base_bytes(load)
    sharded_weights = s.stage == 3 and not (load.adapter and load.adapter.quantized)
    if sharded_weights:
        weights = 0 if s.offload_params else weights / w
    parts = {"weights": weights}
    if s.offload_optimizer:
        if s.stage == 2:  # temp_grad_buffer_for_gpu_offload
            parts["communication buffers"] = e * (_largest(load.shape) if load.adapter is None else 0)
        return parts
    shard = w if s.stage >= 1 else 1
    if s.deepspeed and not (s.stage == 3 and s.master_bytes == e and not s.offload_params):  # `optimizers.share_master_weights`
        parts["master weights"] = n * s.master_bytes / shard
    parts["optimizer states"] = n * load.moment_bytes / shard
    if s.stage == 3:  # grad_partitions_flat_buffer
        parts["gradients"] = n * e / w
    if load.strategy.name == "ddp" or (not s.deepspeed and s.many_ranks and not s.pipeline and w > 1):
        parts["communication buffers"] = n * (e if load.bf16_weights else FP32)  # DistributedDataParallel's buckets
    return parts


def _buffers(load: Workload, gradients_made: float, n: int) -> dict[str, float]:
    """Communication buffers once `gradients_made` elements of gradient have been made in this backward pass.

    ZeRO-1 and 2 allocate their buckets at the first gradient, and at the first full bucket the copy that flattens it
    for the all-reduce; after that the shard that collects the results. ZeRO-3's one bucket is always there.

    Args:
        n: trained parameters, which are not counted anew for each moment.
    """
    s, w, e = load.strategy, load.world_size, load.element
    if s.stage == 3:
        return {"communication buffers": e * load.zero("reduce_bucket_size", load.shape.hidden_size**2)}
    if s.stage == 0:
        return {}
    bucket = load.zero("reduce_bucket_size", 100_000_000)
    parts = {"communication buffers": 0.0, "gradients": 0.0}
    if load.grad_accum_steps > 1 and not s.offload_optimizer:  # ZeRO-1 reduces, and so shards, only the last micro-step
        parts["gradients"] = e * n / (w if s.stage == 2 else 1)
    if gradients_made > 0:
        parts["communication buffers"] += e * bucket * (2 if load.overlaps else 1)
    shard = 0 if s.offload_optimizer else n / w
    if gradients_made >= 2 * bucket:
        flat = bucket
    elif gradients_made >= bucket:  # the first copy is gone when the shard comes; the second is still short
        flat, shard = max((bucket, 0), (gradients_made - bucket, shard), key=sum)
    else:
        flat, shard = (n if gradients_made >= n else 0), 0
    parts["communication buffers"] += e * flat
    parts["gradients"] += e * shard
    return parts


def _gathered(load: Workload) -> tuple[float, dict[int, float]]:
    """ZeRO-3: elements of whole weights on the card at the loss, and in the backward pass of each layer.

    DeepSpeed keeps a module's weights when they are used again before `stage3_max_reuse_distance` other elements have
    been; so a model of under about half a billion parameters stays gathered from its forward pass on.
    """
    shape = load.shape
    reuse = load.zero("stage3_max_reuse_distance", 1_000_000_000)
    prefetch = load.zero("stage3_prefetch_bucket_size", int(0.9 * shape.hidden_size**2))
    sizes = [kind.parameters for kind in shape.kinds for _ in range(kind.count)]
    table = shape.vocab_size * shape.hidden_size
    between, kept = 2 * table, 0
    stays = {}
    for i in reversed(range(len(sizes))):
        stays[i] = sizes[i] if between < reuse else 0
        between += 2 * sizes[i]
        kept += stays[i]
    embedding = table if between < reuse and not shape.tied else 0
    at_loss = table + embedding + kept
    at_layer, below = {}, 0.0
    for i, size in enumerate(sizes):
        ahead = 0 if below or i == 0 else prefetch + max(math.prod(s) for k in shape.kinds for s in k.weights.values())
        experts = sum(
            math.prod(s) for k in shape.kinds for n, s in k.weights.items() if n in EXPERTS and k.parameters == size
        )
        copies = 0 if stays[i] else experts  # several parameters of one module are gathered flat, then copied apart
        at_layer[i] = size + below + embedding + (table if shape.tied else 0) + min(ahead, sum(sizes)) + copies
        below += stays[i]
    return at_loss, at_layer


def _loss_bytes(load: Workload, gradient: float) -> tuple[float, float, float]:
    """What the head's loss holds in its forward pass, in its backward pass, and beside the head's gradient at its end.

    Args:
        gradient: bytes of an element of the head's gradient; 0 where the head is not trained.
    """
    t, e, h, vocab = load.tokens, load.element, load.shape.hidden_size, load.shape.vocab_size
    cast = e if e < FP32 else 0
    of_head = gradient * vocab * h
    if load.loss == "naive":
        forward = t * vocab * (e + (FP32 if cast else 0) + FP32)  # logits, their fp32 copy, log-softmax
        return forward, t * vocab * 3 * FP32, e * t * vocab  # log-softmax and two gradients
    if load.loss == "liger":
        # Rows are cut so that their logits take the room of what enters the head, up to a power of two of rows
        # (liger_kernel/ops/fused_linear_cross_entropy.py); the head's gradient is summed in fp32, and cast at the end.
        rows = min(t, 2 ** math.ceil(math.log2(max(1.0, t / math.ceil(vocab / h)))))
        summed = FP32 * vocab * h if gradient else 0.0
        forward = e * t * h + summed + max(e * rows * vocab + e * rows * h, of_head if cast else 0.0)
        return forward, e * t * h + of_head, 0.0
    # First the denominator: a piece of logits, in 16 bits and in fp32, and a sixteenth of it once more. Then such a piece
    # and the gradients of the head and of what enters it, which stay until the backward pass.
    columns = min(vocab, max(256, LOSS_ELEMENTS // max(t, h)))
    piece = (FP32 + cast) * t * columns
    # A piece of the head is copied under autocast, and where rows of new tokens take the place of the head's own.
    tables = load.adapter.tables if load.adapter is not None else ()
    copied = e * h * columns if load.autocast or "lm_head" in tables or (load.shape.tied and tables) else 0
    forward = max(piece + max(FP32 * t * columns / 16, copied), piece + (FP32 + e) * t * h + copied + of_head)
    return forward, FP32 * t * h + of_head, 0.0


class _Step:
    """One optimizer step on one card: the moments that can be its fullest, each with everything that is alive then."""

    def __init__(self, load: Workload):
        shape, e, t = load.shape, load.element, load.tokens
        h = shape.hidden_size
        self.load, self.t = load, t
        self.trained = trained_parameters(load)
        self.resident = _resident(load)
        self.head = shape.vocab_size * h
        self.sizes = [kind.parameters for kind in shape.kinds for _ in range(kind.count)]
        self.trained_embedding, self.trained_sizes, _, own_head = trained_sizes(load)
        self.trained_head = self.trained_embedding if shape.tied else own_head
        if shape.tied:  # one table, whose gradient is whole at the end only
            self.trained_embedding = self.trained_head
        self.lowest = untouched_layers(load)  # nothing of them is kept
        self.bucket = load.zero("reduce_bucket_size", h * h if load.strategy.stage == 3 else 100_000_000)
        self.at_loss, self.at_layer = _gathered(load) if load.strategy.stage == 3 else (0.0, {})

        # Activations that wait for the backward pass; of a layer that is computed again, what enters it.
        self.stream = FP32 if load.autocast else e
        self.tapes = [(kind, layer_tape(load, kind)) for kind in shape.kinds]
        self.saved = [t * sum(op.saves for op in tape) for kind, tape in self.tapes for _ in range(kind.count)]
        self.entering = self.stream * h * t
        self.recomputed = load.recomputed
        self.saved = [each if i >= self.lowest else 0.0 for i, each in enumerate(self.saved)]
        waits = 0.0 if load.offload_activations and load.device == "cuda" else self.entering
        self.kept = [waits if again and i >= self.lowest else self.saved[i] for i, again in enumerate(self.recomputed)]
        self.rotary = t * (FP32 if shape.latent else 2 * e) * shape.rope_head_dim + 3 * 8 * t
        trains = load.adapter is None
        last_norm = t * (FP32 * h + FP32 + (self.stream + e) * h * trains)
        mask = t * load.attended * load.row_parts if load.isolated else 0  # as true and false, once for all layers
        # Every router's logits, or their gradient, from the forward pass to the backward pass of its layer.
        routers = [FP32 * shape.experts * t * (load.balance_loss and EXPERTS[0] in kind.weights)
                   for kind in shape.kinds for _ in range(kind.count)]  # fmt: skip
        self.kept = [kept + logits for kept, logits in zip(self.kept, routers, strict=True)]
        self.activations = sum(self.kept) + last_norm + self.rotary + mask

        # Plain PyTorch keeps whole gradients, ZeRO lets them go as they are sharded.
        self.gradient = load.trained_element
        self.stays = load.strategy.stage == 0
        self.earlier = self.gradient * self.trained if self.stays and load.grad_accum_steps > 1 else 0.0
        # Autocast's copies of the weights: cached until the forward pass ends, saved where a layer is not recomputed.
        self.cast = e if load.autocast else 0

    def moment(self, made: float, **more: float) -> dict[str, float]:
        """Everything alive once `made` elements of gradient have been made in this backward pass."""
        total = dict(self.resident)
        for parts in (_buffers(self.load, made, self.trained), {k.replace("_", " "): v for k, v in more.items()}):
            for name, value in parts.items():
                total[name] = total.get(name, 0) + value
        return total

    def in_flight(self, numel: float) -> float:
        """A gradient that has just been made. Plain PyTorch makes it in place, unless it is added or cast to another."""
        load = self.load
        if self.stays and load.grad_accum_steps == 1 and not load.autocast:
            return 0.0
        copied = (
            load.strategy.stage == 3 and numel > self.bucket and numel % load.world_size
        )  # padded, for the reduce-scatter
        return load.element * numel * (2 if copied else 1)

    def norm64(self) -> float:
        """DeepSpeed takes the norm of an offloaded gradient in double precision; the head's and the embedding's are large."""
        s, w = self.load.strategy, self.load.world_size
        if not s.offload_optimizer:
            return 0.0
        return FP64 * (self.head / w if s.stage == 3 else min(self.head, self.trained / w))

    def loss(self) -> Iterator[tuple[str, dict[str, float]]]:
        load, t, e = self.load, self.t, self.load.element
        h = load.shape.hidden_size
        trains_head = self.trained_head >= self.head  # not single rows of it
        forward, backward, left = _loss_bytes(load, self.gradient * trains_head)
        saved_casts = self.cast * (self.head + sum(n for n, again in zip(self.sizes, self.recomputed, strict=True) if not again))
        alive = {"activations": self.activations, "gathered_weights": e * self.at_loss}
        all_casts = self.cast * (self.head + sum(self.sizes))
        yield (
            "loss, forward",
            self.moment(0, logits_and_loss=forward, gradients=self.earlier, working_memory=all_casts, **alive),
        )
        yield (
            "loss, backward",
            self.moment(0, logits_and_loss=backward, gradients=self.earlier, working_memory=saved_casts, **alive),
        )
        if trains_head:
            grads = max(self.earlier, self.gradient * self.head if self.stays else 0.0)
            working = saved_casts + self.in_flight(self.head) + e * h * t
            yield (
                "gradient of the head",
                self.moment(0, logits_and_loss=left, gradients=grads, working_memory=working, **alive),
            )
            yield (
                "gradient of the head, reduced",
                self.moment(self.head, gradients=grads, working_memory=working + self.norm64(), **alive),
            )

    def layers(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Backward through the layers, last to first, operation by operation."""
        load, t = self.load, self.t
        for i, kind, tape in self._telling_layers():
            above = self.trained_head + sum(self.trained_sizes[i + 1 :])
            if i < self.lowest:
                continue
            again = self.recomputed[i]
            casts = self.cast * (sum(n for n, a in zip(self.sizes[: i + 1], self.recomputed, strict=False) if not a) + again * self.sizes[i])
            lower = sum(self.kept[:i])
            if again and self.stream < FP32:
                lower += self.entering  # an fp32 norm saves the checkpointed input itself
            left, made = self.saved[i], above
            for op in reversed(tape):
                if load.adapter is None:
                    names = (n for n in op.weights if not is_frozen(load.frozen, f"model.layers.{i}.{n}"))
                    numel = sum(math.prod(kind.weights[name]) for name in names)
                else:
                    numel = sum(load.adapter.of(n, kind.weights[n]) for n in op.weights)
                made += numel
                yield f"backward of layer {i}, {op.name}", self.moment(
                    made, activations=lower + left + self.rotary, working_memory=op.work * t + self.in_flight(numel) + casts,
                    gradients=max(self.earlier, self.gradient * made) if self.stays else 0.0,
                    gathered_weights=load.element * self.at_layer.get(i, 0),
                )  # fmt: skip
                left -= op.saves * t

    def _telling_layers(self) -> list[tuple[int, LayerKind, list[Op]]]:
        """(index, kind, tape) of the layers that can hold the fullest moment: the first and the last of each kind, for
        everything between them grows or falls steadily, and those at which that changes: what is trained begins or ends, ZeRO-1
        and 2 fill their first two buckets, ZeRO-3 keeps weights gathered."""
        each = [(kind, tape) for kind, tape in self.tapes for _ in range(kind.count)]
        ends, start = set(), 0
        period = self.load.checkpoint_every if self.load.checkpointing else 1
        for kind, _ in self.tapes:  # with some layers recomputed, a period of them at each end
            ends |= set(range(start, min(start + period, start + kind.count)))
            ends |= set(range(max(start, start + kind.count - period), start + kind.count))
            start += kind.count
        ends |= {j for i in range(1, len(each)) if self.trained_sizes[i] != self.trained_sizes[i - 1] for j in (i - 1, i)}
        ends.add(max(0, len(each) - 2))  # adapters make their first gradient, and the buckets, inside the last layer
        made = self.trained_head
        for i in reversed(range(len(each))):
            before, made = made, made + self.trained_sizes[i]
            if any(before < full <= made for full in (self.bucket, 2 * self.bucket)):
                ends |= set(range(max(0, i - period), i + 1))
        ends |= {j for i in self.at_layer if i and self.at_layer[i] != self.at_layer[i - 1] for j in (i - 1, i)}
        return [(i, *each[i]) for i in sorted(ends)]

    def embedding(self) -> Iterator[tuple[str, dict[str, float]]]:
        load, shape = self.load, self.load.shape
        if self.trained_embedding < self.head:  # single rows of it are next to nothing
            return
        sharded = load.strategy.stage == 3
        alive = {"activations": self.rotary, "gradients": self.gradient * self.trained if self.stays else 0.0,
                 "gathered_weights": load.element * self.head if sharded and not shape.tied else 0}  # fmt: skip
        flying = self.in_flight(self.head)
        both = load.element * self.head if shape.tied else 0  # gradients of a tied table, before they are added
        entering = load.element * shape.hidden_size * self.t
        yield (
            "gradient of the embedding",
            self.moment(max(0, self.trained - self.trained_embedding), working_memory=entering + flying + both, **alive),
        )
        # What went into a bucket is let go before the bucket is flattened; what is larger than one stays.
        rest = flying if sharded or self.head > self.bucket else 0.0
        yield (
            "gradient of the embedding, reduced",
            self.moment(self.trained, working_memory=self.norm64() + rest, **alive),
        )

    def update(self) -> Iterator[tuple[str, dict[str, float]]]:
        load, s, e = self.load, self.load.strategy, self.load.element
        if s.offload_optimizer:
            return  # on the host, when the card is empty of everything else
        n, w = self.trained, load.world_size
        shard = n / (w if s.stage >= 1 else 1)
        if s.stage == 3:
            shard = min(shard, load.zero("sub_group_size", SUB_GROUP) + _largest(load.shape) / w)
        # The shard's gradients are flattened into a copy, and that is cast to the master weights' type.
        copies = shard * (e + (s.master_bytes if s.master_bytes != e else 0)) if s.deepspeed else 0.0
        left = e * n / w if s.stage in (1, 2) else self.gradient * n if not s.deepspeed else 0.0
        temporaries = (
            0.0 if load.fused_optimizer else 2 * s.master_bytes * (_largest(load.shape) if s.stage == 0 else shard)
        )
        optimizer = load.optimizer
        each = optimizer.temporary_bytes if load.device == "cuda" or optimizer.temporary_bytes_cpu is None else optimizer.temporary_bytes_cpu
        temporaries += each * (_largest(load.shape) if s.stage == 0 else shard)
        total = dict(self.resident)
        total["gradients"] = total.get("gradients", 0) + left + copies
        if s.stage == 3:  # its bucket is always there
            total["communication buffers"] = e * self.bucket
        yield "optimizer step", total | {"working memory": temporaries}


def _moments(load: Workload) -> Iterator[tuple[str, dict[str, float]]]:
    if load.strategy.staged:
        yield from _pipeline_moments(load)
        return
    step = _Step(load)
    for part in (step.loss, step.layers, step.embedding, step.update):
        yield from part()


def _stage_parameters(load: Workload) -> list[int]:
    """Of each stage of a pipeline: its layers', the table's of the first, norm's and head's of the last."""
    shape = load.shape
    table = shape.vocab_size * shape.hidden_size
    each = [kind.parameters for kind in shape.kinds for _ in range(kind.count)]
    found, start = [], 0
    for size in load.stage_sizes:
        found.append(sum(each[start : start + size]))
        start += size
    found[0] += table
    if load.strategy.split and shape.tied:  # one weight lies on one card, and all that uses it
        found[0] += shape.hidden_size
    else:
        found[-1] += shape.hidden_size + (table if len(found) > 1 or not shape.tied else 0)
    return found


def _states(load: Workload, parameters: int) -> dict[str, float]:
    """Of a stage: fp32 weights that are cast on the way, or bf16 weights that are their own master; or its share of base and adapter."""
    share = parameters / sum(_stage_parameters(load))
    trained = trained_parameters(load) * share if load.adapter is not None or load.frozen else parameters
    weights = (FP32 if load.autocast else load.element) * parameters if load.adapter is None else _base_bytes(load) * share
    if load.strategy.offload_optimizer:  # gradients are added up in fp32
        return {"weights": weights, "gradients": FP32 * trained}
    return {"weights": weights, "gradients": load.trained_element * trained, "optimizer states": load.moment_bytes * trained}


def _pipeline_moments(load: Workload) -> Iterator[tuple[str, dict[str, float]]]:
    """Each stage of a pipeline at its fullest: 1F1B keeps as many micro-batches in flight as stages follow, and its own; a card that
    works while the others wait has one.
    """
    shape, e, t = load.shape, load.element, load.tokens
    stream = FP32 if load.autocast else e
    kinds = [kind for kind in shape.kinds for _ in range(kind.count)]
    sizes = load.stage_sizes
    start = 0
    for stage, (size, parameters) in enumerate(zip(sizes, _stage_parameters(load), strict=True)):
        mine, start = kinds[start : start + size], start + size
        last = stage == len(sizes) - 1
        tapes = [layer_tape(load, kind) for kind in {id(k): k for k in mine}.values()]
        flying = 1 if load.strategy.split else min(len(sizes) - stage, load.grad_accum_steps * len(sizes))
        working = max(sum(op.saves for op in tape) + max(op.work for op in tape) for tape in tapes) if load.checkpointing else max(
            op.work for tape in tapes for op in tape
        )  # fmt: skip
        # What enters a layer is kept, that of the first in its receive buffer.
        each = stream * shape.hidden_size * size if load.checkpointing else sum(sum(op.saves for op in layer_tape(load, k)) for k in mine)
        has_head = stage == 0 if load.strategy.split and shape.tied else last
        loss = max(_loss_bytes(load, 0.0)[:2]) if has_head else 0.0  # the head's gradient is counted with the others
        # What leaves waits for its gradient; that comes into one buffer and another leaves.
        exchanged = stream * t * shape.hidden_size * ((not last) * (flying + 1) + (stage > 0))
        casts = e * parameters if load.autocast else 0.0
        yield f"stage {stage} of {len(sizes)} ({size} layers)", _states(load, parameters) | {
            "activations": flying * t * each, "working memory": t * working + casts, "logits and loss": loss,
            "communication buffers": exchanged,
        }  # fmt: skip


def resident_bytes(load: Workload) -> tuple[float, float]:
    """What stays on a card from the first step to the last, and on the host: a lower bound that costs nothing."""
    if load.strategy.staged:
        return sum(_states(load, max(_stage_parameters(load))).values()), load.ranks_here * sum(_offloaded(load).values())
    load = _on_one_card(load)
    return sum(_resident(load).values()), load.ranks_here * sum(_offloaded(load).values())


def _power_of_two(size: float) -> float:
    """PyTorch's allocator of pinned memory rounds every block up to a power of two (c10 CachingHostAllocator)."""
    return 2.0 ** math.ceil(math.log2(size)) if size >= 1 else 0.0


def _waiting(load: Workload) -> dict[str, float]:
    """What enters the recomputed layers, pinned, where it waits on the host."""
    if not load.offload_activations or load.device != "cuda":
        return {}
    entering = (FP32 if load.autocast else load.element) * load.shape.hidden_size * load.tokens
    return {"activations": _power_of_two(entering) * sum(load.recomputed[untouched_layers(load) :])}


def _offloaded(load: Workload) -> dict[str, float]:
    """What one rank keeps on the host, and what pinning rounds it up by."""
    s, n, w, e = load.strategy, trained_parameters(load), load.world_size, load.element
    waiting = _waiting(load)
    if not s.offload_optimizer and not s.offload_params:
        return waiting
    zero = (load.deepspeed or {}).get("zero_optimization") or {}

    def pinned(section: str) -> bool:
        return load.device == "cuda" and bool((zero.get(section) or {}).get("pin_memory", True))

    shard = n / w
    if s.pipeline:  # and one gradient at a time on its way
        return {"optimizer states": load.moment_bytes * shard, "master weights": s.master_bytes * shard,
                "copy buffers": FP32 * _largest(load.shape)}  # fmt: skip
    if s.nvme:  # four pinned buffers of a sub-group (buffer_count's default), and the gradients
        group = min(shard, load.zero("sub_group_size", SUB_GROUP))
        return waiting | {
            "NVMe swap buffers": 4 * group * FP32,
            "gradients": (e + s.master_bytes) * shard,
        }
    states: dict[str, float] = {"optimizer states": load.moment_bytes * shard, "master weights": s.master_bytes * shard}
    blocks: list[float] = []  # pinned ones
    if s.stage == 2:
        states["gradients"] = s.master_bytes * shard  # single_partition_of_fp32_groups[i].grad
        states["copy buffers"] = e * shard + e * _largest(load.shape)  # param_buffer_of_bit16..., temp_grad_buffer_...
        blocks = [s.master_bytes * shard, s.master_bytes * shard, e * shard, e * _largest(load.shape)]
        if load.grad_accum_steps > 1:  # accumulated_grads_in_cpu, one block per parameter of the shard
            states["gradients"] += e * shard
            matrices = [math.prod(x) for k in load.shape.kinds for x in k.weights.values() for _ in range(k.count)]
            table = load.shape.vocab_size * load.shape.hidden_size
            waste = (
                sum(_power_of_two(e * m) - e * m for m in [*matrices, table, *([] if load.shape.tied else [table])]) / w
            )
            states["pinned-memory rounding"] = waste if pinned("offload_optimizer") else 0.0
    else:
        states["gradients"] = (e + s.master_bytes) * shard  # grad_partitions_flat_buffer, and those of the update
        group = min(shard, load.zero("sub_group_size", SUB_GROUP))
        blocks = [e * shard] + [s.master_bytes * group] * int(shard // max(1, group))
    rounding = sum(_power_of_two(b) - b for b in blocks) if pinned("offload_optimizer") else 0.0
    if s.offload_params:
        states["weights"] = e * load.shape.parameters / w
        rounding += _power_of_two(states["weights"]) - states["weights"] if pinned("offload_param") else 0.0
    states["pinned-memory rounding"] = states.get("pinned-memory rounding", 0.0) + rounding
    return states | waiting


def _host(load: Workload, gpu_tensors: int) -> tuple[str, dict[str, int]]:
    """Host memory of all ranks together, at the fuller of two moments: loading the weights, and training."""
    w = load.ranks_here
    processes = {"processes": w * process_bytes(load.device, load.precision)}
    # Every rank reads the whole model, but under ZeRO-3, where it keeps its shard and files are mapped, not read.
    whole = load.shape.parameters * (FP32 if load.autocast else load.element)
    loading = {"loading the weights": whole * (1 if load.strategy.stage == 3 or load.strategy.pipeline else w)}
    training = {k: v * w for k, v in _offloaded(load).items() if v}
    if load.device == "cpu":  # the ranks' own memory is the host's
        training["tensors of the ranks"] = training.get("tensors of the ranks", 0) + w * gpu_tensors
        loading = {k: v + (0 if load.strategy.stage < 3 else whole) for k, v in loading.items()}
    name, parts = max(("loading", loading), ("training", training), key=lambda pair: sum(pair[1].values()))
    return name, {k: int(v) for k, v in (processes | parts).items()}


def checkpoint_bytes(load: Workload) -> int:
    """One checkpoint to resume from: weights, master weights and moments; ZeRO-1 and 2 write the weights twice."""
    s, n = load.strategy, trained_parameters(load)
    weights = (n if load.adapter is not None else load.shape.parameters) * load.trained_element
    copies = 2 if s.deepspeed and s.stage < 3 else 1
    return int(weights * copies + n * (load.moment_bytes + (s.master_bytes if masters_apart(s) else 0)))


def export_bytes(load: Workload) -> int:
    """The model folder at the end, in the type that it was trained in: every weight, or the adapter's."""
    return int((load.shape.parameters if load.adapter is None else trained_parameters(load)) * load.trained_element)


def _on_one_card(load: Workload) -> Workload:
    """Tensor and sequence parallelism as the workload of one card that they amount to."""
    s, w = load.strategy, load.world_size
    plain = dataclasses.replace(s, deepspeed=True, tensor=False, sequence=False)
    if s.tensor:
        return dataclasses.replace(
            load, shape=load.shape.part(w), strategy=plain, world_size=1, ranks_per_host=load.ranks_here
        )
    if s.sequence:
        return dataclasses.replace(
            load, strategy=dataclasses.replace(plain, stage=3), seq_len=math.ceil(load.seq_len / w), row_parts=w,
        )
    return load


def estimate(load: Workload, checkpoints: int = 0) -> Memory:
    """Memory of a training step, and disk of the run.

    Args:
        checkpoints: how many lie on the disk at once: the limit and one more, for the oldest goes when the newest is
            written.
    """
    load = _on_one_card(load)
    moments: dict[str, int] = {}
    fullest: tuple[int, str, dict[str, float]] = (-1, "", {})
    for name, parts in _moments(load):
        total = int(sum(parts.values()))
        moments[name] = max(total, moments.get(name, 0))
        if total > fullest[0]:
            fullest = (total, name, parts)
    gpu = {name: int(value) for name, value in fullest[2].items() if value >= 1}
    host_moment, host = _host(load, fullest[0])
    if load.device == "cuda":
        gpu["CUDA context and NCCL"] = CONTEXT_BYTES
        gpu["allocator slack"] = int(SLACK * fullest[0])
    disk = {"model folder": export_bytes(load)}
    if load.strategy.nvme and not load.states_elsewhere:  # master weights, gradients and moments
        disk["offloaded states"] = int(trained_parameters(load) * (2 * load.strategy.master_bytes + load.moment_bytes))
    if checkpoints:
        disk[f"{checkpoints} checkpoints"] = checkpoints * checkpoint_bytes(load)
    return Memory(gpu, fullest[1], moments, host, host_moment, disk)
