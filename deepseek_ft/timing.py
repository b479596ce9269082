"""How long a step takes: a roofline with every constant named, sourced, and replaceable by a measured one.

The answer is an estimate and says so: it has a range, from the spread of the constants that were not measured, and
names what limits it. Fitted on published rows of RTX 4090 cards (tests/test_timing.py holds the six within 10 %), so
those rows are no independent proof.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError
from .hardware import Hardware
from .shapes import EXPERTS
from .tape import layer_tape
from .workload import Workload, trained_parameters, untouched_layers

# ---------------------------------------------------------------------------------------------- the constants


@dataclass(frozen=True)
class Constant:
    value: float
    low: float
    """Slower end of what is likely; `high` the faster one."""
    high: float
    source: str


CONSTANTS: dict[str, Constant] = {
    "compute_efficiency": Constant(
        0.92, 0.75, 1.0, "share of the peak that matrix products reach: fitted on LLaMA-Factory's published 4090 rows (llmq, "
        "benchmarks/4090x1.md and 4090x4.md); 159 to 167 TFLOPS have been measured for large ones alone"),
    "collective_bytes_per_second": Constant(
        5.2e9, 3.5e9, 12e9, "per card and direction, without peer-to-peer and not hidden: fitted on the same rows; NCCL has "
        "been seen at up to 12 GB/s between two 4090s"),
    "pcie_bytes_per_second": Constant(
        25e9, 20e9, 26e9, "pinned copies of one card on PCIe 4.0 x16: seen on eight 4090s (nvbandwidth, issue 15)"),
    "pageable_copy_bytes_per_second": Constant(8e9, 4e9, 12e9, "copies from memory that is not pinned: assumed"),
    "dram_bytes_per_second": Constant(
        60e9, 27e9, 250e9, "host memory, two channels of DDR5: assumed; a desktop's triad was seen at 27 GB/s, sixteen "
        "channels of DDR4-3200 reach about 250"),
    "cpu_adam_core_seconds_per_parameter": Constant(
        2.16e-9, 4e-9, 0.6e-9, "DeepSpeedCPUAdam, one core: fitted; 1.17e-9 was measured on a server core"),
    "fp16_scan_core_seconds_per_parameter": Constant(
        5.67e-9, 8e-9, 2e-9, "search for inf and nan in offloaded fp16 gradients, one core: measured"),
    "launch_seconds": Constant(5e-6, 10e-6, 3e-6, "host time of one kernel: assumed; it shows at small micro-batches"),
    "disk_read_bytes_per_second": Constant(3e9, 0.5e9, 6e9, "one NVMe drive, for all ranks together: assumed"),
    "disk_write_bytes_per_second": Constant(1e9, 0.2e9, 3e9, "one NVMe drive: assumed"),
}  # fmt: skip
KERNELS_PER_LAYER = 45  # a forward pass of a llama layer in eager mode, counted in a trace; latent attention has more
# Adam reads and writes master weights and moments and reads gradients; caches read what they overwrite, too. Fitted.
WRITE_ALLOCATE = 46 / 30


def check_constants(given: Mapping[str, float]) -> dict[str, float]:
    """Constants by name, as `--constant name=value` gives them.

    Raises:
        ConfigError: there is no such constant, or it is not above 0.
    """
    for name, value in given.items():
        if name not in CONSTANTS:
            raise ConfigError(f"--constant: there is no {name!r}; known: {', '.join(CONSTANTS)}")
        usual = CONSTANTS[name].value
        if not 1e-6 * usual <= value <= (1 if name == "compute_efficiency" else 1e6 * usual):
            raise ConfigError(f"--constant: {name} must be above 0 and of the order of {usual:g}, got {value:g}")
    return dict(given)


# ------------------------------------------------------------------------------------------------- the answer

LIMITS = {
    "GPU math": "the matrix products",
    "GPU memory": "reading the weights from GPU memory",
    "kernel launches": "launching kernels: a larger micro-batch would cost nothing",
    "collectives": "gradients and weights between the cards, over PCIe",
    "copies": "copies between card and host",
    "CPU optimizer": "the optimizer on the host's cores",
    "host memory": "the optimizer, reading and writing host memory",
    "disk": "the optimizer's states, read from the disk and written back in every step",
    "pipeline bubble": "stages that wait for each other: more micro-batches per step would help",
}


@dataclass(frozen=True)
class Timing:
    step_seconds: float
    """Estimated; of one optimizer step."""
    step_seconds_range: tuple[float, float]
    """(fastest, slowest) by the spread of the constants that were not measured."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs of the step, without recomputation, against the cards' peak."""
    parts: Mapping[str, float]
    """Seconds of a step by what takes them; they sum to `step_seconds`."""

    @property
    def bottleneck(self) -> str:
        """A key of `LIMITS`."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        tokens = self.tokens_per_second * self.step_seconds
        return tokens / self.step_seconds_range[1], tokens / self.step_seconds_range[0]


def _values(hardware: Hardware, world_size: int, end: str | None) -> dict[str, float]:
    """Each constant: measured, else assumed (`end` "low" or "high": at that end of its spread)."""
    values = {}
    for name, constant in CONSTANTS.items():
        if name in hardware.measured:
            values[name] = hardware.measured[name]
        else:
            values[name] = getattr(constant, end) if end else constant.value
    links = [g.pcie_bytes_per_second for g in hardware.gpus[:world_size] if g.pcie_bytes_per_second]
    if links and "pcie_bytes_per_second" not in hardware.measured:
        values["pcie_bytes_per_second"] = min(links) * {None: 1.0, "low": 0.8, "high": 1.05}[end]
    if "collective_bytes_per_second" not in hardware.measured:
        nvlink = min((g.model.nvlink_bytes_per_second for g in hardware.gpus[:world_size] if g.model), default=0.0)
        through_host = min(
            values["collective_bytes_per_second"], 0.6 * values["pcie_bytes_per_second"]
        )  # the slowest link
        values["collective_bytes_per_second"] = nvlink * {None: 0.7, "low": 0.4, "high": 0.85}[end] or through_host
    return values


def _trained_share(load: Workload) -> float:
    """Of the weights, those whose gradients are computed; an adapter's are next to nothing."""
    return trained_parameters(load) / load.shape.parameters if load.adapter is None else 0.0


