"""The packing plan is best-fit decreasing, whole and exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_ft.data.packing import best_fit


def by_hand(lengths, capacity) -> int:
    """Blocks that best-fit decreasing takes, document by document."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, r in enumerate(room) if r >= length]
        if fitting:
            tightest = min(fitting, key=room.__getitem__)
            room[tightest] -= length
        else:
            room.append(capacity - length)
    return len(room)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 60))
def test_every_document_is_in_one_block_that_holds_it(data, capacity):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    order, begins = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert begins[0] == 0 and begins[-1] == len(lengths) and (np.diff(begins) > 0).all()
    for a, b in zip(begins[:-1], begins[1:], strict=True):
        assert sum(lengths[i] for i in order[a:b]) <= capacity
    assert len(begins) - 1 == by_hand(lengths, capacity)


def test_the_same_lengths_give_the_same_plan():
    lengths = np.random.default_rng(0).integers(1, 2049, 5000)
    first, second = best_fit(lengths, 2048), best_fit(lengths.copy(), 2048)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    blocks = len(first[1]) - 1
    assert -(-lengths.sum() // 2048) <= blocks < 1.02 * lengths.sum() / 2048


def test_what_fits_no_block_is_not_laid_anywhere():
    for lengths in ([3, 9], [0, 2], [-1]):
        with pytest.raises(ValueError, match="do not fit"):
            best_fit(np.array(lengths), 8)
