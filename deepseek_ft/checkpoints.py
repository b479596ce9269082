"""What lies in a run's folder: which run may start there, and which checkpoint is whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError, listing


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


def incomplete(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, or None. Trainer writes trainer_state.json last."""
    state = read_json(checkpoint / "trainer_state.json")
    if not isinstance(state.get("global_step"), int):
        return "trainer_state.json is missing or broken: the save was cut off"
    weights = list(checkpoint.glob("*.safetensors"))
    if not weights:
        return "it holds no weights"
    for file in weights:
        size = file.stat().st_size
        with open(file, "rb") as head:
            header = int.from_bytes(head.read(8), "little")
            try:
                tensors = json.loads(head.read(header)) if 0 < header < size else {}
            except ValueError:
                tensors = {}
        ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
        if not ends or 8 + header + max(ends) != size:
            return f"{file.name} is cut off or broken"
    tag = checkpoint / "latest"
    if tag.is_file() and not list((checkpoint / tag.read_text().strip()).glob("*_optim_states.pt")):
        return "the optimizer states are missing"
    return None


def saved_ranks(checkpoint: Path) -> int | None:
    """How many ranks wrote the optimizer states; None when they are not sharded."""
    tag = checkpoint / "latest"
    if not tag.is_file():
        return None
    return len(list((checkpoint / tag.read_text().strip()).glob("*_optim_states.pt"))) or None


def newest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint to resume from, and what was passed over with the reason."""
    skipped = []
    for checkpoint in checkpoints(run_dir):
        reason = incomplete(checkpoint)
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


def _is_finished(run_dir: Path) -> bool:
    return read_json(run_dir / "run.json").get("status") == "finished"


def choose_run_dir(output_dir: str, resume: bool, new: bool) -> tuple[Path, Path | None, list[str]]:
    """Where a run goes, the checkpoint it continues from, and notes. Nothing is created; nothing is ever reused.

    An empty or new folder is taken as it is. Beside finished runs, or ones that left no checkpoint, the next free
    name `<output_dir>-2`, `-3`, … is taken. An unfinished run with a checkpoint is somebody's work: the user says
    whether to continue it (`resume`) or to start another beside it (`new`).

    Raises:
        CheckpointError: that has to be said first, or there is nothing to resume.
    """
    base = Path(output_dir)
    notes: list[str] = []
    existing = []
    for folder in _family(base):
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"output_dir: {folder} is a file, not a folder")
        if not folder.is_dir() or not any(folder.iterdir()):
            free = folder
            break
        existing.append(folder)
    unfinished = [f for f in existing if not _is_finished(f) and checkpoints(f)]

    if resume:
        if not unfinished:
            state = f"{existing[-1]} is finished" if existing else f"there is no {base}"
            raise CheckpointError(f"nothing to resume: {state if not existing or _is_finished(existing[-1]) else f'{existing[-1]} has no checkpoint'}")
        run_dir = unfinished[-1]
        checkpoint, skipped = newest_complete(run_dir)
        if checkpoint is None:
            raise CheckpointError(listing(f"{run_dir} has no complete checkpoint to resume from", skipped))
        return run_dir, checkpoint, [f"passed over {s}" for s in skipped] + [f"resuming from {checkpoint}"]
    if unfinished and not new:
        newest = checkpoints(unfinished[-1])[0]
        raise CheckpointError(
            f"{unfinished[-1]} holds an unfinished run with {newest.name} (or one that is still going).\n"
            "  --resume (resume=True) continues it; --new (new=True) starts another beside it; output_dir=... goes elsewhere."
        )
    if existing:
        notes.append(f"{base} is taken: this run goes to {free}")
    return free, None, notes
