"""What a machine is: GPUs, cores, memory, disk, and what was measured on it. Probing imports nothing heavy, never fails.

A `Hardware` is probed from the machine at hand, or described by a few flags (`described`) to plan for another one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError

GIB = 1024**3


# ------------------------------------------------------------------------------------------------- known cards


@dataclass(frozen=True)
class GpuModel:
    """A row of published figures."""

    name: str
    """As NVML says it, without the maker."""
    memory_bytes: int
    """As NVML reports it."""
    tensor_flops: float
    """Dense fp16/bf16 on the tensor cores with fp32 accumulation, per second: what training uses."""
    fp32_flops: float
    """Without tensor cores, which torch leaves out of fp32 products unless told otherwise."""
    memory_bytes_per_second: float
    compute_capability: tuple[int, int]
    pcie: int
    """Generation; all have sixteen lanes."""
    nvlink_bytes_per_second: float
    """Per direction, between the cards of one board; 0 where cards talk over PCIe."""
    source: str


# Peak figures as the makers of training software hold them, who cite NVIDIA's whitepapers and data sheets: IST-DASLab/llmq
# (src/utilities/sol.cpp), karpathy/nanochat, pytorch/torchtitan, Lightning. GeForce cards run fp32 accumulation at half
# their fp16-accumulation rate; the professional ones do not. Memory as nvidia-smi shows it, with ECC where it is always on.
_SOL, _NANOCHAT, _TITAN, _LIGHTNING = "llmq sol.cpp", "nanochat", "torchtitan", "Lightning's throughput table"
_SCALED = "scaled from the same chip by its SMs and clock"
_ROWS = [
    # name                        MiB  TFLOPS, of fp32, GB/s, capability, PCIe, NVLink GB/s, source of the TFLOPS
    ("GeForce RTX 4090",          24564, 165.2, 82.6, 1008, (8, 9), 4, 0, f"{_SOL}; Ada whitepaper"),
    ("GeForce RTX 4090 D",        24564, 147.1, 73.5, 1008, (8, 9), 4, 0, _SCALED),
    ("GeForce RTX 4080",          16376, 97.5, 48.7, 717, (8, 9), 4, 0, f"{_SOL}; Ada whitepaper"),
    ("GeForce RTX 4080 SUPER",    16376, 104.5, 52.2, 736, (8, 9), 4, 0, _SCALED),
    ("GeForce RTX 4070 Ti SUPER", 16376, 88.2, 44.1, 672, (8, 9), 4, 0, _SCALED),
    ("GeForce RTX 3090",          24576, 71.0, 35.6, 936, (8, 6), 4, 0, f"{_SOL}; GA102 whitepaper"),
    ("GeForce RTX 3090 Ti",       24564, 80.0, 40.0, 1008, (8, 6), 4, 0, _SOL),
    ("GeForce RTX 5090",          32607, 209.5, 104.8, 1792, (12, 0), 5, 0, f"{_SOL}; RTX Blackwell whitepaper"),
    ("GeForce RTX 5080",          16303, 112.6, 56.3, 960, (12, 0), 5, 0, _SOL),
    ("RTX A5000",                 24564, 111.1, 27.8, 768, (8, 6), 4, 0, _SCALED),
    ("RTX A6000",                 49140, 154.8, 38.7, 768, (8, 6), 4, 0, _SOL),
    ("RTX 4500 Ada",              24570, 158.5, 39.6, 432, (8, 9), 4, 0, _SCALED),
    ("RTX 5000 Ada",              32760, 261.1, 65.3, 576, (8, 9), 4, 0, _SCALED),
    ("RTX 6000 Ada",              49140, 364.2, 91.1, 960, (8, 9), 4, 0, _SOL),
    ("L4",                        23034, 121.0, 30.3, 300, (8, 9), 4, 0, f"{_SOL}; a 72 W card will not hold it"),
    ("L40S",                      46068, 362.0, 91.6, 864, (8, 9), 4, 0, f"{_TITAN}; llmq's author reaches 230"),
    ("A10",                       23028, 125.0, 31.2, 600, (8, 6), 4, 0, _LIGHTNING),
    ("A10G",                      23028, 70.0, 31.2, 600, (8, 6), 4, 0, "not verified: sources say 62.5 to 125"),
    ("T4",                        15360, 65.0, 8.1, 320, (7, 5), 3, 0, _LIGHTNING),
    ("V100",                      32768, 125.0, 15.7, 900, (7, 0), 3, 0, _LIGHTNING),
    ("V100 SXM2",                 32768, 125.0, 15.7, 900, (7, 0), 3, 150, _LIGHTNING),
    ("A100",                      81920, 312.0, 19.5, 1935, (8, 0), 4, 0, _NANOCHAT),
    ("A100 40GB",                 40960, 312.0, 19.5, 1555, (8, 0), 4, 0, _NANOCHAT),
    ("A100 SXM4",                 81920, 312.0, 19.5, 2039, (8, 0), 4, 300, _NANOCHAT),
    ("A100 SXM4 40GB",            40960, 312.0, 19.5, 1555, (8, 0), 4, 300, _NANOCHAT),
    ("H100",                      81559, 989.4, 67.0, 3350, (9, 0), 5, 450, _TITAN),
    ("H100 PCIe",                 81559, 756.0, 51.0, 2000, (9, 0), 5, 0, _TITAN),
    ("H200",                      143771, 989.4, 67.0, 4800, (9, 0), 5, 450, _TITAN),
    ("H20",                       97871, 148.0, 44.0, 4000, (9, 0), 5, 450, "vendors' tables"),
]  # fmt: skip


def _words(name: str) -> list[str]:
    return [
        w
        for w in re.split(r"[^a-z0-9]+", name.lower())
        if w not in ("", "nvidia", "geforce", "tesla", "generation", "gpu")
    ]


GPUS: dict[str, GpuModel] = {
    "".join(_words(name)): GpuModel(
        name, mib * 2**20, tflops * 1e12, fp32 * 1e12, gb * 1e9, capability, pcie, nvlink * 1e9, source
    )
    for name, mib, tflops, fp32, gb, capability, pcie, nvlink, source in _ROWS
}


def gpu_model(name: str) -> GpuModel | None:
    """The table's row for a card, by its NVML name (`NVIDIA GeForce RTX 4090`) or as people write it (`rtx4090`, `4090`).

    The row that shares the most words with the name and has no other. Laptop cards and virtual slices share names, not figures.
    """
    words = _words(name)
    joined = "".join(words)
    for key in (joined, f"rtx{joined}"):
        if key in GPUS:
            return GPUS[key]
    if {"laptop", "mobile", "max", "mig", "nvl"} & set(words) or re.search(r"-\d+[abcq]$", name.strip().lower()):
        return None  # other silicon, or a slice of a card
    matching = [model for model in GPUS.values() if set(_words(model.name)) <= set(words)]
    return max(matching, key=lambda model: len(_words(model.name)), default=None)


# Copies between host and card, bytes per second: about 80 % of the link's raw rate, as bandwidthTest shows with pinned
# memory. Assumed until `deepseek-ft doctor` has measured them on the machine itself.
_PCIE_LANE = {3: 0.8e9, 4: 1.5625e9, 5: 3.1e9}


def pcie_bytes_per_second(generation: int, lanes: int) -> float:
    """A link's real rate per direction: gen 4 x16 25, x8 12.5, x4 6.25 GB/s."""
    return _PCIE_LANE.get(min(generation, 5), _PCIE_LANE[3]) * lanes


