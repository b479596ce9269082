"""What this machine is, what would go wrong on it, and how fast its parts are.

Each check is a generator of findings. It runs in a thread with a time limit, and whatever it raises becomes one line.
What imports torch runs in a child process, `python -m deepseek_ft.measure PART ...`, so that a torch, a CUDA or an NCCL
that crashes or hangs takes nothing down with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from . import __version__, hardware, launch, ops
from .errors import RunError
from .hardware import GIB, Gpu
from .measure import MIB, first_line, timed

_PACKAGE_PARENT = Path(__file__).resolve().parents[1]
_CONSTRAINTS = _PACKAGE_PARENT / "constraints.txt"  # in a checkout; an installed copy comes without
_PIP = f"{shlex.quote(sys.executable)} -m pip install"


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    state: str
    """ok | warn | fail"""
    says: str
    cure: str | None = None
    """Commands to paste; what stands behind a # is for the reader."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Constants of the time model that this check measured."""


@dataclass(frozen=True)
class _Card:
    gpu: Gpu
    link: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None)
    """PCIe generation and lanes now, then the most that card and slot can do."""
    used_bytes: int = 0
    processes: tuple[tuple[int, int | None], ...] = ()
    """(pid, bytes) of whoever uses its memory."""


@dataclass(frozen=True)
class _Driver:
    """What NVML says."""

    present: bool = False
    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that it runs."""
    cards: tuple[_Card, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class _Seen:
    """What several checks look at."""

    driver: _Driver = _Driver()
    gpus: tuple[Gpu, ...] = ()
    """The cards that a run would use, in torch's order."""
    parts: Mapping[str, Mapping] = field(default_factory=dict)
    """What the child with torch answered, by part; `error` in place of what could not be had."""
    quick: bool = False


# ----------------------------------------------------------------------------------------------- the examination


def examine(quick: bool = False) -> list[Finding]:
    """All findings, in the order of the table; `quick` looks only, and measures nothing."""
    driver = _read_driver_guarded()
    machine = None if driver.error else _quietly(_within, 8, hardware.probe)
    gpus = machine.gpus if machine else ()
    wanted = ["torch"]
    if not quick:
        wanted += ["adam", "scan"] + ["pinned", "pcie"] * bool(gpus) + ["peer"] * (len(gpus) > 1)
    seen = _Seen(driver, gpus, _ask(wanted, seconds=30), quick)
    return [finding for name, check in _CHECKS.items() for finding in _guarded(name, check, seen)]


def remember(findings: Sequence[Finding]) -> Finding:
    """Keep what was measured, for the plans of later runs; what this examination did not measure stays as it was."""
    constants = {name: value for finding in findings for name, value in finding.measured.items()}
    if not constants:
        return Finding("measured", "ok", "nothing measured")
    if any(f.name == "CPU" and "busy" in f.says for f in findings):
        return Finding(
            "measured",
            "warn",
            "not kept: on a busy machine everything looks slower than it is",
            "deepseek-ft doctor  # again, when it is quiet",
        )
    try:
        gpus = _within(10, hardware.probe).gpus
        file = hardware.save_measured(gpus, hardware.read_measured(gpus) | constants)
    except Exception as error:
        return Finding("measured", "warn", f"not kept: {first_line(error)}",
                       "export DEEPSEEK_FT_CACHE=~/deepseek_ft_cache  # any folder that can be written")  # fmt: skip
    return Finding("measured", "ok", f"{len(constants)} constants kept in {file}")


def clear_locks() -> list[Path]:
    """Remove the locks of builds that were killed; returns what was removed.

    Raises:
        RunError: one of them belongs to somebody else.
    """
    try:
        return ops.clear_stale_locks()
    except OSError as error:
        raise RunError(f"{error.filename} cannot be removed: {error.strerror}") from None


def to_json(findings: Sequence[Finding]) -> dict:
    return {
        "version": __version__,
        "findings": [dataclasses.asdict(finding) | {"measured": dict(finding.measured)} for finding in findings],
        "constants": {name: value for finding in findings for name, value in finding.measured.items()},
    }


_COLOURS = {"ok": "\033[32m", "warn": "\033[33m", "fail": "\033[31m"}


def describe(findings: Sequence[Finding], colour: bool = False, width: int = 118) -> str:
    """The table: state, name, what was found; below it the cure, unwrapped, so that it can be pasted."""
    names = max(len(finding.name) for finding in findings)
    margin = " " * (names + 8)
    lines = []
    for finding in findings:
        state = f"{finding.state:4}"
        if colour:
            state = f"{_COLOURS[finding.state]}{state}\033[0m"
        says = textwrap.wrap(finding.says, max(40, width - len(margin)), break_on_hyphens=False) or [""]
        lines.append(f"{state}  {finding.name:{names}}  {says[0]}")
        lines += [margin + line for line in says[1:]]
        if finding.cure:
            lines.append(f"{margin}-> {finding.cure}")
    counts = [(sum(f.state == state for f in findings), state) for state in _COLOURS]
    return "\n".join([*lines, ", ".join(f"{count} {state}" for count, state in counts)])