def _untouched_share(load: Workload) -> float:
    """Of the layers, those that no gradient passes through."""
    return untouched_layers(load) / max(1, load.shape.layers)


def _step_parts(load: Workload, hardware: Hardware, c: Mapping[str, float]) -> dict[str, float]:
    if load.strategy.shared:
        return _one_batch_parts(load, hardware, c)
    shape, s, w, e, t = load.shape, load.strategy, load.world_size, load.element, load.tokens
    cards = [g.model for g in hardware.gpus[: load.cards]]
    peak = min(m.fp32_flops if load.precision == "fp32" else m.tensor_flops for m in cards)
    bandwidth = min(m.memory_bytes_per_second for m in cards)
    n, trained = shape.parameters, trained_parameters(load)
    steps = load.grad_accum_steps
    untouched = untouched_layers(load)
    again = sum(load.recomputed[untouched:]) / max(1, shape.layers - untouched)  # of those that a gradient passes through
    below = _untouched_share(load)
    passes = 1 + (1 - below) * (2 + again)
    share = _trained_share(load)
    flops = sum(part * shape.flops_per_token(load.attended, bool(k), share, below) for k, part in enumerate((1 - again, again)))
    if load.tiled_mlp > 1:  # one more forward pass of the dense feed-forward
        flops += sum(2 * kind.count * math.prod(s) for kind in shape.kinds for n, s in kind.weights.items()
                     if n.startswith("mlp.") and n.endswith("_proj.weight") and EXPERTS[0] not in kind.weights
                     and "shared_experts" not in n)  # fmt: skip

    # What is saved for the backward pass is written and read about once a pass; the loss moves its logits twelve times.
    saved = sum(kind.count * sum(op.saves for op in layer_tape(load, kind)) for kind in shape.kinds)
    micro = max(
        {
            "GPU math": t * flops / (peak * c["compute_efficiency"]),
            "GPU memory": t * (passes * saved + 24 * shape.vocab_size) / bandwidth,
        },
        {"GPU memory": passes * n * e / bandwidth},  # a small micro-batch waits for the weights,
        {"kernel launches": passes * shape.layers * KERNELS_PER_LAYER * c["launch_seconds"]},  # or for the host
        key=lambda parts: sum(parts.values()),
    )
    if s.pipeline:
        return _pipeline_parts(load, micro, bandwidth, max(1, hardware.cores), c)
    parts = {name: steps * seconds for name, seconds in micro.items()}
    if s.split:  # one card after another, and what is between them, there and back
        p = len(load.stage_sizes)
        parts["copies"] = steps * 2 * (p - 1) * t * shape.hidden_size * (4 if load.autocast else e) / c["pcie_bytes_per_second"]
        touched = 2 * s.master_bytes + 2 * load.moment_bytes + s.master_bytes + e
        parts["GPU memory"] = parts.get("GPU memory", 0.0) + trained / p * touched / bandwidth
        return parts

    def add(name: str, seconds: float) -> None:
        if seconds > 0:
            parts[name] = parts.get(name, 0.0) + seconds

    # -- gradients and weights between the cards: a ring moves (w - 1) / w of the tensor per card and direction
    ring_weights = (w - 1) / w * n * (1 if s.quantized_gathers else e)  # and a scale for a few thousand
    ring_gradients = (w - 1) / w * trained * (4 if load.autocast else e)
    collective, pcie = c["collective_bytes_per_second"], c["pcie_bytes_per_second"]
    if s.stage == 3:
        # Weights are gathered forward and, where a gradient passes, backward, and gradients reduce-scattered, in every micro-step.
        add("collectives", steps * ((2 - below) * ring_weights + ring_gradients) / collective)
    elif s.stage:
        # Each piece of a gradient is reduced to the rank that keeps it, a chain over all cards: its size once. Unless a file leaves
        # DeepSpeed's use_multi_rank_bucket_allreduce on: an all-reduce, twice the ring. Stage 2 does it in every micro-step.
        gradients = 2 * ring_gradients if load.all_reduces else min(1.0, 2 * (w - 1) / w) * trained * (4 if load.autocast else e)
        add("collectives", ((steps if s.stage == 2 else 1) * gradients + (w - 1) / w * trained * e) / collective)
    else:
        add("collectives", 2 * ring_gradients / collective)
    if load.offload_activations:  # out and in again, in the stream that computes: nothing hides them
        entering = t * (4 if load.autocast else e) * shape.hidden_size
        add("copies", steps * 2 * sum(load.recomputed[untouched:]) * entering / pcie)
    shard = trained / (w if s.stage else 1)
    if s.offload_optimizer:
        add("copies", steps * shard * e / pcie)  # each micro-step's gradients go to the host; the rest hides
        add("copies", shard * e / (c["pageable_copy_bytes_per_second"] if s.stage == 3 else pcie))

    # -- the update
    if s.offload_optimizer:
        threads = max(1, hardware.cores)
        add(*host_update(load, threads, c))
        if s.nvme:  # gradients and states, in and out
            swapped = trained * (2 * s.master_bytes + load.moment_bytes)
            add("disk", swapped / c["disk_read_bytes_per_second"] + swapped / c["disk_write_bytes_per_second"])
        if load.precision == "fp16":
            add("CPU optimizer", trained * c["fp16_scan_core_seconds_per_parameter"] / threads)
    else:
        add("GPU memory", shard * _touched(load) / bandwidth)
    return parts


