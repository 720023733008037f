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
    uneven = np.flatnonzero(spread >= unit)
    if len(uneven):
        picks[uneven] = _pick_uneven(load[uneven], unit[uneven, None], count)
    return picks


def _pick_uneven(load: np.ndarray, unit: np.ndarray, count: int) -> np.ndarray:
    """Per row the `count` smallest of the numbers load[s] + k * unit (k >= 0), as s, in order; ties by s."""
    rows, takers = load.shape
    if count * takers <= 256:
        values = load[:, :, None] + unit[:, :, None] * np.arange(count)
        return values.reshape(rows, -1).argsort(1, kind="stable")[:, :count] // count
    level = _level(load, unit, count)
    turns = np.maximum((level - 1 - load) // unit + 1, 0)
    at_level = (load <= level) & ((level - load) % unit == 0)
    turns += at_level & (np.cumsum(at_level, 1) <= count - turns.sum(1, keepdims=True))
    flat = turns.ravel()
    taker = np.repeat(np.tile(np.arange(takers), rows), flat)
    turn = np.arange(rows * count) - np.repeat(np.cumsum(flat) - flat, flat)
    values = np.repeat(load.ravel(), flat) + np.repeat(np.repeat(unit[:, 0], takers), flat) * turn
    # Stable, and takers ascend: equal values stay in the order of takers.
    order = values.reshape(rows, count).argsort(1, kind="stable")
    return np.take_along_axis(taker.reshape(rows, count), order, 1)


def _level(load: np.ndarray, unit: np.ndarray, count: int) -> np.ndarray:
    """[rows, 1]: the `count`-th smallest of the numbers load[s] + k * unit."""
    ranked = np.sort(load, 1)
    # Poured like water the units would reach `even`; whole units reach at most one unit less.
    even = (count * unit + np.cumsum(ranked, 1)) // np.arange(1, load.shape[1] + 1)
    wet = (ranked <= even).sum(1, keepdims=True) - 1
    high = np.take_along_axis(even, wet, 1) + 1
    low = np.maximum(ranked[:, :1], high - 2 * unit - 2)
    while (low < high).any():
        middle = (low + high) // 2
        enough = np.maximum((middle - load) // unit + 1, 0).sum(1, keepdims=True) >= count
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    return low
