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

    # Groups of blocks that hold the same lengths: (how many blocks, pieces). A piece is (first, each): the documents
    # `by_length[first : first + each]` in the group's first block, the next `each` in its second, and so on; so a plan is
    # made of whole numbers, and arrays only of what has been planned. `room` maps a free space to its groups; bit s of
    # `free` says that there is one.
    room: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}
    free = 0
    first = 0  # of the documents in `by_length`, the next one
    groups: list[tuple[int, list[tuple[int, int]]]] = []  # full ones

    def put(space: int, blocks: int, pieces: list[tuple[int, int]]) -> None:
        nonlocal free
        if space == 0:
            groups.append((blocks, pieces))
        else:
            room.setdefault(space, []).append((blocks, pieces))
            free |= 1 << space

    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            fitting = free >> length
            if not fitting:  # new blocks, each filled with as many of this length as it takes
                per_block = capacity // length
                whole, rest = divmod(count, per_block)
                if whole:
                    put(capacity - per_block * length, whole, [(first, per_block)])
                if rest:
                    put(capacity - rest * length, 1, [(first + count - rest, rest)])
                first += count
                break
            space = length + (fitting & -fitting).bit_length() - 1  # the tightest that fits
            same = room[space]
            blocks, pieces = same.pop()
            if not same:
                free ^= 1 << space
            # The tightest block stays the tightest while it takes more: each is filled before the next is begun.
            each = min(space // length, count)
            filled = min(blocks, count // each)
            if filled < blocks:
                put(space, blocks - filled, [(start + filled * n, n) for start, n in pieces])
                pieces = pieces.copy()
            pieces.append((first, each))
            put(space - each * length, filled, pieces)
            first += filled * each
            count -= filled * each

    for same in room.values():
        groups += same
    return _order(groups, by_length)


def _order(groups: list[tuple[int, list[tuple[int, int]]]], by_length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents block by block, and where each block begins."""
    blocks = np.array([n for n, _ in groups])
    per_block = np.array([len(pieces) for _, pieces in groups])
    pieces = np.array([piece for _, pieces in groups for piece in pieces]).reshape(-1, 2)
    # Row by row, as each block of a group has the same pieces, farther on in `by_length`.
    group = np.repeat(np.arange(len(groups)), blocks)
    nth = np.arange(len(group)) - np.repeat(blocks.cumsum() - blocks, blocks)
    begins = per_block.cumsum() - per_block
    which = _ranges(begins[group], per_block[group])
    first, each = pieces[which].T
    starts = first + each * np.repeat(nth, per_block[group])
    sizes = np.add.reduceat(each, np.cumsum(per_block[group]) - per_block[group])
    return by_length[_ranges(starts, each)], np.concatenate([[0], np.cumsum(sizes)])


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[0], starts[0] + 1, ...`, `counts[0]` of them, and so on with the others."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
