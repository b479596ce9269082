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
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import PlanError

# What the planner asks for -> (the folder that torch builds it in, DeepSpeed's builder).
_OPS = {
    "shm_comm": ("deepspeed_shm_comm", "ShareMemCommBuilder"),
    "cpu_adam": ("cpu_adam", "CPUAdamBuilder"),
    "async_io": ("async_io", "AsyncIOBuilder"),
    "quantizer": ("quantizer", "QuantizerBuilder"),
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


def _all_folders() -> list[Path]:
    """Every op's folder, of any library and any Python: a lock in one of them stops whoever builds there."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = Path(root).glob("*/lock") if root else _default_root().glob("*/*/lock")
    return sorted(lock.parent for lock in locks)


def _versions() -> str:
    try:
        return f"torch {version('torch')} deepspeed {version('deepspeed')}"
    except PackageNotFoundError:
        return ""


def built_library(op: str) -> Path | None:
    """The op, if it was built by us for the installed versions of torch and DeepSpeed."""
    for folder in _folders(op):
        library, stamp = folder / f"{_OPS[op][0]}.so", folder / _STAMP
        if library.is_file() and stamp.is_file() and stamp.read_text() == _versions():
            return None if (folder / "lock").exists() else library
    return None


def is_built(op: str) -> bool:
    return built_library(op) is not None


CURES = {
    "a C++ compiler": "apt-get install g++",
    "ninja": "pip install ninja",
    "Python.h": f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev",
    "libaio.h": "apt-get install libaio-dev",
    "nvcc": "install the CUDA toolkit of torch's version",
}
"""How to get what `missing_for_builds` says is missing (Debian, Ubuntu)."""


def missing_for_builds(ops: Sequence[str] = ()) -> list[str]:
    """What a build needs and this machine lacks; Debian's python3 comes without Python.h."""
    missing = []
    if not (shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")):
        missing.append("a C++ compiler")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        missing.append("ninja")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        missing.append("Python.h")
    if "async_io" in ops and not any(Path(folder, "libaio.h").is_file() for folder in _include_folders()):
        missing.append("libaio.h")
    if "quantizer" in ops and shutil.which("nvcc") is None and not Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc").is_file():
        missing.append("nvcc")
    return missing


def _include_folders() -> list[str]:
    """Where compilers look."""
    own = [folder for name in ("CPATH", "CPLUS_INCLUDE_PATH") for folder in os.environ.get(name, "").split(os.pathsep)]
    return [*filter(None, own), "/usr/include", "/usr/local/include", str(Path(sys.prefix, "include"))]


def have_compiler() -> bool:
    """A C++ compiler, ninja and Python's headers."""
    return not missing_for_builds()


def available(ops: Sequence[str]) -> bool:
    return not missing_for_builds([op for op in ops if not is_built(op)]) or all(is_built(op) for op in ops)


# ninja, and what it starts: compilers live on for a while when it is killed.
_BUILDERS = {"ninja", "c++", "g++", "clang++", "cc1plus", "nvcc", "cicc", "ptxas", "cudafe++", "ld"}


def _is_compiling(folder: Path) -> bool:
    import psutil

    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] in _BUILDERS and Path(process.cwd()) == folder:
                return True
        except (psutil.Error, OSError):
            continue
    return False


def locks(ops: list[str] | tuple[str, ...] | None = None, older_than_seconds: float = 60) -> dict[Path, bool]:
    """The `lock` files in the folders of `ops`, or of every op that torch knows of; True for those that are stale.

    A lock is stale when it is older than the moments between taking it and starting ninja, and no build runs there.
    """
    folders = _all_folders() if ops is None else [folder for op in ops for folder in _folders(op)]
    found = {}
    for folder in folders:
        lock = folder / "lock"
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        found[lock] = age > older_than_seconds and not _is_compiling(folder)
    return found


def clear_stale_locks(ops: list[str] | tuple[str, ...] | None = None, older_than_seconds: float = 60) -> list[Path]:
    """Remove `lock` files that no build holds any more; returns what was removed."""
    removed = [lock for lock, stale in locks(ops, older_than_seconds).items() if stale]
    for lock in removed:
        lock.unlink(missing_ok=True)
        log.warning("removed %s, left behind by a build that was killed", lock)
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
    while held := list(locks([op])):
        if not clear_stale_locks([op], older_than_seconds=5):
            if not said:
                log.info("waiting for another build of DeepSpeed's %s op (%s)", _OPS[op][0], held[0])
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
            "installed torch; a strategy without offload or 8-bit gathers needs no build on a GPU."
        ) from None
    (folder / _STAMP).write_text(_versions())
    log.info("built in %.0f s; later runs start with it", time.monotonic() - started)
