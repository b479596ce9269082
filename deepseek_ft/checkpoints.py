"""What lies in a run's folder: which run may start there, and which checkpoint is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, to_dict
from .errors import CheckpointError, ConfigError, PlanError, listing
from .hardware import GIB
from .recipe import load_config
from .strategies import STRATEGIES

if TYPE_CHECKING:
    from .planner import Plan


_LOCK = ".lock"


def write_json(path: Path, value) -> None:
    """Written beside and renamed: a reader sees the old file or the new one, never half of one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict:
    """Empty when there is none, or none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def checkpoints(run_dir: Path) -> list[Path]:
    """`checkpoint-<step>` folders, newest first."""
    found = [(int(m[1]), p) for p in run_dir.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    return [p for _, p in sorted(found, reverse=True)]


def _broken_tensors(file: Path) -> str | None:
    """A safetensors file states its own length: 8 bytes, a JSON header, and data up to the last tensor's end."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as head:
            header = int.from_bytes(head.read(8), "little")
            tensors = json.loads(head.read(header)) if 0 < header < size else {}
        ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
        if ends and 8 + header + max(ends) == size:
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        pass
    return f"{file.name} is cut off or broken"


def _optimizer_files(checkpoint: Path) -> list[Path] | None:
    """DeepSpeed's optimizer states, one file a rank; None when DeepSpeed did not write this checkpoint."""
    try:
        tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return [] if list(checkpoint.glob("global_step*")) else None
    except (OSError, ValueError):
        return []
    return sorted((checkpoint / tag).glob("*_optim_states.pt")) if tag else []


def saved_ranks(checkpoint: Path) -> int | None:
    """How many ranks wrote the optimizer states; None when they are not sharded."""
    files = _optimizer_files(checkpoint)
    return None if files is None else len(files)


def incomplete(checkpoint: Path, ranks: int | None = None) -> str | None:
    """Why a checkpoint cannot be resumed from, or None. Trainer writes trainer_state.json last.

    Args:
        ranks: how many ranks the run had, if that is known.
    """
    state = read_json(checkpoint / "trainer_state.json")
    if not isinstance(state.get("global_step"), int):
        return "trainer_state.json is missing or broken: the save was cut off"
    if f"checkpoint-{state['global_step']}" != checkpoint.name:
        return f"trainer_state.json is of step {state['global_step']}"
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            return f"{index.name} is broken"
        weights = [checkpoint / str(name) for name in sorted(set(shards.values()))]
    else:
        weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        return "it holds no weights"
    for file in weights:
        if not file.is_file():
            return f"{file.name} is missing"
        if broken := _broken_tensors(file):
            return broken
    states = _optimizer_files(checkpoint)
    if staged := list(checkpoint.glob("optimizer-*-of-*.pt")):  # of a pipeline's stages
        count = int(staged[0].stem.rpartition("-")[2])
        states = [checkpoint / f"optimizer-{i:05d}-of-{count:05d}.pt" for i in range(1, count + 1)] + [checkpoint / "scheduler.pt"]
    elif states is None:
        states = [checkpoint / "optimizer.pt", checkpoint / "scheduler.pt"]
    elif not states:
        return "the optimizer states are missing"
    else:
        # Sharded by ZeRO they are told apart by the first number, in parts of matrices by the second.
        numbers = [(int(m[1]), int(m[2])) for f in states if (m := re.search(r"pp_rank_(\d+)_mp_rank_(\d+)_", f.name))]
        found = {max(pair) for pair in numbers}
        expected = set(range(ranks if ranks is not None else max(found, default=0) + 1))
        if found != expected:
            return f"optimizer states are there of ranks {sorted(found)}, not of all {len(expected)}"
    for file in states:
        if not file.is_file() or file.stat().st_size == 0:
            return f"{file.name} is missing or empty"
    return None


