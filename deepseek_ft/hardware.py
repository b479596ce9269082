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
    memory_bytes_per_second: float
    compute_capability: tuple[int, int]
    pcie: int
    """Generation."""
    source: str

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)


def _row(
    name: str, gib: float, tflops: float, gb_per_s: float, capability: tuple[int, int], pcie: int, source: str
) -> GpuModel:
    return GpuModel(name, int(gib * GIB), tflops * 1e12, gb_per_s * 1e9, capability, pcie, source)


_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper, table 9"
_DATASHEET = "NVIDIA data sheet, half of its figure with sparsity"
GPUS: dict[str, GpuModel] = {
    "rtx4090": _row("GeForce RTX 4090", 23.988, 165.2, 1008, (8, 9), 4, _ADA),
    "rtx3090": _row("GeForce RTX 3090", 24.0, 71.0, 936, (8, 6), 4, _GA102),
}


def gpu_key(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> `rtx4090`: how a card is called on the command line."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"nvidia|geforce|tesla|generation", "", name.lower()))


def gpu_model(name: str) -> GpuModel | None:
    """The table's row for a card, by its NVML name or its key; the longest matching key wins (`rtx3090ti`)."""
    key = gpu_key(name)
    matching = [k for k in GPUS if key == k or key.startswith(k) and not key[len(k) :].startswith("ti")]
    return GPUS[max(matching, key=len)] if matching else None


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
        return bool(self.gpus) and all("RTX 40" in gpu.name for gpu in self.gpus)

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
        gpu: a key of `GPUS`.
        pcie: lanes of each card such as `["x16", "x8", "x4"]`, or one for all.
        constants: of `timing.CONSTANTS`, in place of the assumed or measured ones.

    Raises:
        ConfigError: an unknown card, or a figure that makes no sense.
    """
    problems = [
        f"--{name} must be above 0, got {value:g}"
        for name, value in (("host-ram-gib", host_ram_gib), ("disk-gib", disk_gib), ("cores", cores))
        if value is not None and not value > 0
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
