"""Which documents share a block: best-fit decreasing, by counting lengths instead of sorting documents.

The plan of a million conversations takes as many steps as there are pairs of a length and a free space, not of
documents: all documents of one length are alike, and so are all blocks with the same room left.
"""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put documents into as few blocks as best-fit decreasing does; each whole, none left out.

    Args:
        lengths: (N,) whole numbers from 1 to `capacity`.

    Returns:
        (N,) documents in the order of the blocks, and (blocks + 1,) where each block begins in it.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit blocks of {capacity}")
    by_length = np.argsort(-lengths, kind="stable")  # of one length, in the order given
    values, counts = np.unique(-lengths, return_counts=True)

    # Groups of blocks that hold the same lengths: [how many blocks, columns], a column being `how many` documents of
    # one length, one for each block. `room` maps a free space to its groups; bit s of `free` says that there is one.
    room: dict[int, list[tuple[int, list[np.ndarray]]]] = {}
    free = 0
    taken = 0
    full: list[tuple[int, list[np.ndarray]]] = []

    def put(space: int, group: tuple[int, list[np.ndarray]]) -> None:
        nonlocal free
        if space == 0:
            full.append(group)
        else:
            room.setdefault(space, []).append(group)
            free |= 1 << space

    for value, count in zip(-values, counts, strict=True):
        length, count = int(value), int(count)
        documents = by_length[taken : taken + count]
        taken += count
        while count:
            fitting = free >> length
            if not fitting:  # new blocks, each filled with as many of this length as it takes
                per_block = capacity // length
                whole, rest = divmod(count, per_block)
                if whole:
                    columns = list(documents[: whole * per_block].reshape(whole, per_block).T)
                    put(capacity - per_block * length, (whole, columns))
                if rest:
                    put(capacity - rest * length, (1, [documents[i : i + 1] for i in range(count - rest, count)]))
                break
            space = length + (fitting & -fitting).bit_length() - 1  # the tightest that fits
            blocks, columns = room[space].pop()
            if not room[space]:
                free &= ~(1 << space)
            # The tightest block stays the tightest while it takes more: each is filled before the next is begun.
            each = min(space // length, count)
            filled = min(blocks, count // each)
            if filled < blocks:
                put(space, (blocks - filled, [c[filled:] for c in columns]))
                columns = [c[:filled] for c in columns]
            used = filled * each
            put(space - each * length, (filled, columns + list(documents[:used].reshape(filled, each).T)))
            documents, count = documents[used:], count - used

    groups = full + [group for groups in room.values() for group in groups]
    order = [np.stack(columns, axis=1).reshape(-1) for _, columns in groups]
    sizes = np.concatenate([np.full(blocks, len(columns)) for blocks, columns in groups])
    return np.concatenate(order), np.concatenate([[0], np.cumsum(sizes)])
