"""`pick` against one decision after the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxpar.switch.planners import groups
from fxpar.switch.waterfill import pick


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    takers=st.integers(1, 40),
    count=st.integers(1, 60),
    spread=st.sampled_from((1, 4, 50, 10_000)),
    largest=st.sampled_from((1, 9, 1000)),
)
def test_as_one_by_one(seed, rows, takers, count, spread, largest):
    random = np.random.default_rng(seed)
    load = random.integers(0, spread, (rows, takers))
    unit = random.integers(1, largest + 1, rows)
    picks = pick(load, unit, count)
    assert picks.shape == (rows, count)
    for row in range(rows):
        now = load[row].copy()
        for choice in picks[row]:
            assert choice == now.argmin()
            now[choice] += unit[row]


def test_holders_without_a_choice_have_one_level():
    """One holder for each slice, the same for many: no load changes what is taken, so they need no order."""
    alone, shared = np.zeros((5, 1, 4), bool), np.ones((5, 1, 4), bool)
    alone[:, :, 2] = True
    assert groups._levels(alone).max() == 0
    assert groups._levels(shared)[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_slices_that_nobody_needs_keep_none_apart():
    """Of three neighbours that share a holder with the next, the one between has no receivers."""
    holders, receivers = np.zeros((2, 3, 1, 5), bool)
    for number in range(3):
        holders[number, 0, number : number + 2] = True
    receivers[[0, 2], 0, 4] = True
    (found,) = groups._form(holders, receivers)
    assert found.slices.tolist() == [0, 2]
    assert found.holders.tolist() == [[0, 1], [2, 3]]
    assert found.receivers.tolist() == [[4], [4]]
    receivers[1, 0, 4] = True
    assert [one.slices.tolist() for one in groups._form(holders, receivers)] == [[0], [1], [2]]
