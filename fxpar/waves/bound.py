"""What no plan can undercut, and the continuous optimum that plans are made from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from fxpar.waves.work import MetaOp, TaskGraph

_CLOSE = 1e-10  # of the time, to which bisection finds it


@dataclass(frozen=True)
class Curve:
    """How fast a MetaOp runs on up to N devices: `widths` ascending, `ms` [W] of a layer, falling. A width on which it
    is not faster than on fewer devices is left out.

    `corners` are the widths, 0 among them, on the upper concave hull of the speed 1 / ms, and `speeds` those there.
    Time that is shared between two neighbours of them gives any speed between, and no shares of any widths give more.
    """

    widths: tuple[int, ...]
    ms: dict[int, float]
    corners: tuple[int, ...]
    speeds: tuple[float, ...]

    @classmethod
    def of(cls, metaop: MetaOp, devices: int) -> Curve:
        ms: dict[int, float] = {}
        for width in sorted(metaop.layer_ms):
            if width <= devices and metaop.layer_ms[width] < min(ms.values(), default=np.inf):
                ms[width] = metaop.layer_ms[width]
        hull: list[tuple[int, float]] = [(0, 0.0)]
        for width, time in ms.items():
            point = (width, 1 / time)
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) < _slope(hull[-1], point) * (1 - 1e-9):
                hull.pop()
            hull.append(point)
        return cls(tuple(ms), ms, tuple(w for w, _ in hull), tuple(s for _, s in hull))

    def neighbours(self, layer_ms: float) -> tuple[int, int, float]:
        """Widths (lo, hi) and the share of the time on hi, that run a layer in `layer_ms` on average: the corners on
        both sides of the least fraction of devices for that; the largest width for a time that it has none for.
        """
        at = bisect_left(self.speeds, 1 / layer_ms)
        if at == len(self.speeds):
            return self.widths[-1], self.widths[-1], 1.0
        at = max(at, 1)
        low, high = self.speeds[at - 1], self.speeds[at]
        return self.corners[at - 1], self.corners[at], (1 / layer_ms - low) / (high - low)

    def allotment(self, layer_ms: float) -> float:
        """The least devices, a fraction, that run a layer in this time on average."""
        low, high, share = self.neighbours(layer_ms)
        return low + (high - low) * share

    @property
    def least_ms(self) -> float:
        return self.ms[self.widths[-1]]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def together_ms(curves: Sequence[Curve], layers: Sequence[float], devices: float) -> float:
    """The continuous optimum of independent MetaOps (Spindle, arXiv 2409.03365, theorem 1): all begin and end together,
    each on a fraction of devices that does not change, and the fractions add up to all devices; or the one that takes
    longest at its largest width alone. By bisection over the time.

    On the hull it is a true bound: the mean number of devices of a MetaOp that does its layers within the time is at
    least its allotment, and the sum of the means is at most all devices.
    """
    low = max(curve.least_ms * count for curve, count in zip(curves, layers, strict=True))
    high = sum(curve.least_ms * count for curve, count in zip(curves, layers, strict=True))

    def needed(time: float) -> float:
        return sum(curve.allotment(time / count) for curve, count in zip(curves, layers, strict=True))

    if needed(low) <= devices:
        return low
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= devices else (middle, high)
    return high


@dataclass(frozen=True)
class Relaxed:
    """The least time of a graph with layers and widths in fractions, and the ms of each MetaOp in such a solution."""

    bound_ms: float
    metaop_ms: tuple[float, ...]


def relaxed(graph: TaskGraph, curves: Sequence[Curve], devices: int, layers: Sequence[int] | None = None) -> Relaxed:
    """No plan of the graph takes less than `bound_ms`, transfers aside; of so many `layers` of each MetaOp (None: all).

    Of any plan of C ms let x[m, n] be the layers of MetaOp m that run on n devices, in fractions. Then sum_n x[m, n] is
    its number of layers; it runs for d[m] = sum_n x[m, n] * ms[m, n]; and as no device does two things at a time,
    sum x[m, n] * n * ms[m, n] <= devices * C. With starts s: s[j] >= s[i] + d[i] along edges, and s[i] + d[i] <= C. The
    least C of this linear program is a bound. Without edges it is that of `together_ms`.
    """
    count = len(curves)
    columns = [(m, width) for m, curve in enumerate(curves) for width in curve.widths]
    ms = np.array([curves[m].ms[width] for m, width in columns])
    owner, width = np.array([m for m, _ in columns]), np.array([w for _, w in columns])
    first, total = len(columns), len(columns) + count  # starts, then C
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    pairs = [(i, None) for i in range(count)] + [(i, j) for j in range(count) for i in graph.before[j]]
    for row, (i, j) in enumerate(pairs):  # s[i] + d[i] - s[j] <= 0
        mine = np.flatnonzero(owner == i)
        ends = np.array([first + i, total if j is None else first + j])
        where = np.concatenate([mine, ends])
        entries.append((np.full(len(where), row), where, np.concatenate([ms[mine], [1.0, -1.0]])))
    area = len(pairs)
    where = np.concatenate([np.arange(first), [total]])
    entries.append((np.full(len(where), area), where, np.concatenate([ms * width, [-float(devices)]])))
    row, column, value = (np.concatenate([entry[k] for entry in entries]) for k in range(3))
    upper = coo_array((value, (row, column)), shape=(area + 1, total + 1)).tocsr()
    equal = coo_array((np.ones(first), (owner, np.arange(first))), shape=(count, total + 1)).tocsr()
    goal = np.zeros(total + 1)
    goal[total] = 1
    layers = [one.layers for one in graph.metaops] if layers is None else layers
    solved = linprog(goal, A_ub=upper, b_ub=np.zeros(area + 1), A_eq=equal, b_eq=layers, method="highs")
    if solved.status != 0:
        raise RuntimeError(f"HiGHS ended without an answer: {solved.message}")
    times = np.bincount(owner, weights=solved.x[:first] * ms, minlength=count)
    return Relaxed(float(solved.fun), tuple(float(one) for one in times))