def newest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint to resume from, and what was passed over with the reason."""
    skipped = []
    plan = read_json(run_dir / "run.json").get("plan") or {}
    ranks = plan.get("world_size") if plan.get("deepspeed") is not None else None
    for checkpoint in checkpoints(run_dir):
        reason = incomplete(checkpoint, ranks)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint}: {reason}")
    return None, skipped


def _family(base: Path) -> Iterator[Path]:
    """`runs/x`, `runs/x-2`, `runs/x-3`, …"""
    yield base
    n = 2
    while True:
        yield base.with_name(f"{base.name}-{n}")
        n += 1


def free_folder(base: Path) -> Path:
    """The first of `x`, `x-2`, `x-3`, … that is not there."""
    return next(folder for folder in _family(base) if not folder.exists())


def _is_finished(run_dir: Path) -> bool:
    return read_json(run_dir / "run.json").get("status") == "finished"


def is_trained(run_dir: Path) -> bool:
    """Trained to its end, with only the check of the model folder missing or failed."""
    return read_json(run_dir / "run.json").get("status") in ("trained", "failed") and (run_dir / "model").is_dir()


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Keep a folder for this run while it goes, also before anything is written there. Ends with the process.

    Raises:
        CheckpointError: another run holds it.
    """
    from filelock import FileLock, Timeout

    made = [p for p in (run_dir, *run_dir.parents) if not p.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / _LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(
            f"{run_dir} belongs to a run that is still going; output_dir=... goes elsewhere"
        ) from None
    except OSError as error:
        raise CheckpointError(f"output_dir: {run_dir} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        (run_dir / _LOCK).unlink(missing_ok=True)
        lock.release()
        for folder in made:  # a run that never began leaves no empty folders
            with contextlib.suppress(OSError):
                folder.rmdir()


def _is_held(run_dir: Path) -> bool:
    from filelock import FileLock, Timeout

    if not (run_dir / _LOCK).exists():
        return False
    try:
        with FileLock(run_dir / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return True


def choose_run_dir(
    output_dir: str, resume: bool, new: bool, launched: bool = False
) -> tuple[Path, Path | None, list[str]]:
    """Where a run goes, the checkpoint it continues from, and notes. Nothing is created; nothing is ever reused.

    An empty or new folder is taken as it is. Beside finished runs, or ones that left no checkpoint, the next free
    name `<output_dir>-2`, `-3`, … is taken. An unfinished run with a checkpoint is somebody's work: the user says
    whether to continue it (`resume`) or to start another beside it (`new`).

    Args:
        launched: this is one of several ranks that choose at the same time, one of which may hold the folder already.

    Raises:
        CheckpointError: that has to be said first, or there is nothing to resume.
    """
    base = Path(output_dir)
    if base.name in ("", ".."):
        base = base.resolve()
    if not base.name:
        raise CheckpointError(f"output_dir: {output_dir!r} cannot be a run's folder; name one, such as runs/my-run")
    notes: list[str] = []
    existing = []
    try:
        for folder in _family(base):
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"output_dir: {folder} is a file, not a folder")
            empty = not folder.is_dir() or not any(p.name != _LOCK for p in folder.iterdir())
            if empty and (launched or not _is_held(folder)):
                free = folder
                break
            existing.append(folder)
        parent = next(p for p in (free, *free.resolve().parents) if p.exists())
    except OSError as error:
        raise CheckpointError(f"output_dir: {output_dir} cannot be used: {error.strerror}") from None
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"output_dir: {free} cannot be made, because {parent} is "
                              f"{'not writable' if parent.is_dir() else 'a file'}")  # fmt: skip
    unfinished = [f for f in existing if not _is_finished(f) and (checkpoints(f) or is_trained(f))]

    if resume and new:
        raise CheckpointError("resume and new exclude each other: continue the run, or start another beside it")
    if resume:
        if not unfinished:
            if not existing:
                why = f"there is no {base}"
            else:
                last = existing[-1]
                why = (
                    f"{last} is finished; a new run can start from it with model.path={last}/model"
                    if _is_finished(last)
                    else f"{last} has no checkpoint"
                )
            raise CheckpointError(f"nothing to resume: {why}")
        run_dir = unfinished[-1]
        if is_trained(run_dir):
            return run_dir, None, [f"{run_dir} is trained; only its model folder is still to be checked"]
        checkpoint, skipped = newest_complete(run_dir)
        if checkpoint is None:
            raise CheckpointError(listing(f"{run_dir} has no complete checkpoint to resume from", skipped))
        return run_dir, checkpoint, [f"passed over {s}" for s in skipped] + [f"resuming from {checkpoint}"]
    if unfinished and not new:
        has = (
            f"with {checkpoints(unfinished[-1])[0].name}"
            if checkpoints(unfinished[-1])
            else "whose model was not checked"
        )
        raise CheckpointError(
            f"{unfinished[-1]} holds an unfinished run {has} (or one that is still going).\n"
            "  --resume (resume=True) continues it; --new (new=True) starts another beside it; output_dir=... goes elsewhere."
        )
    if existing:
        notes.append(f"{base} is taken: this run goes to {free}")
    return free, None, notes


def offload_folder(config: Config, run_dir: Path) -> Path:
    """Where a run's offloaded states lie while it goes; no other run's."""
    if config.offload_dir is None:
        return run_dir / "offloaded"
    return Path(config.offload_dir, "_".join(run_dir.resolve().parts[1:]))


@contextlib.contextmanager
def offloaded_states(config: Config, run_dir: Path, used: bool) -> Iterator[None]:
    """Inside, a run may keep states in `offload_folder`; afterwards, however it ended, they are gone. Checkpoints have copies."""
    try:
        yield
    finally:
        if used:
            shutil.rmtree(offload_folder(config, run_dir), ignore_errors=True)


def check_offload_dir(config: Config, needed_bytes: int) -> None:
    """
    Raises:
        ConfigError: it cannot be written.
        PlanError: it has no room.
    """
    if config.offload_dir is None:
        return  # beside the run, which the plan has looked at
    folder = Path(config.offload_dir)
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"offload_dir: {folder} cannot be used, because {there} is {'not writable' if there.is_dir() else 'a file'}")
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        raise PlanError(f"offload_dir: zero3_nvme needs {needed_bytes / GIB:.1f} GiB in {folder}, and {free / GIB:.1f} are free")