def _touched(load: Workload) -> float:
    """Bytes per parameter that an update reads and writes."""
    s = load.strategy
    return 2 * s.master_bytes + 2 * load.moment_bytes + s.master_bytes + load.element


def host_update(load: Workload, cores: int, c: Mapping[str, float]) -> tuple[str, float]:
    """An update on the host: what limits it, and its seconds, all ranks together."""
    trained = trained_parameters(load)
    dram = trained * _touched(load) * WRITE_ALLOCATE / c["dram_bytes_per_second"]
    math_seconds = trained * c["cpu_adam_core_seconds_per_parameter"] / cores
    return ("host memory", dram) if dram > math_seconds else ("CPU optimizer", math_seconds)


def _one_batch_parts(load: Workload, hardware: Hardware, c: Mapping[str, float]) -> dict[str, float]:
    """All cards share one micro-batch: a part of its matrices each, or of its tokens, and exchange activations in every layer."""
    shape, w, e, t = load.shape, load.world_size, load.element, load.tokens
    passes = 4 if load.checkpointing else 3
    steps = load.grad_accum_steps * w  # the step of a data-parallel run with the same settings
    load = dataclasses.replace(load, grad_accum_steps=steps)
    like = dataclasses.replace(
        load.strategy, deepspeed=True, tensor=False, sequence=False, stage=3 if load.strategy.sequence else 0
    )
    ring = (w - 1) / w * t * shape.hidden_size * e / c["collective_bytes_per_second"]
    if load.strategy.tensor:  # two all-reduces of the hidden states in every pass through a layer (arXiv:1909.08053 §3)
        alone = dataclasses.replace(load, strategy=like, world_size=1)
        parts = {name: seconds / w for name, seconds in _step_parts(alone, hardware, c).items()}
        exchanged = passes * shape.layers * 2 * 2 * ring
    else:  # four all-to-alls of a card's share in every pass (arXiv:2309.14509 §3.1), and ZeRO-3's gathers
        parts = _step_parts(dataclasses.replace(load, strategy=like, seq_len=-(-load.seq_len // w), row_parts=w), hardware, c)
        exchanged = passes * shape.layers * 4 * ring / w
    parts["collectives"] = parts.get("collectives", 0.0) + steps * exchanged
    return parts


def _pipeline_parts(
    load: Workload, micro: Mapping[str, float], bandwidth: float, cores: int, c: Mapping[str, float]
) -> dict[str, float]:
    """1F1B: m micro-batches through p stages take m + p - 1 turns of the slowest stage (GPipe, arXiv:1811.06965 §2.3).

    Args:
        micro: seconds of one micro-batch through the whole model on one card.
    """
    shape, sizes = load.shape, load.stage_sizes
    p = len(sizes)
    replicas = load.world_size // p
    micro_batches = load.grad_accum_steps * p  # the step of a data-parallel run with the same settings
    layer = 4 * 2 * (shape.active_parameters - shape.embedding_parameters) / shape.layers
    head = 6 * shape.vocab_size * shape.hidden_size
    costs = [size * layer for size in sizes]
    costs[-1] += head
    slowest = max(costs) / sum(costs)
    element = 4 if load.autocast else load.element
    boundary = 2 * load.tokens * shape.hidden_size * element / c["collective_bytes_per_second"]
    touched = 2 * element + 2 * load.moment_bytes + 2 * element
    parts = {name: micro_batches * slowest * seconds for name, seconds in micro.items()}
    if load.strategy.offload_optimizer:  # fp32 gradients out, weights back, and between them the update, matrix by matrix
        name, seconds = host_update(load, cores, c)
        parts["copies"] = shape.parameters / p * (4 + load.element) / c["pageable_copy_bytes_per_second"]
        parts[name] = parts.get(name, 0.0) + seconds
    else:
        parts["GPU memory"] = parts.get("GPU memory", 0.0) + shape.parameters / p * touched / bandwidth
    parts["pipeline bubble"] = (p - 1) * slowest * sum(micro.values())
    parts["collectives"] = (micro_batches + p - 1) * boundary
    # Each stage adds its gradients up over its replicas, a ring, once a step.
    parts["collectives"] += 2 * (replicas - 1) / replicas * element * shape.parameters / p / c["collective_bytes_per_second"]
    return parts


def estimate_time(load: Workload, hardware: Hardware) -> Timing | None:
    """Time of an optimizer step on these cards; None where their figures are not in the table, or on CPU ranks.

    T = G (t F / (peak x efficiency) + ring / collectives + copies) + update, with G accumulation steps of t tokens a
    card and F FLOPs per token (`ModelShape.flops_per_token`). See docs/planner.md.
    """
    if not hardware.gpus or any(g.model is None for g in hardware.gpus[: load.cards]):
        return None
    parts, slow, fast = (
        _step_parts(load, hardware, _values(hardware, load.cards, end)) for end in (None, "low", "high")
    )
    seconds = sum(parts.values())
    tokens = load.tokens * load.grad_accum_steps * load.world_size
    peak = load.cards * min(g.model.tensor_flops for g in hardware.gpus[: load.cards])  # some may be on other hosts
    useful = load.shape.flops_per_token(load.seq_len, False, _trained_share(load), _untouched_share(load))
    return Timing(
        step_seconds=seconds,
        step_seconds_range=(sum(fast.values()), sum(slow.values())),
        tokens_per_second=tokens / seconds,
        mfu=tokens * useful / seconds / peak,
        parts=dict(sorted(parts.items(), key=lambda item: -item[1])),
    )


def used_constants(hardware: Hardware, world_size: int) -> dict[str, tuple[float, bool]]:
    """Name -> (value, whether it was measured on this machine)."""
    return {k: (v, k in hardware.measured) for k, v in _values(hardware, world_size, None).items()}


def with_constants(hardware: Hardware, given: Mapping[str, float]) -> Hardware:
    return dataclasses.replace(hardware, measured=dict(hardware.measured) | check_constants(given))
