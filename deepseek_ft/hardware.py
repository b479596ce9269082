"""What the machine is: visible GPUs, cores, memory, disk. Probing imports nothing heavy and never fails."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    index: str
    """As CUDA_VISIBLE_DEVICES would name it: a number or a UUID."""
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    gpus: tuple[Gpu, ...]
    cores: int
    host_memory_bytes: int

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
        gpus = []
        for i, handle in enumerate(handles):
            name = pynvml.nvmlDeviceGetName(handle)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            gpus.append((Gpu(str(i), name, int(memory)), uuid))
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


def probe() -> Hardware:
    """This machine, as far as this process may use it."""
    import psutil

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    forced_cpu = os.environ.get("DS_ACCELERATOR", "").lower() == "cpu"
    return Hardware(
        gpus=() if forced_cpu else _visible_gpus(),
        cores=affinity,
        host_memory_bytes=psutil.virtual_memory().total,
    )