def _guarded(name: str, check: Callable[[_Seen], Iterator[Finding]], seen: _Seen, seconds: float = 25) -> list[Finding]:
    found: list[Finding] = []

    def collect() -> None:
        for finding in check(seen):
            found.append(finding)  # one at a time: what comes before an error stays

    try:
        _within(seconds, collect)
    except (Exception, SystemExit) as error:  # a doctor that falls ill is of no use
        return [*found, Finding(name, "warn", f"could not be checked: {first_line(error)}")]
    return found


def _within(seconds: float, action: Callable):
    """What `action` returns or raises; TimeoutError when it takes longer, and then it goes on behind our back."""
    outcome = []

    def work() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _cores() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"


# ------------------------------------------------------------------------------------------- Python and packages


def _python(seen: _Seen) -> Iterator[Finding]:
    version = sys.version.split()[0]
    if sys.version_info < (3, 11):  # noqa: UP036  started from a checkout, which pip has not checked
        yield Finding("Python", "fail", f"{version}; 3.11 or newer is needed", "python3.11 -m venv .venv")
        return
    inside = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    place = f"in the environment {sys.prefix}" if inside else f"of the system ({sys.prefix}), no virtual environment"
    yield Finding("Python", "ok", f"{version} {place}")
    copies = _copies()
    if len(copies) > 1:
        yield Finding("deepseek_ft", "warn", f"{__version__} from {copies[0]}, and others that could take its place: "
                      + ", ".join(map(str, copies[1:])),
                      "unset PYTHONPATH" if os.environ.get("PYTHONPATH") else "cd ~  # or where no copy is")  # fmt: skip
    else:
        yield Finding("deepseek_ft", "ok", f"{__version__} from {copies[0]}")


def _copies() -> list[Path]:
    """Folders that hold a `deepseek_ft`, first the one in use."""
    folders = [_PACKAGE_PARENT, *(Path(entry or ".") for entry in sys.path)]
    try:
        origin = json.loads(metadata.distribution("deepseek_ft").read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folders.append(Path(origin["url"].removeprefix("file://")))
    except metadata.PackageNotFoundError:
        pass
    return list(dict.fromkeys(f.resolve() for f in folders if (f / "deepseek_ft" / "__init__.py").is_file()))


def _requirements() -> list[str]:
    try:
        return metadata.requires("deepseek_ft") or []
    except metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pins() -> dict[str, str]:
    """The tested set, where it is at hand."""
    if not _CONSTRAINTS.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def _packages(seen: _Seen) -> Iterator[Finding]:
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in _requirements()]
    if not requirements:
        yield Finding("packages", "warn", "deepseek_ft is not installed, so nothing says which versions it needs",
                      f"{_PIP} -c {shlex.quote(str(_CONSTRAINTS))} -e {shlex.quote(str(_PACKAGE_PARENT))}")  # fmt: skip
        return
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong = []
    for requirement in needed:
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version or "missing"))
    if wrong:
        constraints = f" -c {shlex.quote(str(_CONSTRAINTS))}" if _CONSTRAINTS.is_file() else ""
        yield Finding("packages", "fail", "; ".join(f"{r.name} {v}, needed {r.specifier}" for r, v in wrong),
                      f"{_PIP}{constraints} " + " ".join(f"'{r.name}{r.specifier}'" for r, _ in wrong))  # fmt: skip
    else:
        shown = ", ".join(f"{name} {_installed(name)}" for name in ("torch", "transformers", "deepspeed", "accelerate"))
        yield Finding("packages", "ok", f"all {len(needed)} in range: {shown}")


def _tested_set(seen: _Seen) -> Iterator[Finding]:
    pins = _pins()
    if not pins:
        return
    # A local part, as in 2.13.0+cpu, is another build of the same version.
    versions = {name: (_installed(name) or "").partition("+")[0] for name in pins}
    other = [
        f"{name} {versions[name]} (tested: {pin})" for name, pin in pins.items() if versions[name] not in ("", pin)
    ]
    if other:
        yield Finding("tested set", "warn", "in range, but not what the tests ran on: " + ", ".join(other),
                      f"{_PIP} -c {shlex.quote(str(_CONSTRAINTS))} -e {shlex.quote(str(_PACKAGE_PARENT))}")  # fmt: skip
    else:
        yield Finding("tested set", "ok", f"every installed package of {_CONSTRAINTS} has the tested version")


# ----------------------------------------------------------------------------------------------- cards and driver


def _driver_present() -> bool:
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() or bool(shutil.which("nvidia-smi"))


