"""Start the ranks, pass on what they say, and stop them. The only room that writes environment variables, and
only for processes that it starts (or that a launcher started for nothing else than this run)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from . import errors
from .config import Config
from .errors import ConfigError, PlanError, RunError
from .hardware import Hardware
from .planner import Plan

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# accelerate reads these before Trainer's own arguments; one left over from another project drops DeepSpeed in silence.
_ACCELERATE = "ACCELERATE_"
_ERROR_FILE = "DEEPSEEK_FT_ERROR_FILE"
_meeting: Any = None
_PACKAGE_PARENT = Path(__file__).resolve().parents[1]


def launched_ranks() -> int | None:
    """How many ranks a launcher (deepspeed, torchrun) started, when this process is one of them."""
    if all(os.environ.get(name) for name in _RANK_VARIABLES):
        size = os.environ["WORLD_SIZE"]
        if not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"WORLD_SIZE={size!r} in the environment is no number of ranks; run: unset WORLD_SIZE RANK"
            )
        return int(size)
    return None


def read_hostfile(hostfile: str) -> tuple[int, bool]:
    """How many ranks a DeepSpeed hostfile stands for (the sum of its `host slots=N` lines), and whether all are here.

    Raises:
        ConfigError: there is no such file, or a line says something else.
    """
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile: {hostfile} cannot be read: {error}") from None
    slots, hosts = 0, set()
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise ConfigError(f"{hostfile}:{number}: got {line!r}; a line is like `worker-1 slots=3`")
        hosts.add(match[1])
        slots += int(match[2])
    if not slots:
        raise ConfigError(f"{hostfile} names no slots; a line is like `worker-1 slots=3`")
    return slots, hosts <= {"localhost", "127.0.0.1"}


def is_main_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ----------------------------------------------------------------------------------------------- environment


def _defaults(hardware: Hardware, ranks_here: int, one_host: bool) -> dict[str, str]:
    """What a rank should find in its environment unless the user has set it."""
    values = {
        "OMP_NUM_THREADS": str(max(1, hardware.cores // max(1, ranks_here))),
        "TOKENIZERS_PARALLELISM": "true",  # said, so that the library does not warn of a fork that comes after it
    }
    if hardware.device == "cpu":
        values["DS_ACCELERATOR"] = "cpu"
        values["OMP_WAIT_POLICY"] = "passive"  # ranks share the cores: a thread that spins takes them from the others
        if one_host:
            values["GLOO_SOCKET_IFNAME"] = "lo"
    elif "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and _knows_round_threshold():
        # Blocks of pinned memory above 1 MiB are not rounded up to a power of two, which for offloaded states is tens of GiB. Read off
        # torch 2.13's CachingHostAllocator.h; not measured on a card, so the plan still counts the rounding.
        values["PYTORCH_ALLOC_CONF"] = "pinned_max_round_threshold_mb:1"
    if hardware.needs_no_p2p:
        values |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    if shutil.which("ninja") is None:  # a virtual environment that is used without being activated
        values["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return values


def _knows_round_threshold() -> bool:
    """Older versions refuse words of PYTORCH_ALLOC_CONF that they do not know."""
    try:
        return tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) >= (2, 13)
    except (PackageNotFoundError, ValueError):
        return False


def child_environment(config: Config, plan: Plan, ranks_here: int) -> tuple[dict[str, str], list[str]]:
    """The environment of the processes of a run, and notes on what was decided in it."""
    notes = []
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and k != "LOCAL_SIZE"}
    dropped = sorted(k for k in environment if k.startswith(_ACCELERATE))
    for name in dropped:
        del environment[name]
    if dropped:
        notes.append(f"{', '.join(dropped)} left out of the ranks' environment: it would override the recipe")
    for name, value in _defaults(plan.hardware, ranks_here, one_host=True).items():
        if name == "PATH" or name not in environment:
            environment[name] = value
            if name == "NCCL_P2P_DISABLE":
                notes.append(
                    "RTX 40 cards have no peer-to-peer: NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 set for the ranks"
                )
    if plan.device == "cuda":
        cards = [gpu.index for gpu in plan.hardware.gpus[: plan.cards]]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, in which the cards were counted
        if len(cards) < len(plan.hardware.gpus):
            notes.append(f"{len(cards)} of {len(plan.hardware.gpus)} visible GPUs used: {', '.join(cards)}")
    if _needs_hub(config) and "HF_HUB_OFFLINE" not in environment and not hub_answers():
        environment["HF_HUB_OFFLINE"] = "1"
        notes.append("the Hugging Face hub does not answer: only what is in its local cache can be used")
    if "site-packages" not in _PACKAGE_PARENT.parts:  # a checkout that was never installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), environment.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment, notes


def adopt_rank_environment(config: Config, plan: Plan) -> None:
    """In a rank that somebody else's launcher started: fill in what is missing, refuse what would be ignored.

    Raises:
        ConfigError: the environment would drop DeepSpeed.
        PlanError: the launcher's port is taken.
    """
    conflicting = sorted(k for k in os.environ if k.startswith(_ACCELERATE))
    if conflicting:
        raise ConfigError(
            f"{', '.join(conflicting)} in the environment would override the recipe (accelerate reads it first and can drop "
            f"DeepSpeed in silence); run: unset {' '.join(conflicting)}"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or plan.world_size)
    one_host = os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    for name, value in _defaults(plan.hardware, local, one_host).items():
        # torchrun puts OMP_NUM_THREADS=1 there itself, which leaves CPU Adam on one core.
        from_torchrun = (
            name == "OMP_NUM_THREADS" and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(name) == "1"
        )
        if name == "PATH" or name not in os.environ or from_torchrun:
            os.environ[name] = value
    if plan.device == "cuda" and local > len(plan.hardware.gpus):
        raise PlanError(f"the launcher started {local} ranks here, but {len(plan.hardware.gpus)} GPUs are visible "
                        f"({plan.hardware.describe()})")  # fmt: skip
    if _needs_hub(config) and "HF_HUB_OFFLINE" not in os.environ and not hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if is_main_rank() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # otherwise the launcher's own store is there
        _check_port(int(os.environ["MASTER_PORT"]))
    if not plan.strategy.many_ranks:  # accelerate would wrap the model for ranks that are not there
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)


def own_card() -> None:
    """In a rank, before CUDA is looked at: of the cards its own is the only one that there is (not run with cards yet)."""
    local = int(os.environ["LOCAL_RANK"])
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = cards.split(",")[local] if cards else str(local)


def stand_alone() -> dict[str, str]:
    """In a rank whose group is formed: nothing in its environment says any more that it is one, so that accelerate neither wraps
    the model nor cuts the data.

    Returns:
        What said so; for `stand_as_before`.
    """
    return {name: os.environ.pop(name) for name in (*_RANK_VARIABLES, "LOCAL_SIZE", "LOCAL_WORLD_SIZE") if name in os.environ}


def stand_as_before(hidden: Mapping[str, str]) -> None:
    """The script that called may look there."""
    os.environ.update(hidden)


def port_holder(port: int) -> str | None:
    """None when the port is free, else who listens there, as in ` by python (process 7)`; empty when that is hidden."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return None
        except OSError:
            pass
    import psutil

    holder = ""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN" and connection.pid:
                holder = f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return holder


