"""DeepSpeed's C++ ops: whether they can be had, and building them once, before the ranks start.

DeepSpeed compiles an op when it is first used. Left to the ranks, that happens in all of them at once, and a build
that is killed half-way leaves a `lock` file on which every later run waits in silence.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import PlanError

# What the planner asks for -> (the folder that torch builds it in, DeepSpeed's builder).
_OPS = {
    "shm_comm": ("deepspeed_shm_comm", "ShareMemCommBuilder"),
    "cpu_adam": ("cpu_adam", "CPUAdamBuilder"),
}
_STAMP = "deepseek_ft.stamp"
log = logging.getLogger(__name__)


def _default_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")


def _folders(op: str) -> list[Path]:
    """Where a built op may lie: torch puts it under a folder per Python and CUDA unless told otherwise."""
    name = _OPS[op][0]
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return [Path(root, name)]
    cache = _default_root()
    tag = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}_"
    return sorted(cache.glob(f"{tag}*/{name}"))


def _versions() -> str:
    try:
        return f"torch {version('torch')} deepspeed {version('deepspeed')}"
    except PackageNotFoundError:
        return ""


def is_built(op: str) -> bool:
    """Built by us, for the installed versions of torch and DeepSpeed."""
    for folder in _folders(op):
        stamp = folder / _STAMP
        if (folder / f"{_OPS[op][0]}.so").is_file() and stamp.is_file() and stamp.read_text() == _versions():
            return not (folder / "lock").exists()
    return False


def have_compiler() -> bool:
    """A C++ compiler, ninja and Python's headers: Debian's python3 comes without the last."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return False
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    return compiler is not None and (shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None)


def available(ops: list[str] | tuple[str, ...]) -> bool:
    return all(is_built(op) for op in ops) or have_compiler()


def _is_compiling(folder: Path) -> bool:
    import psutil

    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == "ninja" and Path(process.cwd()) == folder:
                return True
        except (psutil.Error, OSError):
            continue
    return False


def clear_stale_locks(ops: list[str] | tuple[str, ...], older_than_seconds: float = 60) -> list[Path]:
    """Remove `lock` files that no build holds any more; returns what was removed.

    A lock is stale when it is older than the moments between taking it and starting ninja, and no ninja runs there.
    """
    removed = []
    for op in ops:
        for folder in _folders(op):
            lock = folder / "lock"
            try:
                age = time.time() - lock.stat().st_mtime
            except OSError:
                continue
            if age > older_than_seconds and not _is_compiling(folder):
                lock.unlink(missing_ok=True)
                removed.append(lock)
                log.warning("removed %s, left behind by a build that was killed %.0f s ago", lock, age)
    return removed


def build(ops: list[str] | tuple[str, ...]) -> None:
    """Compile and load each op that is not there yet. One process at a time; others wait for it.

    Raises:
        PlanError: the build failed, with the compiler's last words.
    """
    clear_stale_locks(ops)
    missing = [op for op in ops if not is_built(op)]
    if not missing:
        return
    from filelock import FileLock

    try:
        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _default_root())
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / "deepseek_ft.lock")
        lock.acquire()
    except OSError as error:
        raise PlanError(f"DeepSpeed's C++ ops cannot be built: {error.strerror} ({error.filename}); set TORCH_EXTENSIONS_DIR "
                        "to a folder that can be written") from None  # fmt: skip
    with lock:  # whoever waited here may find the work done
        for op in missing:
            _wait_for_others(op)
            if not is_built(op):
                _build(op)


def _wait_for_others(op: str) -> None:
    """Until nobody holds torch's lock: a compiler that outlived its parent is let finish, then the lock is stale."""
    said = False
    while locks := [f / "lock" for f in _folders(op) if (f / "lock").exists()]:
        if not clear_stale_locks([op], older_than_seconds=5):
            if not said:
                log.info("waiting for another build of DeepSpeed's %s op (%s)", _OPS[op][0], locks[0])
                said = True
            time.sleep(1)


def _build(op: str) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    name, builder_name = _OPS[op]
    log.info("building DeepSpeed's %s op, once for this machine (about a minute)", name)
    started = time.monotonic()
    import deepspeed.ops.op_builder as op_builder
    from deepspeed.accelerator import get_accelerator

    folder = Path(_get_build_directory(name, verbose=False))
    if not (folder / _STAMP).is_file() or (folder / _STAMP).read_text() != _versions():
        (folder / f"{name}.so").unlink(missing_ok=True)  # built for other versions
    builder = get_accelerator().create_op_builder(builder_name) or getattr(op_builder, builder_name)()
    try:
        builder.load(verbose=False)
    except Exception as error:  # compilers fail in many ways; what matters is their last word
        words = (
            [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines() or ["?"]
        )
        raise PlanError(
            f"DeepSpeed's {name} op cannot be built: {words[-1].strip()[:300]}\n"
            "  It needs a C++ compiler, Python's headers and ninja (Debian, Ubuntu: apt-get install g++ python3-dev) that fit the "
            "installed torch; a strategy without offload needs no build on a GPU."
        ) from None
    (folder / _STAMP).write_text(_versions())
    log.info("built in %.0f s; later runs start with it", time.monotonic() - started)
