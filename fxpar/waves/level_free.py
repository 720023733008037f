"""Orders without levels: whenever a MetaOp ends, devices are shared out anew among all that could run."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.waves.bound import relaxed
from fxpar.waves.order import Piece, Problem

_CLOSE = 1e-6  # of the time, to which shares are found


def level_free(problem: Problem, metaop_ms: Sequence[float], anew: bool = False) -> list[Piece]:
    """Pieces in the order of their starts.

    `metaop_ms` are times of whole MetaOps in a relaxed solution; the tail of a MetaOp is the longest way behind it by
    these. Devices are shared out so that all who could run reach the end, tails included, at the same time as far as
    they can (water-filling); then they run until the first of them ends. `anew`: then what is left is relaxed again.
    """
    left = list(problem.layers)
    tails = _tails(problem, metaop_ms)
    found = []
    while any(left):
        ready = [m for m, count in enumerate(left) if count and not any(left[j] for j in problem.before[m])]
        widths = _widths(problem, ready, left, tails)
        until = min(left[m] * problem.curves[m].ms[width] for m, width in widths.items())
        for m, width in widths.items():
            count = min(left[m], max(1, round(until / problem.curves[m].ms[width])))
            left[m] -= count
            found.append(Piece(m, width, count))
        if anew:
            rest = relaxed(problem.graph, problem.curves, problem.devices, left)
            tails = _tails(problem, rest.metaop_ms)
    return found


def _tails(problem: Problem, metaop_ms: Sequence[float]) -> list[float]:
    """The longest way behind each MetaOp."""
    tails = [0.0] * len(metaop_ms)
    for m in reversed(problem.graph.order):
        tails[m] = max((tails[j] + metaop_ms[j] for j in problem.after[m]), default=0.0)
    return tails


def _widths(problem: Problem, ready: Sequence[int], left: Sequence[int], tails: Sequence[float]) -> dict[int, int]:
    """By MetaOp, the longest ways first: the corner below its share, then the next widths while devices are idle."""
    curves, devices = problem.curves, problem.devices
    level = _water_level(problem, ready, left, tails)
    share = {m: _share(problem, m, left[m], level - tails[m]) for m in ready}
    order = sorted(ready, key=lambda m: -(tails[m] + left[m] * curves[m].least_ms))
    widths: dict[int, int] = {}
    idle = devices
    for m in order:
        below = max((w for w in curves[m].widths if w <= share[m] + 1e-6), default=0)
        if below and below <= idle:
            widths[m] = below
            idle -= below
    for m in sorted(ready, key=lambda m: widths.get(m, 0) - share[m]):  # who lacks most of its share
        wider = [w for w in curves[m].widths if widths.get(m, 0) < w <= widths.get(m, 0) + idle]
        if wider:
            idle -= wider[0] - widths.get(m, 0)
            widths[m] = wider[0]
    for m in order:
        wider = [w for w in curves[m].widths if widths.get(m, 0) < w <= widths.get(m, 0) + idle]
        if wider:
            idle -= wider[-1] - widths.get(m, 0)
            widths[m] = wider[-1]
    return {m: widths[m] for m in order if m in widths}


def _share(problem: Problem, metaop: int, layers: int, ms: float) -> float:
    """The devices with which so many layers take `ms`; the largest width if none is so fast."""
    curve = problem.curves[metaop]
    return curve.allotment(max(ms / layers, curve.least_ms))


def _water_level(problem: Problem, ready: Sequence[int], left: Sequence[int], tails: Sequence[float]) -> float:
    """ms after which all who are ready, and what comes behind them, could end together."""
    low = max(tails[m] + left[m] * problem.curves[m].least_ms for m in ready)
    high = low + sum(left[m] * problem.curves[m].ms[problem.curves[m].widths[0]] for m in ready)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        needed = sum(_share(problem, m, left[m], middle - tails[m]) for m in ready)
        low, high = (low, middle) if needed <= problem.devices else (middle, high)
    return high
