"""Plans of one stage that no other plan of it beats: their memory and seconds, and how each was made."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SAME_S = 1e-12  # seconds: closer ones are equal, or each order of adding up would be a plan of its own


def undominated(mb: Ints, layers_s: Floats, exposed_s: Floats, kind: Ints) -> Ints:
    """Indices of the points [p] than which none of the same kind is as small in all three; of equal ones the first."""
    kept: list[int] = []
    stairs: dict[int, tuple[list[float], list[float]]] = {}  # per kind: seconds rising, the least exposed falling
    order = np.lexsort((exposed_s, layers_s, mb))
    for at, second, exposed, group in zip(
        order.tolist(), layers_s[order].tolist(), exposed_s[order].tolist(), kind[order].tolist(), strict=True
    ):
        seconds, least = stairs.setdefault(group, ([], []))
        place = bisect.bisect_right(seconds, second + _SAME_S)
        if place and least[place - 1] <= exposed + _SAME_S:
            continue
        place = bisect.bisect_left(seconds, second)
        end = place
        while end < len(least) and least[end] >= exposed:
            end += 1
        seconds[place:end], least[place:end] = [second], [exposed]
        kept.append(at)
    return np.array(kept, dtype=np.int64)


@dataclass(frozen=True)
class Hull:
    """The least seconds of a layer that may be a mixture of strategies, by the MB it may take."""

    mb: Floats
    seconds: Floats
    corners: Ints  # which strategies

    @classmethod
    def of(cls, mb: Ints, seconds: Floats) -> Hull:
        """The lower left convex hull of the strategies' points."""
        chain: list[int] = []
        for at in np.lexsort((seconds, mb)).tolist():
            if chain and seconds[at] >= seconds[chain[-1]]:
                continue
            while len(chain) > 1 and _above(mb, seconds, chain[-2], chain[-1], at):
                chain.pop()
            chain.append(at)
        corners = np.array(chain, dtype=np.int64)
        return cls(mb[corners].astype(np.float64), seconds[corners], corners)

    def least(self, mb: Floats) -> Floats:
        """Seconds with `mb` per layer; infinite where nothing fits."""
        return np.interp(mb, self.mb, self.seconds, left=np.inf)


def _above(mb: Ints, seconds: Floats, a: int, b: int, c: int) -> bool:
    """Whether b lies on or above the line from a to c."""
    return bool((seconds[b] - seconds[a]) * (mb[c] - mb[a]) >= (seconds[c] - seconds[a]) * (mb[b] - mb[a]))


@dataclass(frozen=True)
class Limits:
    """What a stage may take at most, for each strategy of the ends [m] that is still of interest."""

    mb: Floats
    layers_s: Floats
    exposed_s: Floats
    sum_s: Floats  # of both

    def allow(
        self, mb: Ints, layers_s: Floats, exposed_s: Floats, left: int, hulls: tuple[Hull, Hull, Hull]
    ) -> NDArray[np.bool_]:
        """Which points [p] may become a plan for one of the ends, with `left` layers still to come."""
        room = self.mb - mb[:, None]
        allowed = room >= 0
        taken = (layers_s, exposed_s, layers_s + exposed_s)
        for seconds, most, hull in zip(taken, (self.layers_s, self.exposed_s, self.sum_s), hulls, strict=True):
            still = left * hull.least(room / left) if left else 0.0
            allowed &= seconds[:, None] + still <= most
        return np.asarray(allowed.any(1))


@dataclass(frozen=True)
class Front:
    """The plans of a stage. `steps`: per layer, for each point, the point that it was made from and its strategy."""

    mb: Ints
    layers_s: Floats
    exposed_s: Floats
    steps: tuple[tuple[Ints, Ints], ...]
    priced: int
    whole: bool  # nothing was dropped for want of room

    def chosen(self, point: int) -> tuple[int, ...]:
        """The strategies of a point's layers, in their order."""
        found = []
        for parents, strategies in reversed(self.steps):
            found.append(int(strategies[point]))
            point = int(parents[point])
        return tuple(reversed(found))


def stage_front(
    layers: int,
    mb: Ints,
    layer_s: Floats,
    exposed_s: Floats,
    layouts: Ints,
    border_s: Floats,
    limits: Limits,
    hidden_s: float,
    most: int,
) -> Front:
    """The front of `layers` equal layers with strategies [n]; the fastest `most` points are kept after each layer.

    What sync adds does not count as long as it stays below `hidden_s`, whatever the layers to come.
    """
    hulls = Hull.of(mb, layer_s), Hull.of(mb, exposed_s), Hull.of(mb, layer_s + exposed_s)
    use = undominated(mb, layer_s, np.maximum(exposed_s, hidden_s - (layers - 1) * exposed_s.max()), layouts)
    point_mb, point_s, point_exposed = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    behind = np.zeros(1, np.int64)
    steps: list[tuple[Ints, Ints]] = []
    priced, whole = 0, True
    for layer in range(layers):
        border = border_s[behind][:, layouts[use]] if layer else np.zeros((1, len(use)))
        new_mb = (point_mb[:, None] + mb[use]).ravel()
        new_s = (point_s[:, None] + layer_s[use] + border).ravel()
        new_exposed = (point_exposed[:, None] + exposed_s[use]).ravel()
        strategy = np.tile(use, len(point_mb))
        parent = np.repeat(np.arange(len(point_mb)), len(use))
        priced += len(new_mb)
        keep = np.flatnonzero(limits.allow(new_mb, new_s, new_exposed, layers - layer - 1, hulls))
        felt_s = np.maximum(new_exposed[keep], hidden_s - (layers - layer - 1) * exposed_s.max())
        keep = keep[undominated(new_mb[keep], new_s[keep], felt_s, layouts[strategy[keep]])]
        if len(keep) > most:
            keep, whole = keep[np.argsort(new_s[keep], kind="stable")[:most]], False
        point_mb, point_s, point_exposed = new_mb[keep], new_s[keep], new_exposed[keep]
        behind = layouts[strategy[keep]]
        steps.append((parent[keep], strategy[keep]))
    if border_s.any():  # what layout is behind the last layer concerns nobody
        keep = undominated(point_mb, point_s, np.maximum(point_exposed, hidden_s), np.zeros_like(point_mb))
        point_mb, point_s, point_exposed = point_mb[keep], point_s[keep], point_exposed[keep]
        steps[-1] = (steps[-1][0][keep], steps[-1][1][keep])
    return Front(point_mb, point_s, point_exposed, tuple(steps), priced, whole)