def size_bytes(folder: Path) -> int:
    """Of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def as_begun(run_dir: Path, config: Config) -> Config:
    """`strategy: auto` resumed is what it was decided to be, whatever the machine's free disk or measured speed now say."""
    name = (read_json(run_dir / "run.json").get("plan") or {}).get("strategy")
    if config.strategy == "auto" and config.deepspeed is None and name in STRATEGIES:
        return dataclasses.replace(config, strategy=name)
    return config


_MAY_CHANGE = {"train.epochs", "train.max_steps", "train.log_steps", "train.eval_steps", "train.save_steps",
               "train.save_total_limit", "output_dir", "name", "strategy", "deepspeed", "data.cache_dir", "ranks", "offload_dir"}  # fmt: skip


def check_resume(run_dir: Path, checkpoint: Path, config: Config, plan: Plan) -> list[str]:
    """A resumed run continues this run: ranks, strategy and whatever shapes its curve must be what they were.

    Returns:
        Notes on what may change, but bends the curve.

    Raises:
        CheckpointError: the checkpoint is of other ranks, another strategy or batch, or beyond the last step.
        ConfigError: the recipe is another one.
    """
    before = read_json(run_dir / "run.json").get("plan") or {}
    ranks = saved_ranks(checkpoint) or before.get("world_size", plan.world_size)
    if ranks != plan.world_size:
        raise CheckpointError(
            f"{checkpoint} was written by {ranks} rank{'s' * (ranks > 1)}, and this run would have {plan.world_size}.\n"
            f"  Resume with ranks={ranks}, or start anew from its weights with model.path={checkpoint} --new "
            "(optimizer states and the place in the data are then lost)."
        )
    now = {"strategy": plan.strategy.name, "global_batch_size": plan.global_batch_size, "stages": list(plan.stages)}
    different = [f"{k}: {before[k]} then, {v} now" for k, v in now.items() if before.get(k, v) != v]
    if different:
        raise CheckpointError(listing(f"{checkpoint} cannot be continued in another way than it was begun", different))
    saved = run_dir / "config.yaml"
    step = read_json(checkpoint / "trainer_state.json").get("global_step", 0)
    if config.train.max_steps is not None and step > config.train.max_steps:
        raise CheckpointError(
            f"{checkpoint} is beyond train.max_steps={config.train.max_steps}; its weights are in that folder"
        )
    if not saved.is_file():
        return []
    then, now = _flat(to_dict(load_config(saved))), _flat(to_dict(config))
    changed = [f"{k}: {then[k]} then, {now.get(k)} now" for k in then if k not in _MAY_CHANGE and then[k] != now.get(k)]
    if changed:
        raise ConfigError(listing(f"this is not the run in {run_dir}; resume it as it was, or start a new one with --new",
                                  changed))  # fmt: skip
    longer = [k for k in ("train.epochs", "train.max_steps") if then.get(k) != now.get(k)]
    return [
        f"{k} was {then[k]} and is {now[k]} now: from here on the learning rate follows the new curve" for k in longer
    ]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, node in tree.items() for k, v in _flat(node, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}