def _check_port(port: int) -> None:
    holder = port_holder(port)
    if holder is not None:
        raise PlanError(f"port {port} is taken{holder}; start with another, as in deepspeed --master_port={port + 1} ..., or "
                        "use `deepseek-ft train`, which finds a free one")  # fmt: skip


def _needs_hub(config: Config) -> bool:
    from .data.sources import HUB

    names = [config.model.path, config.model.tokenizer or ""]
    by_name = any(n and n.count("/") == 1 and not n.startswith((".", "/", "~")) and not Path(n).exists() for n in names)
    sources = [*config.data.train, *config.data.eval]
    return by_name or any(s.source in HUB and not (s.path or config.data.path) for s in sources)


def hub_answers(timeout_seconds: float = 4) -> bool:
    """Whether the hub can be reached at all: its client would retry for most of a minute before it says no."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # only the client knows how to ask through a proxy
    from urllib.parse import urlsplit

    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        with socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=timeout_seconds):
            return True
    except OSError:
        return False


# -------------------------------------------------------------------------------------------------- processes


def _command(plan: Plan, words: Sequence[str], hostfile: str | None) -> list[str]:
    worker = ["-m", "deepseek_ft", *words]
    if hostfile:
        return [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile, "--module", *worker[1:]]
    if not plan.strategy.deepspeed and plan.world_size == 1:
        return [sys.executable, *worker]
    return [
        sys.executable, "-m", "deepseek_ft.launch", f"--nproc-per-node={plan.world_size}", "--nnodes=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0", *worker,
    ]  # fmt: skip


def run_worker(words: Sequence[str], environment: dict[str, str], log_file: Path | None = None) -> None:
    """One child process, such as the preparation before the ranks."""
    _run([sys.executable, "-m", "deepseek_ft", *words], environment, words[1], log_file)


def run_stages(config: Config, plan: Plan, stages: Sequence[str], task: str, hostfile: str | None = None,
               log_file: Path | None = None) -> None:  # fmt: skip
    """A run's stages, `worker STAGE TASK` each, one after another: `train` on every rank, the others in one process.

    CPU ranks are forks of one process that has imported the libraries (`fork_stages`): three ranks on two cores would be half a
    minute at it. A process that has looked for cards cannot be forked, so with cards each stage and rank is a new one.

    Args:
        log_file: where their output goes; None: where ours goes.

    Raises:
        RunError: a rank failed; the others have been stopped.
        KeyboardInterrupt: after the ranks have been stopped.
    """
    alone, _ = child_environment(config, plan, 1)
    for_ranks, _ = child_environment(config, plan, plan.world_size)
    if plan.device == "cpu" and hostfile is None:
        told = {"stages": list(stages), "task": task, "ranks": plan.world_size, "deepspeed": plan.strategy.deepspeed,
                "threads": {"train": int(for_ranks["OMP_NUM_THREADS"]), "else": int(alone["OMP_NUM_THREADS"])}}  # fmt: skip
        _run([sys.executable, "-m", "deepseek_ft", "worker", "stages", json.dumps(told)], alone, "the run", log_file)
        return
    for stage in stages:
        if stage == "train":
            _run(_command(plan, ["worker", stage, task], hostfile), for_ranks, "training", log_file)
        else:
            run_worker(["worker", stage, task], alone, log_file)


def _run(command: list[str], environment: dict[str, str], what: str, log_file: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="deepseek_ft_") as folder:
        error_file = Path(folder, "error.json")
        with open(log_file, "ab") if log_file is not None else contextlib.nullcontext() as output:
            code = _wait(command, environment | {_ERROR_FILE: str(error_file)}, output)
        if code == 0:
            return
        if error_file.is_file():
            told = json.loads(error_file.read_text(encoding="utf-8"))
            raise getattr(errors, told["type"])(told["message"])
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise RunError(f"{what} ended with {name}; the reason stands {'above' if log_file is None else f'in {log_file}'}")


def report_error(error: errors.DeepSeekFTError) -> bool:
    """In a worker: hand a user's error to the process that started it, which raises it as its own.

    Returns:
        False when nobody waits for it, and it must be shown here.
    """
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    try:
        with open(path, "x", encoding="utf-8") as file:  # the first rank to fail speaks for all
            json.dump({"type": type(error).__name__, "message": str(error)}, file)
    except FileExistsError:
        pass
    return True


STANDSTILL = (
    "a collective operation timed out: ranks waited for each other in vain. Either one of them stands still or is far behind "
    "(its last lines are above; swapping, a slow disk), or they do not do the same: of a mixture of experts under ZeRO-3 that "
    "is so when experts in a list are not gathered as a whole (docs/experts.md). py-spy dump --pid <rank> shows where a rank "
    "waits; strategy=zero2 gathers no weights"
)


def timed_out(error: BaseException) -> bool:
    """Whether a process group gave up waiting; in gloo's words or NCCL's."""
    signs = ("Timed out waiting", "collective operation timeout", "Watchdog caught collective")
    return any(sign in str(error) for sign in signs)


def _wait(command: list[str], environment: dict[str, str], output: BinaryIO | None = None) -> int:
    # In a session of its own: Ctrl-C reaches this process alone, which then stops the others in order.
    in_notebook = "ipykernel" in sys.modules and output is None  # there, file descriptors 1 and 2 are not the cell's output
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if in_notebook else output,
        stderr=subprocess.STDOUT if in_notebook or output is not None else None,
        text=in_notebook or None,
        encoding="utf-8" if in_notebook else None,
        errors="replace" if in_notebook else None,
    )
    try:
        if in_notebook:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
        return process.wait()
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen, patience_seconds: float = 20) -> None:
    """SIGTERM to the launcher, which passes it on to its ranks; then SIGKILL to whatever is left of the session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# ------------------------------------------------------------------------------------------- forks, for CPU ranks


