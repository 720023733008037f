"""`pick`: many steps of "give the next unit to the least loaded" at once."""

from __future__ import annotations

import numpy as np


def pick(load: np.ndarray, unit: np.ndarray, count: int) -> np.ndarray:
    """Who takes each of `count` equal units, in every row on its own: [rows, count] positions.

    `load` is int64 [rows, takers], `unit` int64 [rows]. The same as `count` times: take the argmin of the row (the
    first of equals), add the unit to it. `load` is left as it was.
    """
    rows, takers = load.shape
    if takers == 1:
        return np.zeros((rows, count), np.int64)
    if count == 1:
        return load.argmin(1)[:, None]
    order = load.argsort(1, kind="stable")
    picks = order[:, np.arange(count) % takers]  # right if a unit exceeds all differences: they take turns
    spread = load.max(1) - load.min(1)
    for row in np.flatnonzero(spread >= unit):
        picks[row] = _pick_row(load[row], int(unit[row]), count)
    return picks


def _pick_row(load: np.ndarray, unit: int, count: int) -> np.ndarray:
    """The `count` smallest of the numbers load[s] + k * unit (k >= 0), as s, in order; ties by s."""
    if count * len(load) <= 256:
        values = load[:, None] + unit * np.arange(count)
        return values.ravel().argsort(kind="stable")[:count] // count
    level = _level(load, unit, count)
    below = np.maximum((level - 1 - load) // unit + 1, 0)
    equal = np.flatnonzero((load <= level) & ((level - load) % unit == 0))
    below[equal[: count - int(below.sum())]] += 1
    takers = np.repeat(np.arange(len(load)), below)
    turn = np.arange(count) - np.repeat(np.cumsum(below) - below, below)
    return takers[np.lexsort((takers, load[takers] + unit * turn))]


def _level(load: np.ndarray, unit: int, count: int) -> int:
    """The `count`-th smallest of the numbers load[s] + k * unit."""
    ranked = np.sort(load)
    # Poured like water the units would reach `even`; whole units reach at most one unit less.
    even = (count * unit + np.cumsum(ranked)) // np.arange(1, len(load) + 1)
    wet = int(np.flatnonzero(ranked <= even)[-1])
    high = int(even[wet]) + 1
    low = max(int(ranked[0]), high - 2 * unit - 2)
    while low < high:
        middle = (low + high) // 2
        if int(np.maximum((middle - load) // unit + 1, 0).sum()) >= count:
            high = middle
        else:
            low = middle + 1
    return low