def _nvidia_hardware() -> bool:
    """An NVIDIA display controller on the bus, whether or not a driver knows it."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            maker, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
            if maker == "0x10de" and kind.startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def _read_driver_guarded() -> _Driver:
    if not _driver_present():
        return _Driver()
    try:
        return _within(8, _read_driver)
    except (Exception, SystemExit) as error:
        return _Driver(present=True, error=first_line(error))


def _read_driver() -> _Driver:
    import pynvml

    pynvml.nvmlInit()
    cards = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        cards.append(_read_card(pynvml, index, handle))
    version, cuda = _quietly(pynvml.nvmlSystemGetDriverVersion), _quietly(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    pynvml.nvmlShutdown()
    return _Driver(True, version, (cuda // 1000, cuda % 1000 // 10) if cuda else None, tuple(cards))


def _quietly(call: Callable, *arguments):
    """None where a card or a driver does not tell."""
    try:
        return call(*arguments)
    except Exception:
        return None


def _read_card(pynvml, index: int, handle) -> _Card:
    def ask(call: str):
        return _quietly(lambda: getattr(pynvml, call)(handle))

    processes = {}
    for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        processes |= {p.pid: p.usedGpuMemory for p in ask(call) or ()}
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return _Card(
        Gpu(str(index), pynvml.nvmlDeviceGetName(handle), int(memory.total),
            compute_capability=ask("nvmlDeviceGetCudaComputeCapability")),
        link=(ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetCurrPcieLinkWidth"),
              ask("nvmlDeviceGetMaxPcieLinkGeneration"), ask("nvmlDeviceGetMaxPcieLinkWidth")),
        used_bytes=int(getattr(memory, "used", 0)),
        processes=tuple(sorted(processes.items())),
    )  # fmt: skip


_NVML_CURES = {
    "mismatch": "sudo reboot  # the driver was updated under a running kernel module",
    "not loaded": "sudo modprobe nvidia  # after a kernel update the driver may have to be installed again",
    "not found": "ldconfig -p | grep nvidia-ml  # in a container, start it with: docker run --gpus all ...",
}


def _gpus(seen: _Seen) -> Iterator[Finding]:
    driver = seen.driver
    if driver.error:
        cure = next((cure for sign, cure in _NVML_CURES.items() if sign in driver.error.lower()), "nvidia-smi")
        yield Finding("GPUs", "fail", f"there is an NVIDIA driver, but it does not work: {driver.error}", cure)
        return
    if not driver.cards:
        if _nvidia_hardware():
            yield Finding("GPUs", "fail", "an NVIDIA card is in the machine, but no driver",
                          "sudo ubuntu-drivers install && sudo reboot  # Ubuntu; elsewhere the system's own way")  # fmt: skip
        else:
            yield Finding("GPUs", "warn", "none: CPU ranks only, for trials; links, NCCL and P2P are not looked at")
        return
    says = f"driver {driver.version or 'of unknown version'}"
    if driver.cuda:
        says += f", for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if not seen.gpus:
        why = "DS_ACCELERATOR" if os.environ.get("DS_ACCELERATOR", "").lower() == "cpu" else "CUDA_VISIBLE_DEVICES"
        value = os.environ.get(why, "")
        yield Finding("GPUs", "warn", f"{len(driver.cards)} cards, none of them visible: {why}={value!r}; {says}",
                      f"unset {why}")  # fmt: skip
    else:
        names = sorted({gpu.name for gpu in seen.gpus})
        hidden = len(driver.cards) - len(seen.gpus)
        some = f"; {hidden} more hidden by CUDA_VISIBLE_DEVICES" if hidden else ""
        yield Finding("GPUs", "ok", f"{len(seen.gpus)} x {' and '.join(names)}, {says}{some}")
    for card in driver.cards:
        yield _card(card)


def _card(card: _Card) -> Finding:
    gpu = card.gpu
    says = f"{gpu.name}, {_gib(card.used_bytes)} of {_gib(gpu.memory_bytes)} used"
    if gpu.compute_capability:
        says += ", compute capability {}.{}".format(*gpu.compute_capability)
    others = [(pid, size) for pid, size in card.processes if pid != os.getpid()]
    cures, state = [], "ok"
    if not gpu.has_bf16:
        state, says = "warn", says + ", no bf16: train in fp16"
        cures.append("deepseek-ft train RECIPE train.precision=fp16")
    if others:
        says += "; used by " + ", ".join(
            f"{_process_name(pid)} ({pid}" + (f", {size / MIB:.0f} MiB)" if size else ")") for pid, size in others
        )
    elif card.used_bytes > GIB:  # NVML names no processes across the walls of a container
        says += "; used by a process that cannot be seen from here"
    if card.used_bytes > GIB:
        state = "warn"
        cures += [f"ps -fp {','.join(str(pid) for pid, _ in others)}  # then end what is not needed" if others
                  else "nvidia-smi  # on the host"]  # fmt: skip
    return Finding(f"GPU {gpu.index}", state, says, "; ".join(cures) or None)


def _process_name(pid: int) -> str:
    import psutil

    return _quietly(lambda: psutil.Process(pid).name()) or "a process of another user"


# ------------------------------------------------------------------------------------------- torch and the builds


def _torch(seen: _Seen) -> Iterator[Finding]:
    torch, driver = seen.parts["torch"], seen.driver
    version = _pins().get("torch") or (_installed("torch") or "").partition("+")[0]
    reinstall = f"{_PIP} --force-reinstall torch=={version}" if version else f"{_PIP} torch"
    if "error" in torch:
        yield Finding("torch", "fail", f"does not work: {torch['error']}", reinstall)
        return
    says = f"{torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "a build for the CPU")
    if not driver.cards or driver.error:
        yield Finding("torch", "ok", says)
    elif not torch["cuda"]:
        yield Finding("torch", "fail", f"{says}, on a machine with GPUs", reinstall)
    elif driver.cuda and int(torch["cuda"].split(".")[0]) > driver.cuda[0]:
        yield Finding("torch", "fail", f"{says} is newer than the driver, which ends at CUDA {driver.cuda[0]}.{driver.cuda[1]}",
                      "sudo ubuntu-drivers install && sudo reboot  # or a torch for an older CUDA: "
                      "https://pytorch.org/get-started/previous-versions")  # fmt: skip
    elif seen.gpus and not torch["available"]:
        yield Finding("torch", "fail", f"{says}, NVML sees {len(seen.gpus)} cards and torch none: {torch['why']}",
                      "sudo modprobe nvidia_uvm  # when that does not help: sudo reboot")  # fmt: skip
    elif unfit := [g.name for g in seen.gpus if not _runs_on(torch["archs"], g.compute_capability)]:
        yield Finding("torch", "fail", f"{says} was not built for {', '.join(sorted(set(unfit)))} (it has "
                      f"{' '.join(torch['archs'])})", reinstall)  # fmt: skip
    else:
        yield Finding("torch", "ok", f"{says}, {len(torch['cards'])} cards, NCCL {torch['nccl'] or 'missing'}")


def _runs_on(archs: Sequence[str], capability: tuple[int, int] | None) -> bool:
    """Machine code runs on its own and later minor versions; PTX (`compute_`) on everything later."""
    if not archs or capability is None:
        return True
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if built <= tuple(capability) and (match[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def _nvcc(seen: _Seen) -> Iterator[Finding]:
    if not seen.driver.cards:
        yield Finding("nvcc", "ok", "not needed without a GPU")
        return
    cuda = seen.parts["torch"].get("cuda")
    if not cuda:
        return  # torch's own line says it
    found = _nvcc_version()
    # DeepSpeed 0.19 compiles cpu_adam with the C++ compiler alone, also on a machine with cards.
    harm = "DeepSpeed's CUDA ops (such as fused_adam, in a DeepSpeed file of your own) cannot be built; cpu_adam can"
    package = "sudo apt-get install cuda-nvcc-" + "-".join(cuda.split(".")[:2])
    if found is None:
        yield Finding("nvcc", "warn", f"not found: {harm}",
                      f"{package}  # or, in that file's optimizer.params: \"torch_adam\": true")  # fmt: skip
    elif found.split(".")[0] != cuda.split(".")[0]:
        yield Finding("nvcc", "warn", f"{found}, and torch has CUDA {cuda}: {harm}",
                      f"{package} && export CUDA_HOME=/usr/local/cuda-{'.'.join(cuda.split('.')[:2])}")  # fmt: skip
    elif found != ".".join(cuda.split(".")[:2]):
        yield Finding("nvcc", "ok", f"{found}, close enough to torch's CUDA {cuda} for ops built at first use; "
                      "DS_SKIP_CUDA_CHECK=1 for those that DeepSpeed builds at its installation")  # fmt: skip
    else:
        yield Finding("nvcc", "ok", f"{found}, as torch's CUDA")


def _nvcc_version() -> str | None:
    """The major.minor of the nvcc that torch would use."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc")
    try:
        said = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", said)
    return match[1] if match else None