def fork_stages(told: str, body: Callable[[list[str]], int]) -> int:
    """The body of `worker stages`: import what all stages need while the first is at work, then fork the others.

    Nothing else is done here, so that a fork finds no threads and no locks of anybody's.

    Args:
        body: of a stage; its words -> an exit code.

    Returns:
        The exit code of the first stage that failed, or 0.
    """
    import gc

    given = json.loads(told)
    for number, stage in enumerate(given["stages"]):
        ranks = given["ranks"] if stage == "train" else 1
        threads = given["threads"].get(stage, given["threads"]["else"])
        is_group = stage == "train" and (ranks > 1 or given["deepspeed"])  # DeepSpeed's one rank is one, too
        processes = _fork(ranks, functools.partial(body, [stage, given["task"]]), threads, is_group)
        if number == 0 and len(given["stages"]) > 1:
            import deepseek_ft.export
            import deepseek_ft.trainer  # noqa: F401

            if given["deepspeed"]:
                import deepspeed  # noqa: F401
            gc.freeze()  # a collection would copy the pages of everything it looks at
        if code := _join(processes):
            return code
    return 0


def _fork(ranks: int, body: Callable[[], int], threads: int, is_group: bool) -> list[BaseProcess]:
    """Processes that run the body, as the ranks of one group with a store to meet at, or as what they are."""
    import multiprocessing

    group: dict[str, str] = {}
    if is_group:
        from torch.distributed import TCPStore

        global _meeting  # as long as the ranks live
        _meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_meeting.port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                 "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip

    def begin(rank: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        die_with_parent(f"rank {rank}" if group else "stage")
        os.environ.update(group | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if group else {}))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # which has read it
            sys.modules["torch"].set_num_threads(threads)
        sys.exit(body())

    processes = [multiprocessing.get_context("fork").Process(target=begin, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def _join(processes: Sequence[BaseProcess]) -> int:
    """Wait for all; when one fails, stop the others and say which it was. The exit code of that one, or 0."""
    from multiprocessing.connection import wait

    try:
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            wait(running)
            if any(process.exitcode for process in processes):
                wait(running, timeout=0.2)  # who fails with it
                break
    finally:
        codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(20)
            if process.exitcode is None:
                process.kill()
    return _told(codes) if codes else 0


def _told(codes: Mapping[int, int]) -> int:
    """Say which rank ended a run, and how; the exit code of the whole.

    Args:
        codes: rank -> its exit code, or minus the signal that ended it.
    """
    # The rank that was killed is the cause; the others may have failed because it was gone.
    first, code = min(codes.items(), key=lambda item: item[1] > 0)
    if code < 0:
        sys.stderr.write(f"rank {first} was ended by {signal.Signals(-code).name}; the other ranks have been stopped\n")
        if -code == signal.SIGABRT:  # how NCCL's watchdog ends a rank whose collective does not come back
            sys.stderr.write(f"if NCCL's watchdog did it: {STANDSTILL}\n")
    elif code != 2:
        sys.stderr.write(f"rank {first} failed with exit code {code}; the other ranks have been stopped\n")
    return code if code > 0 else 1


def die_with_parent(name: str | None = None) -> None:
    """Ask Linux to end this process when its parent dies, so that a killed launcher leaves no ranks behind.

    Args:
        name: what `ps` and `top` are to call it: a fork has its parent's command line.
    """
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if name is not None:
            prctl(PR_SET_NAME, name.encode())


def payload(config: Config, **more) -> str:
    """A config and what else a worker needs, as one command-line word that also reaches other hosts."""
    from .config import to_dict

    return json.dumps({"config": to_dict(config), **more})


def main() -> int:
    """`python -m deepseek_ft.launch`: torchrun, whose failures end in one line instead of sixty."""
    die_with_parent()
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of this launcher; the ranks have their own
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        return _told({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
