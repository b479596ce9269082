"""What the doctor measures with torch, each part in a child process: `python -m deepseek_ft.measure PART ...`.

The parts that need cards (`_pinned_part`, `_pcie_part`, `_peer_part`, and `_all_reduce_part` with nccl) were written
without one and have not been run on one yet.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import launch, ops
from .hardware import GIB

MIB = 1024**2


def first_line(error: BaseException) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:200]}" if words else type(error).__name__


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and seconds of all cores together."""
    clock, cores = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - clock, time.process_time() - cores


def _torch_part() -> dict:
    import torch

    available, why = torch.cuda.is_available(), None
    if torch.version.cuda and not available:
        try:
            torch.cuda.init()
        except Exception as error:
            why = first_line(error)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": available,
        "why": why,
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else [],
        "archs": torch.cuda.get_arch_list() if available else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if available else None,
    }


_ADAM_PARAMETERS = 16 * MIB


def _adam_part() -> dict:
    """One step of DeepSpeed's own op where it is built (loading it here builds nothing), else of torch's fused one."""
    import torch

    weights, moment, variance = (torch.zeros(_ADAM_PARAMETERS) for _ in range(3))
    gradients = torch.full_like(weights, 1e-3)
    library = ops.built_library("cpu_adam")
    if library:
        op = _load_extension("cpu_adam", library)
        op.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)

        def step() -> None:
            op.adam_update(0, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, weights, gradients, moment, variance)

    else:
        parameter = torch.nn.Parameter(weights)
        parameter.grad = gradients
        step = torch.optim.AdamW([parameter], fused=True).step
    return _best(step) | {
        "which": "DeepSpeed's cpu_adam" if library else "torch's fused AdamW (DeepSpeed's cpu_adam is not built yet)",
        "threads": torch.get_num_threads(),
    }


def _load_extension(name: str, library: Path):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, library)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _scan_part() -> dict:
    """The search for overflows in offloaded fp16 gradients, as ZeRO-3 of DeepSpeed 0.19 does it: two passes."""
    import torch

    gradients = torch.full((_ADAM_PARAMETERS,), 1e-3, dtype=torch.float16)
    return _best(lambda: (torch.isinf(gradients).any(), torch.isnan(gradients).any()))


def _best(action: Callable[[], object], repeats: int = 3) -> dict:
    action()
    seconds, core_seconds = min(timed(action) for _ in range(repeats))
    return {"seconds": seconds, "core_seconds": core_seconds, "parameters": _ADAM_PARAMETERS}


def _pinned_part() -> dict:
    import torch

    return {"seconds": timed(lambda: torch.empty(GIB, dtype=torch.uint8, pin_memory=True))[0]}


def _pcie_part(size: int = 256 * MIB) -> dict:
    """Bytes per second of each card while all of them copy, in the best of three rounds for the slowest card."""
    import torch

    cards = range(torch.cuda.device_count())
    host = [torch.ones(size, dtype=torch.uint8).pin_memory() for _ in cards]
    device = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{card}") for card in cards]
    streams = [torch.cuda.Stream(card) for card in cards]

    def rates(targets: list, sources: list) -> list[float]:
        events = []
        for card in cards:
            with torch.cuda.device(card), torch.cuda.stream(streams[card]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                targets[card].copy_(sources[card], non_blocking=True)
                end.record()
            events.append((start, end))
        for card in cards:
            torch.cuda.synchronize(card)
        return [size / (start.elapsed_time(end) / 1e3) for start, end in events]

    def pageable(target, source) -> float:
        seconds = min(timed(lambda: (target.copy_(source), torch.cuda.synchronize(0)))[0] for _ in range(3))
        return size / seconds

    rates(device, host), rates(host, device)  # the first copies set things up
    to_card = max((rates(device, host) for _ in range(3)), key=min)
    to_host = max((rates(host, device) for _ in range(3)), key=min)
    ordinary = torch.ones(size, dtype=torch.uint8)
    slow = min(pageable(device[0], ordinary), pageable(ordinary, device[0]))
    return {"to_card": to_card, "to_host": to_host, "pageable": slow}


def _peer_part(size: int = 64 * MIB) -> dict:
    """Copies a known pattern over every ordered pair of cards and compares what arrives, on the host."""
    import torch

    pattern = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pairs = [(a, b) for a in range(torch.cuda.device_count()) for b in range(torch.cuda.device_count()) if a != b]
    differ = []
    for a, b in pairs:
        arrived = pattern.to(f"cuda:{a}").to(f"cuda:{b}").cpu()
        if not torch.equal(arrived, pattern):
            differ.append((a, b))
    access = [(a, b) for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
    return {"pairs": len(pairs), "access": access, "differ": differ}


def _all_reduce_part(ranks: int | None = None, backend: str = "nccl", size: int = 64 * MIB) -> dict:
    """The best of five all-reduces, as the slowest rank saw it."""
    import torch
    import torch.multiprocessing

    ranks = ranks or torch.cuda.device_count()
    with tempfile.TemporaryDirectory(prefix="deepseek_ft_") as folder:
        torch.multiprocessing.spawn(_all_reduce_rank, (ranks, backend, size, folder), nprocs=ranks)
        return {"ranks": ranks, "bytes": size, "seconds": float(Path(folder, "seconds").read_text())}


def _all_reduce_rank(rank: int, ranks: int, backend: str, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

    def reduce() -> None:
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(6):  # the first one builds the rings
        dist.barrier()
        seconds.append(timed(reduce)[0])
    slowest = torch.tensor(seconds[1:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "seconds").write_text(str(slowest.min().item()))
    dist.destroy_process_group()


_PARTS: dict[str, Callable[[], dict]] = {
    "torch": _torch_part,
    "adam": _adam_part,
    "scan": _scan_part,
    "pinned": _pinned_part,
    "pcie": _pcie_part,
    "peer": _peer_part,
    "all_reduce": _all_reduce_part,
}


def main(parts: Sequence[str]) -> int:
    """Answer each part with one line of JSON; stop when torch itself does not work."""
    launch.die_with_parent()
    for part in parts:
        try:
            answer = _PARTS[part]()
        except (Exception, SystemExit) as error:
            answer = {"error": first_line(error)}
        sys.stdout.write(json.dumps({"part": part, **answer}) + "\n")
        sys.stdout.flush()
        if part == "torch" and "error" in answer:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