_BUILD_CURES = {part: f"{_PIP} ninja" if part == "ninja" else f"sudo {cure}" for part, cure in ops.CURES.items()}


def _compiler(seen: _Seen) -> Iterator[Finding]:
    built = [op for op in ("shm_comm", "cpu_adam") if ops.is_built(op)]
    unbuilt = [op for op in ("shm_comm", "cpu_adam") if op not in built]
    says = f"built already: {', '.join(built) or 'nothing'}"
    missing = ops.missing_for_builds()
    if not missing:
        rest = f"; {' and '.join(unbuilt)} will take about a minute each, once" if unbuilt else ""
        yield Finding("compiler", "ok", f"a C++ compiler, ninja and Python.h for DeepSpeed's ops; {says}{rest}")
        return
    harm = f"{' and '.join(unbuilt)} cannot be built" if unbuilt else "other versions' ops could not be built"
    yield Finding("compiler", "warn", f"{' and '.join(missing)} missing, {harm}; {says}",
                  " && ".join(_BUILD_CURES[part] for part in missing))  # fmt: skip


def _build_locks(seen: _Seen) -> Iterator[Finding]:
    locks = ops.locks()
    stale = [str(lock) for lock, is_stale in locks.items() if is_stale]
    held = [str(lock) for lock, is_stale in locks.items() if not is_stale]
    if stale:
        yield Finding("build locks", "warn", f"left by a build that was killed, and every run that needs the op waits for "
                      f"ever: {', '.join(stale)}", "deepseek-ft doctor --clear-locks")  # fmt: skip
    elif held:
        yield Finding("build locks", "ok", f"a build is going on: {', '.join(held)}")
    else:
        yield Finding("build locks", "ok", "none")


# --------------------------------------------------------------------------------------------- between the cards