# ------------------------------------------------------------------------------------------------- a machine


@dataclass(frozen=True)
class Gpu:
    index: str
    """As CUDA_VISIBLE_DEVICES would name it: a number or a UUID."""
    name: str
    memory_bytes: int
    """As NVML reports it."""
    pcie_bytes_per_second: float | None = None
    """From the link's generation and lanes; None when unknown."""
    compute_capability: tuple[int, int] | None = None

    @property
    def model(self) -> GpuModel | None:
        return gpu_model(self.name)

    @property
    def has_no_p2p(self) -> bool:
        """GeForce RTX 40 cards do not talk to each other directly."""
        return bool(re.search(r"RTX 40[5-9]0\b", self.name))

    @property
    def has_bf16(self) -> bool:
        """bf16 on the tensor cores came with Ampere."""
        known = self.compute_capability or (self.model.compute_capability if self.model else (8, 0))
        return known >= (8, 0)


@dataclass(frozen=True)
class Hardware:
    gpus: tuple[Gpu, ...]
    cores: int
    host_memory_bytes: int
    """All of it, or what the container may have."""
    disk_free_bytes: int | None = None
    """Where the run would be written."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Constants of `timing.CONSTANTS` that were measured on this machine, or given for another."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def needs_no_p2p(self) -> bool:
        """GeForce RTX 40 cards have no peer-to-peer: NCCL must be told, or the first collective can hang."""
        return bool(self.gpus) and all(gpu.has_no_p2p for gpu in self.gpus)

    def describe(self) -> str:
        host = f"{self.cores} cores, {self.host_memory_bytes / GIB:.0f} GiB host memory"
        if not self.gpus:
            return f"no GPU, {host}"
        names = {gpu.name for gpu in self.gpus}
        shown = ", ".join(f"{g.name} [{g.index}]" for g in self.gpus) if len(names) > 1 else (
            f"{len(self.gpus)} x {self.gpus[0].name} [{', '.join(g.index for g in self.gpus)}]"
        )  # fmt: skip
        return f"{shown}, {min(g.memory_bytes for g in self.gpus) / GIB:.1f} GiB each, {host}"


def _visible_gpus() -> tuple[Gpu, ...]:
    """GPUs that CUDA would show this process, by NVML: no CUDA context, a few milliseconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "NoDevFiles"):
        return ()
    if not Path("/dev/nvidiactl").exists() and not shutil.which("nvidia-smi"):
        return ()  # spares a machine without a driver the import
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [(_read_gpu(pynvml, i, handle), pynvml.nvmlDeviceGetUUID(handle)) for i, handle in enumerate(handles)]
        pynvml.nvmlShutdown()
    except Exception:  # a missing or broken driver is "no GPU"; `deepseek-ft doctor` is where it gets a name
        return ()
    if visible is None:
        return tuple(gpu for gpu, _ in gpus)
    chosen = []
    for word in (w.strip() for w in visible.split(",")):
        match = [g for g, uuid in gpus if g.index == word or uuid.startswith(word) and word.startswith("GPU-")]
        if not match:
            break  # CUDA ignores everything after the first name that it does not know
        chosen.append(match[0])
    return tuple(chosen)


