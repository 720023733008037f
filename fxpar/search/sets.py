"""Which strategies for which lengths: the sets that may take least time, best first by what they take at least."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.search.bounds import Intervals

PER_INTERVAL = 6  # strategies that are kept for an interval of lengths
KEPT = 64  # partial sets that are kept for a limit and a number of groups


@dataclass(frozen=True, order=True)
class RankedSet:
    """Groups as (index of the edge that is its limit, index of the strategy), ascending; `least_s` as it is bounded,
    `guess_s` with what its borders are guessed to take.
    """

    guess_s: float
    least_s: float
    groups: tuple[tuple[int, int], ...]


def ranked_sets(
    seconds: Sequence[np.ndarray], borders_s: Sequence[float], found: Intervals, most: int
) -> list[RankedSet]:
    """Sets of at most `most` strategies that hold all lengths, best guess first.

    `seconds[s]` [mini-batches, i, j] as `least_seconds` gives them, `borders_s[s]` is a guess at what the switch to a
    strategy and the reduction after it add. Dynamic programming over the limits: for each limit and number of groups
    the KEPT best partial sets, so that there are second-best ones to compare. One strategy may have several limits.
    """
    means = np.stack([one.mean(axis=0) for one in seconds])  # [s, i, j]
    count = len(found.edges)
    borders = np.array(borders_s)
    start = RankedSet(0.0, 0.0, ())
    layer: list[list[RankedSet]] = [[start], *([] for _ in range(count))]
    finished: list[RankedSet] = []
    for number in range(most):
        following: list[list[RankedSet]] = [[] for _ in range(count + 1)]
        for i in range(count):
            if not layer[i]:
                continue
            for j in range(i, count):
                column = means[:, i, j] + borders
                for s in np.argsort(column, kind="stable")[:PER_INTERVAL]:
                    if not np.isfinite(column[s]):
                        break
                    following[j + 1] += [_with(one, j, int(s), means[s, i, j], borders_s[s]) for one in layer[i]]
        layer = [heapq.nsmallest(KEPT, partial) for partial in following]
        finished += layer[count]
        if number + 1 == count:
            break
    return sorted(_distinct(finished))


def _with(one: RankedSet, edge: int, strategy: int, least_s: float, border_s: float) -> RankedSet:
    again = strategy in {s for _, s in one.groups}
    guess = one.guess_s + least_s + (0.0 if again else border_s)
    return RankedSet(float(guess), float(one.least_s + least_s), (*one.groups, (edge, strategy)))


def _distinct(sets: Sequence[RankedSet]) -> list[RankedSet]:
    """Neighbouring groups of one strategy are one group."""
    found: dict[tuple[tuple[int, int], ...], RankedSet] = {}
    for one in sorted(sets):
        kept = tuple(
            group for group, after in zip(one.groups, (*one.groups[1:], (-1, -1)), strict=True) if after[1] != group[1]
        )
        found.setdefault(kept, RankedSet(one.guess_s, one.least_s, kept))
    return list(found.values())