def _nccl(seen: _Seen) -> Iterator[Finding]:
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    if len(seen.gpus) < 2:
        return
    ada = any(gpu.has_no_p2p for gpu in seen.gpus)
    own = {name: os.environ[name] for name in names if name in os.environ}
    if not ada:
        yield Finding("NCCL", "ok", "set by you: " + " ".join(f"{n}={v}" for n, v in own.items()) if own
                      else "nothing to set for these cards")  # fmt: skip
        return
    wrong = [name for name, value in own.items() if value != "1"]
    old = seen.driver.version and _numbers(seen.driver.version) < (550, 40, 7)
    export = f"export {' '.join(f'{name}=1' for name in names)}"
    if wrong:
        yield Finding("NCCL", "warn", "RTX 40 cards have no peer-to-peer, and your own value is kept: the first collective "
                      f"can hang with {' '.join(f'{n}={own[n]}' for n in wrong)}", f"unset {' '.join(wrong)}")  # fmt: skip
    elif len(own) == len(names):
        yield Finding("NCCL", "ok", "RTX 40 cards have no peer-to-peer; both variables are set")
    elif not all(gpu.has_no_p2p for gpu in seen.gpus):
        yield Finding("NCCL", "warn", "some of the cards are RTX 40, which have no peer-to-peer; nothing is set by itself "
                      "for mixed cards", export)  # fmt: skip
    elif old:
        yield Finding("NCCL", "ok", f"RTX 40 cards have no peer-to-peer: `deepseek-ft train` sets {' and '.join(names)}. Under "
                      f"another launcher accelerate refuses a driver before 550.40.07 (this is {seen.driver.version})", export)  # fmt: skip
    else:
        yield Finding("NCCL", "ok", f"RTX 40 cards have no peer-to-peer: runs set {' and '.join(names)} themselves")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _peer_copies(seen: _Seen) -> Iterator[Finding]:
    peer = seen.parts.get("peer")
    if peer is None:
        return
    if "error" in peer:
        yield Finding("P2P copies", "warn", f"not tested: {peer['error']}", "export NCCL_P2P_DISABLE=1")
        return
    direct = f"{len(peer['access'])} of {peer['pairs']} pairs have direct access"
    if peer["differ"]:
        pairs = ", ".join(f"{a} -> {b}" for a, b in peer["differ"])
        yield Finding("P2P copies", "fail", f"data changed on its way between cards: {pairs}; {direct}",
                      "export NCCL_P2P_DISABLE=1  # and switch the IOMMU off in the BIOS: torch's own copies are hit too")  # fmt: skip
    else:
        yield Finding("P2P copies", "ok", f"every pair of cards copies what it should; {direct}")
    words = Path("/proc/cmdline").read_text().split()
    if peer["access"] and os.environ.get("NCCL_P2P_DISABLE") != "1" and _iommu_translates(words):
        yield Finding("IOMMU", "warn", "on without iommu=pt: peer-to-peer through it is slow, and hangs on some boards",
                      "export NCCL_P2P_DISABLE=1  # or add iommu=pt to GRUB_CMDLINE_LINUX, sudo update-grub, reboot")  # fmt: skip


def _iommu_translates(kernel_words: Sequence[str]) -> bool:
    on = any(re.fullmatch(r"(intel|amd)_iommu=(\S+,)?on(,\S+)?", word) for word in kernel_words)
    return on and "iommu=pt" not in kernel_words


def _links(seen: _Seen) -> Iterator[Finding]:
    chosen = {gpu.index for gpu in seen.gpus}
    cards = [card for card in seen.driver.cards if card.gpu.index in chosen]
    for card in cards:
        now, lanes, best, most = card.link
        if lanes is None or most is None:
            yield Finding(f"PCIe {card.gpu.index}", "ok", "the link is hidden, as in a virtual machine")
            continue
        says = f"gen {now} x{lanes}, could be gen {best} x{most} (the generation drops when a card idles)"
        if lanes <= most // 4:
            yield Finding(f"PCIe {card.gpu.index}", "warn", f"{says}: offload and ZeRO wait for this link",
                          "sudo lspci -vv | grep -A40 NVIDIA | grep -i lnksta  # then another slot, or a shorter riser")  # fmt: skip
        else:
            yield Finding(f"PCIe {card.gpu.index}", "ok", says)
    pcie = seen.parts.get("pcie")
    if pcie is None:
        return
    if "error" in pcie:
        yield Finding("PCIe speed", "warn", f"not measured: {pcie['error']}")
        return
    slowest = min(*pcie["to_card"], *pcie["to_host"])
    each = ", ".join(f"{g.index}: {_rate(a)} to the card, {_rate(b)} back"
                     for g, a, b in zip(seen.gpus, pcie["to_card"], pcie["to_host"], strict=False))  # fmt: skip
    yield Finding("PCIe speed", "ok", f"all cards at once, pinned: {each}; pageable {_rate(pcie['pageable'])}",
                  measured={"pcie_bytes_per_second": slowest, "pageable_copy_bytes_per_second": pcie["pageable"]})  # fmt: skip


