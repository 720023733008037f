"""Spindle's waves (arXiv 2409.03365, section 3): level by level, two widths per MetaOp, cut where the shortest ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.waves.bound import together_ms
from fxpar.waves.order import Piece, Problem


@dataclass(frozen=True)
class Share:
    """`layers` of a MetaOp that shall run on `width` devices, and the ms of one."""

    metaop: int
    width: int
    layers: int
    layer_ms: float

    @property
    def ms(self) -> float:
        return self.layers * self.layer_ms


# Which share is taken first while they fit, and which taken one gets idle devices first.
SORTS: dict[str, Callable[[Share], tuple[float, ...]]] = {
    "wide-long": lambda one: (-one.width, -one.ms),
    "wide-short": lambda one: (-one.width, one.ms),
    "narrow": lambda one: (one.width, -one.ms),
    "short": lambda one: (one.ms, -one.width),
}
EXTENSIONS: dict[str, Callable[[float, float], float]] = {  # of the remaining time of a MetaOp, and its device-ms
    "none": lambda time, area: 0.0,
    "time": lambda time, area: -time,
    "area": lambda time, area: -area,
}


def shares(problem: Problem, metaops: Sequence[int], optimum_ms: float) -> list[Share]:
    """Two widths of each MetaOp between which its fraction of devices lies, with whole numbers of layers: so many on
    the wider one as its share of the time allows, rounded, the rest on the other.
    """
    found = []
    for metaop in metaops:
        curve, layers = problem.curves[metaop], problem.layers[metaop]
        low, high, share = curve.neighbours(optimum_ms / layers)
        wide = layers if low == 0 else min(layers, round(share * optimum_ms / curve.ms[high]))
        for width, count in ((high, wide), (low, layers - wide)):
            if count:
                found.append(Share(metaop, width, count, curve.ms[width]))
    return found


def waves(problem: Problem, sort: str, extension: str) -> list[list[Piece]]:
    """All levels, one after the other."""
    found = []
    for level in problem.graph.levels:
        curves, layers = [problem.curves[m] for m in level], [problem.layers[m] for m in level]
        optimum = together_ms(curves, layers, problem.devices)
        left = shares(problem, level, optimum)
        while left:
            taken = _taken(left, sort, problem.devices)
            wave = _aligned(problem, _extended(problem, taken, left, extension), min(one.ms for one in taken))
            left = _without(left, wave)
            found.append(wave)
    return found


def _taken(left: Sequence[Share], sort: str, devices: int) -> list[Share]:
    """Of different MetaOps, as many as fit; what needs all devices first."""
    found: list[Share] = []
    for one in sorted(left, key=lambda share: (share.width < devices, SORTS[sort](share))):
        if one.width <= devices and all(one.metaop != other.metaop for other in found):
            found.append(one)
            devices -= one.width
    return found


def _extended(problem: Problem, taken: Sequence[Share], left: Sequence[Share], extension: str) -> list[Piece]:
    """Idle devices go to whoever has most left to do, to its next width, while there are enough."""
    widths = {one.metaop: one.width for one in taken}
    idle = problem.devices - sum(widths.values())
    if extension != "none":
        time = {m: sum(one.ms for one in left if one.metaop == m) for m in widths}
        area = {m: sum(one.ms * one.width for one in left if one.metaop == m) for m in widths}
        for metaop in sorted(widths, key=lambda m: EXTENSIONS[extension](time[m], area[m])):
            fitting = [w for w in problem.curves[metaop].widths if w <= widths[metaop] + idle]
            idle -= fitting[-1] - widths[metaop]
            widths[metaop] = fitting[-1]
    return [Piece(one.metaop, widths[one.metaop], _most(one, widths[one.metaop], left)) for one in taken]


def _most(one: Share, width: int, left: Sequence[Share]) -> int:
    """Layers that a piece may have: on more devices than its share was for, all that its MetaOp has left."""
    return one.layers if width == one.width else sum(other.layers for other in left if other.metaop == one.metaop)


def _aligned(problem: Problem, taken: Sequence[Piece], shortest_ms: float) -> list[Piece]:
    """Cut to end together. A wave is as long as the longest piece whose layers are rounded to `shortest_ms`, and all
    have as many layers as fit into it, one at least.
    """
    times = [problem.curves[piece.metaop].ms[piece.width] for piece in taken]
    length = max(
        ms * max(1, min(piece.layers, round(shortest_ms / ms))) for ms, piece in zip(times, taken, strict=True)
    )
    return [
        piece._replace(layers=max(1, min(piece.layers, int(length / ms + 1e-9))))
        for ms, piece in zip(times, taken, strict=True)
    ]


def _without(left: Sequence[Share], wave: Sequence[Piece]) -> list[Share]:
    """What is still to do; a piece takes its layers of the share that it came from, the widest first."""
    done = {piece.metaop: piece.layers for piece in wave}
    found = []
    for one in left:
        gone = min(one.layers, done.get(one.metaop, 0))
        if gone:
            done[one.metaop] -= gone
        if gone < one.layers:
            found.append(replace(one, layers=one.layers - gone))
    return found