def _read_gpu(pynvml, index: int, handle) -> Gpu:
    def optional(call: str):
        try:
            return getattr(pynvml, call)(handle)
        except Exception:  # an old driver, or a card in a virtual machine that hides its link
            return None

    # The link's present generation drops when the card idles; its lanes do not.
    generation, lanes = optional("nvmlDeviceGetMaxPcieLinkGeneration"), optional("nvmlDeviceGetCurrPcieLinkWidth")
    return Gpu(
        index=str(index),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pcie_bytes_per_second=pcie_bytes_per_second(generation, lanes) if generation and lanes else None,
        compute_capability=optional("nvmlDeviceGetCudaComputeCapability"),
    )


def host_memory_bytes() -> int:
    """The machine's memory, or the limit of the container (control group, version 2 or 1) when that is lower."""
    import psutil

    total = psutil.virtual_memory().total
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text())
        except (OSError, ValueError):  # no control group, or "max"
            continue
        total = min(total, limit)
    return total


def disk_free_bytes(folder: str | os.PathLike) -> int | None:
    """Free bytes for this user where `folder` is, or would be made."""
    path = Path(folder).absolute()
    for parent in (path, *path.parents):
        if parent.exists():
            try:
                return shutil.disk_usage(parent).free
            except OSError:
                return None
    return None