def _all_reduce(seen: _Seen) -> Iterator[Finding]:
    if seen.quick or len(seen.gpus) < 2 or not seen.parts["torch"].get("available"):
        return
    no_p2p = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if any("RTX 40" in g.name for g in seen.gpus) else {}
    answer = _ask(["all_reduce"], seconds=20, defaults=no_p2p)["all_reduce"]
    if "error" in answer:
        yield Finding("all-reduce", "fail", f"NCCL between {len(seen.gpus)} cards: {answer['error']}",
                      "NCCL_DEBUG=INFO NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1 deepseek-ft doctor")  # fmt: skip
        return
    rate = ring_bytes(answer["ranks"], answer["bytes"]) / answer["seconds"]
    yield Finding("all-reduce", "ok", f"{answer['bytes'] / MIB:.0f} MiB over {answer['ranks']} cards: {_rate(rate)} per card and "
                  "direction", measured={"collective_bytes_per_second": rate})  # fmt: skip


def ring_bytes(ranks: int, size: int) -> float:
    """Bytes that a ring all-reduce of `size` sends from each rank: reduce-scatter and all-gather, (W-1)/W each."""
    return 2 * (ranks - 1) / ranks * size


# --------------------------------------------------------------------------------------------------- the host


def _cpu(seen: _Seen) -> Iterator[Finding]:
    import psutil

    cores = _cores()
    models = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    says = f"{cores} cores of {models[1] if models else 'an unnamed processor'}"
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):  # no control group, or "max"
        allowed = cores
    if allowed < cores:
        yield Finding("CPU", "warn", f"{says}, but the container gets the time of {allowed:g}: more threads only get in each "
                      "other's way", f"export OMP_NUM_THREADS={max(1, int(allowed))}")  # fmt: skip
    elif not seen.quick and (busy := psutil.cpu_percent(interval=0.3)) > 30:
        yield Finding("CPU", "warn", f"{says}, {busy:.0f} % busy with other work: what is measured here comes out too slow",
                      "top  # and run this again when the machine is quiet")  # fmt: skip
    else:
        yield Finding("CPU", "ok", says)


def _memory(seen: _Seen) -> Iterator[Finding]:
    import psutil

    memory, swap, limit = psutil.virtual_memory(), psutil.swap_memory(), hardware.host_memory_bytes()
    says = f"{_gib(memory.total)}, {_gib(memory.available)} available, swap {_gib(swap.total)}"
    if limit < memory.total:
        says += f"; this container's limit is {_gib(limit)}"
    if memory.available < 2 * GIB:
        yield Finding("host memory", "warn", says, "ps -eo pid,rss,comm --sort -rss | head  # who has it")
    else:
        yield Finding("host memory", "ok", says)
    if not seen.quick:
        yield _memory_speed(memory.available)


def _memory_speed(available_bytes: int) -> Finding:
    """Every core copies its own piece; bytes read plus bytes written (a cache that reads before it writes not counted)."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy

    cores = _cores()
    size = min(max(512 * MIB, 2 * _last_cache_bytes()), GIB)  # source and target together, beyond the cache
    if available_bytes < 2 * size:
        return Finding("memory speed", "warn", f"not measured: it takes {_gib(size)}")
    pieces = [(numpy.ones(size // 2 // cores, numpy.uint8), numpy.zeros(size // 2 // cores, numpy.uint8))
              for _ in range(cores)]  # fmt: skip
    with ThreadPoolExecutor(cores) as threads:

        def copy_all() -> None:
            list(threads.map(lambda piece: numpy.copyto(piece[1], piece[0]), pieces))

        copy_all()
        seconds = min(timed(copy_all)[0] for _ in range(3))
    rate = 2 * sum(source.nbytes for source, _ in pieces) / seconds
    return Finding("memory speed", "ok", f"{_rate(rate)}, reads and writes of a copy on {cores} cores",
                   measured={"dram_bytes_per_second": rate})  # fmt: skip


def _last_cache_bytes() -> int:
    """Of one socket; 0 when unknown."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


def _adam(seen: _Seen) -> Iterator[Finding]:
    adam = seen.parts.get("adam")
    if adam is None:
        return
    if "error" in adam:
        library = ops.built_library("cpu_adam")
        if library and adam.get("crashed"):
            yield Finding("CPU Adam", "fail", f"DeepSpeed's cpu_adam {adam['error']}; it may have been built on another processor",
                          f"rm -r {shlex.quote(str(library.parent))}  # the next run builds it again")  # fmt: skip
        else:
            yield Finding("CPU Adam", "warn", f"not measured: {adam['error']}")
        return
    constants = {"cpu_adam_core_seconds_per_parameter": adam["core_seconds"] / adam["parameters"]}
    says = (f"{adam['which']}: {adam['parameters'] / adam['seconds'] / 1e9:.2f} billion parameters per second on "
            f"{adam['threads']} threads")  # fmt: skip
    scan = seen.parts.get("scan", {})
    if "core_seconds" in scan:
        constants["fp16_scan_core_seconds_per_parameter"] = scan["core_seconds"] / scan["parameters"]
        says += f"; fp16 overflow scan {scan['parameters'] / scan['seconds'] / 1e9:.2f} billion"
    yield Finding("CPU Adam", "ok", says, measured=constants)