def probe(output_dir: str | os.PathLike | None = None) -> Hardware:
    """This machine, as far as this process may use it; with the free disk where `output_dir` is to be."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    forced_cpu = os.environ.get("DS_ACCELERATOR", "").lower() == "cpu"
    gpus = () if forced_cpu else _visible_gpus()
    return Hardware(
        gpus=gpus,
        cores=affinity,
        host_memory_bytes=host_memory_bytes(),
        disk_free_bytes=None if output_dir is None else disk_free_bytes(output_dir),
        measured=read_measured(gpus),
    )


def described(
    base: Hardware,
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    host_ram_gib: float | None = None,
    disk_gib: float | None = None,
    cores: int | None = None,
    pcie: Sequence[str] | None = None,
    constants: Mapping[str, float] | None = None,
) -> Hardware:
    """`base` with what the flags of `deepseek-ft plan` say otherwise.

    Args:
        gpus: how many cards; 0 plans for CPU ranks. Three when only `gpu` is given.
        gpu: a card of `GPUS`, as people write it.
        pcie: lanes of each card such as `["x16", "x8", "x4"]`, or one for all.
        constants: of `timing.CONSTANTS`, in place of the assumed or measured ones.

    Raises:
        ConfigError: an unknown card, or a figure that makes no sense.
    """
    problems = [
        f"--{name} must be above 0, got {value:g}"
        for name, value in (("host-ram-gib", host_ram_gib), ("disk-gib", disk_gib), ("cores", cores))
        if value is not None and not 0 < value < float("inf")
    ]
    if gpus is not None and gpus < 0:
        problems.append(f"--gpus must be 0 or more, got {gpus}")
    model = None
    if gpu is not None:
        model = gpu_model(gpu)
        if model is None:
            problems.append(f"--gpu: no figures for {gpu!r}; known: {', '.join(GPUS)}")
    elif gpus and not base.gpus:
        problems.append(f"--gpus {gpus}: this machine has no GPU to take the figures of; name one, as in --gpu rtx4090")
    lanes = []
    for word in pcie or ():
        match = re.fullmatch(r"x?(1|2|4|8|16)", word.strip().lower())
        if match is None:
            problems.append(f"--pcie: got {word!r}; lanes are x16, x8, x4, x2 or x1, one for each card or one for all")
        else:
            lanes.append(int(match[1]))
    if problems:
        raise ConfigError("\n".join(problems))

    cards = base.gpus
    if model is not None:
        count = 3 if gpus is None else gpus
        cards = tuple(Gpu(str(i), f"NVIDIA {model.name}", model.memory_bytes, pcie_bytes_per_second(model.pcie, 16),
                          model.compute_capability) for i in range(count))  # fmt: skip
    elif gpus is not None:
        cards = tuple(dataclasses.replace(base.gpus[i % len(base.gpus)], index=str(i)) for i in range(gpus))
    if lanes:
        if not cards or len(lanes) not in (1, len(cards)):
            raise ConfigError(f"--pcie names {len(lanes)} links, and there are {len(cards)} cards")
        each = lanes * len(cards) if len(lanes) == 1 else lanes
        cards = tuple(
            dataclasses.replace(c, pcie_bytes_per_second=pcie_bytes_per_second(c.model.pcie if c.model else 4, n))
            for c, n in zip(cards, each, strict=True)
        )
    measured = dict(base.measured)
    if model is not None or lanes or gpus is not None:  # another machine's links are not this one's
        measured = {k: v for k, v in measured.items() if not k.startswith(("pcie", "collective"))}
    return dataclasses.replace(
        base,
        gpus=cards,
        cores=cores or base.cores,
        host_memory_bytes=int(host_ram_gib * GIB) if host_ram_gib else base.host_memory_bytes,
        disk_free_bytes=int(disk_gib * GIB) if disk_gib else base.disk_free_bytes,
        measured=measured | dict(constants or {}),
    )


# ------------------------------------------------------------------------------------- what the doctor measured


def measured_file() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek_ft")
    return Path(os.environ.get("DEEPSEEK_FT_CACHE") or default).expanduser() / "machine.json"


def _identity(gpus: Sequence[Gpu]) -> dict:
    return {"host": platform.node(), "gpus": [g.name for g in gpus]}


def save_measured(gpus: Sequence[Gpu], constants: Mapping[str, float]) -> Path:
    """Keep constants that were measured here; `probe` finds them again as long as host and cards are the same."""
    file = measured_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    content = _identity(gpus) | {"when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "constants": dict(constants)}
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def read_measured(gpus: Sequence[Gpu]) -> dict[str, float]:
    """What `deepseek-ft doctor` measured on this host with these cards; empty when it has not run."""
    try:
        content = json.loads(measured_file().read_text(encoding="utf-8"))
        if {k: content.get(k) for k in ("host", "gpus")} != _identity(gpus):
            return {}
        return {k: float(v) for k, v in content["constants"].items() if 0 < float(v) < float("inf")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