def _shared_memory(seen: _Seen) -> Iterator[Finding]:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding("shared memory", "warn", "no /dev/shm: NCCL, DeepSpeed's CPU collectives and data loaders need it",
                      "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm")  # fmt: skip
        return
    says = f"/dev/shm {_gib(total)}, {_gib(free)} free"
    if total < GIB:
        yield Finding("shared memory", "warn", f"{says}: NCCL, DeepSpeed's CPU collectives and data loaders run out of it",
                      "docker run --shm-size=8g ...  # without docker: sudo mount -o remount,size=8g /dev/shm")  # fmt: skip
    elif free < GIB:
        yield Finding("shared memory", "warn", f"{says}: files left behind fill it", "ls -lS /dev/shm")
    else:
        yield Finding("shared memory", "ok", says)


def _pinned_memory(seen: _Seen) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:.0f} MiB"
    pinned = seen.parts.get("pinned")
    if pinned is None:
        yield Finding("pinned memory", "ok", f"ulimit -l is {limit}; pinning was not tried" +
                      ("" if seen.gpus else ": it needs a card"))  # fmt: skip
    elif "error" in pinned:
        yield Finding("pinned memory", "warn", f"1 GiB could not be pinned: {pinned['error']}; ulimit -l is {limit}",
                      "ulimit -l unlimited  # docker run --ulimit memlock=-1 ...")  # fmt: skip
    else:
        yield Finding("pinned memory", "ok", f"1 GiB pinned in {pinned['seconds']:.1f} s; ulimit -l is {limit}; torch rounds a "
                      "pinned block up to a power of two")  # fmt: skip


def _disk(seen: _Seen) -> Iterator[Finding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    says = f"{_gib(free)} free in {here}"
    if not os.access(here, os.W_OK):
        yield Finding(
            "disk", "fail", f"{here} cannot be written, and runs are written there", "cd ~  # or output_dir=..."
        )
    elif free < 2 * GIB:
        yield Finding("disk", "fail", f"only {says}", f"du -xh {shlex.quote(str(here))} | sort -h | tail")
    else:
        small = free < 20 * GIB
        yield Finding("disk", "warn" if small else "ok",
                      f"{says}; a 7 B model to keep takes 13 GiB, a checkpoint to go on from about 90",
                      "deepseek-ft train RECIPE output_dir=/a/larger/disk" if small else None)  # fmt: skip
        if not seen.quick:
            yield _disk_speed(here)
    yield from _caches()


def _caches() -> Iterator[Finding]:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    folders = {"HF_HOME": Path(os.environ.get("HF_HOME") or default).expanduser(),
               "DEEPSEEK_FT_CACHE": hardware.measured_file().parent}  # fmt: skip
    says, closed = [], []
    for name, folder in folders.items():
        parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        says.append(f"{_gib(shutil.disk_usage(parent).free)} free in {folder}")
        if not os.access(parent, os.W_OK):
            closed.append(name)
    if closed:
        yield Finding("caches", "warn", f"{', '.join(says)}; not to be written: {', '.join(closed)}",
                      "export " + " ".join(f"{name}=$PWD/cache" for name in closed))  # fmt: skip
    else:
        yield Finding("caches", "ok", ", ".join(says))


def _disk_speed(folder: Path, pieces: int = 4, patience_seconds: float = 5) -> Finding:
    piece = os.urandom(64 * MIB)  # a file system that compresses gains nothing
    written, started = 0, time.perf_counter()
    try:
        # A file without a name: whatever ends this process, nothing is left.
        with tempfile.TemporaryFile(dir=folder) as file:
            while written < pieces * len(piece) and time.perf_counter() - started < patience_seconds:
                written += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        return Finding("disk speed", "fail", f"writing {folder} failed: {first_line(error)}",
                       f"df -h {shlex.quote(str(folder))}")  # fmt: skip
    rate = written / (time.perf_counter() - started)
    return Finding(
        "disk speed", "ok", f"{rate / 1e6:,.0f} MB/s written", measured={"disk_write_bytes_per_second": rate}
    )


def _limits(seen: _Seen) -> Iterator[Finding]:
    def shown(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"

    def short(value: int) -> bool:
        return value != resource.RLIM_INFINITY and value < 4096

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    cures = []
    if short(files):
        enough = most == resource.RLIM_INFINITY or most >= 65536
        cures.append("ulimit -n 65536" if enough else f"ulimit -n {most}  # the most that this shell may")
    if short(processes):
        cures.append("ulimit -u 65536")
    yield Finding("limits", "warn" if cures else "ok", f"{shown(files)} open files, {shown(processes)} processes",
                  " && ".join(reversed(cures)) or None)  # fmt: skip


# --------------------------------------------------------------------------------------- the world around a run


def _port(seen: _Seen, port: int = 29500) -> Iterator[Finding]:
    holder = launch.port_holder(port)
    if holder is None:
        yield Finding("port", "ok", f"{port} is free")
    else:
        yield Finding("port", "warn", f"{port} is taken{holder}; `deepseek-ft train` finds a free one, the deepspeed launcher "
                      "and torchrun stop", f"deepspeed --master_port={port + 1} ...")  # fmt: skip


def _hub(seen: _Seen) -> Iterator[Finding]:
    from urllib.parse import urlsplit

    token = "a token is set" if _has_token() else "no token"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            yield Finding("hub", "ok", f"offline by choice: {name}={os.environ[name]}")
            return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    target = urlsplit(proxy if proxy is None or "://" in proxy else f"http://{proxy}") if proxy else urlsplit(endpoint)
    port = target.port or (443 if target.scheme == "https" else 1080 if "socks" in target.scheme else 80)
    where = f"the proxy {target.hostname}:{port}, on the way to {endpoint}," if proxy else endpoint
    try:
        with socket.create_connection((target.hostname, port), timeout=3):
            yield Finding("hub", "ok", f"{where} answers; {token}")
    except OSError as error:
        cure = ("export HTTPS_PROXY=http://HOST:PORT  # the one that works" if proxy else
                "export HF_ENDPOINT=https://hf-mirror.com  # or local folders as model.path and data.path")  # fmt: skip
        yield Finding("hub", "warn", f"{where} cannot be reached: {error.strerror or error}; {token}", cure)


def _has_token() -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    return bool(os.environ.get("HF_TOKEN")) or Path(os.environ.get("HF_TOKEN_PATH") or home / "token").is_file()


def _environment(seen: _Seen) -> Iterator[Finding]:
    harm = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith("ACCELERATE_"):
            harm[name] = "accelerate reads it before the recipe, and can drop DeepSpeed in silence"
        elif name == "DS_ACCELERATOR" and seen.driver.cards and value.lower() != "cuda":
            harm[name] = "DeepSpeed leaves the cards alone"
        elif name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            harm[name] = "left by a launcher; a run can take itself for one of several ranks"
        elif name == "CUDA_VISIBLE_DEVICES" and seen.driver.cards and value.strip() in ("", "-1"):
            harm[name] = "hides all cards"
        elif name == "OMP_NUM_THREADS" and value == "1" and _cores() > 1:
            harm[name] = "CPU Adam on one core"
        elif name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
            harm[name] = "every kernel is waited for"
        elif name == "PYTORCH_NO_CUDA_MEMORY_CACHING" and value not in ("", "0"):
            harm[name] = "every tensor is a cudaMalloc"
    if harm:
        yield Finding("environment", "warn", "; ".join(f"{name}={os.environ[name]}: {why}" for name, why in harm.items()),
                      f"unset {' '.join(harm)}")  # fmt: skip
    else:
        yield Finding("environment", "ok", "no variable that changes a run in silence")


_CHECKS: dict[str, Callable[[_Seen], Iterator[Finding]]] = {
    "Python": _python,
    "packages": _packages,
    "tested set": _tested_set,
    "GPUs": _gpus,
    "torch": _torch,
    "nvcc": _nvcc,
    "compiler": _compiler,
    "build locks": _build_locks,
    "NCCL": _nccl,
    "P2P copies": _peer_copies,
    "PCIe": _links,
    "all-reduce": _all_reduce,
    "shared memory": _shared_memory,
    "CPU": _cpu,
    "host memory": _memory,
    "CPU Adam": _adam,
    "pinned memory": _pinned_memory,
    "disk": _disk,
    "limits": _limits,
    "port": _port,
    "hub": _hub,
    "environment": _environment,
}


# --------------------------------------------------------------------------------------- the child that has torch


def _ask(parts: Sequence[str], seconds: float, defaults: Mapping[str, str] | None = None) -> dict[str, dict]:
    """The answers of a child process to `parts`, in this order; `error` where it gave none.

    Args:
        defaults: for its environment, where the user has set nothing.
    """
    environment = {**(defaults or {}), **os.environ}
    environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": str(_cores())}
    if "site-packages" not in _PACKAGE_PARENT.parts:  # a checkout that was never installed
        paths = [environment.get("PYTHONPATH"), str(_PACKAGE_PARENT)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "deepseek_ft.measure", *parts], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        return _answers(parts, "", first_line(error))
    try:
        said, complaints = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return _answers(parts, child.communicate()[0], f"no answer within {seconds:.0f} s")
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode < 0:
        return _answers(parts, said, f"ended by {signal.Signals(-child.returncode).name}", crashed=True)
    last = complaints.strip().splitlines()[-1:] or ["it said nothing"]
    return _answers(parts, said, f"exit code {child.returncode}: {last[0][:200]}")


def _answers(parts: Sequence[str], said: str, end: str, crashed: bool = False) -> dict[str, dict]:
    """One answer for each part: the one in `said`, or how the child ended for the part that it ended in."""
    answers = {}
    for line in said.splitlines():
        if line.startswith('{"part": '):  # libraries print there too
            answer = _quietly(json.loads, line) or {}
            answers[answer.pop("part", None)] = answer
    if "error" in answers.get("torch", {}):
        end, crashed = "torch does not work", False
    for part in parts:
        if part not in answers:
            answers[part] = {"error": end, "crashed": crashed}
            end, crashed = "torch did not come that far", False
    return answers
