"""Which strategies for which lengths: the sets that may take least time, best first by what they take at least."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.search.bounds import Intervals

PER_INTERVAL = 6  # strategies that are kept for an interval of lengths
KEPT = 64  # partial sets that are kept for a limit and a number of groups
Groups = tuple[tuple[int, int], ...]
DIFFERENT = 0.01  # of the tokens: what a second set has to run otherwise to be another one


@dataclass(frozen=True, order=True)
class RankedSet:
    """Groups as (index of the edge that is its limit, index of the strategy), ascending; `least_s` as it is bounded,
    `guess_s` with what its borders are guessed to take; (strategy, tokens) of a mean mini-batch.
    """

    guess_s: float
    least_s: float
    groups: Groups
    tokens: tuple[tuple[int, float], ...] = ()


# A set that another one becomes by one more group: as a RankedSet, then what it was, the strategy and its tokens.
_Partial = tuple[float, float, Groups, RankedSet, tuple[int, float]]


def ranked_sets(
    seconds: Sequence[np.ndarray],
    borders_s: Sequence[float],
    found: Intervals,
    most: int,
    accumulators: Sequence[Hashable] | None = None,
) -> list[RankedSet]:
    """Sets of at most `most` strategies that hold all lengths, best guess first.

    `seconds[s]` [mini-batches, i, j] as `least_seconds` gives them, `borders_s[s]` is a guess at what the switch to a
    strategy and the reduction after it add, once for those whose `accumulators[s]` are the same (by default none).
    Dynamic programming over the limits: for each limit and number of groups the KEPT best partial sets, so that there
    are second-best ones to compare. One strategy may have several limits.
    Sets that run the same tokens under the same strategies, but for a few, come last, behind the best guess of each
    kind: else a group that has nearly no sequences makes many of one set.
    """
    means = np.stack([one.mean(axis=0) for one in seconds])  # [s, i, j]
    tokens = found.tokens.mean(axis=0)
    count = len(found.edges)
    borders = np.array(borders_s)
    few = DIFFERENT * float(tokens[0, -1]) or 1.0
    keys = range(len(borders_s)) if accumulators is None else accumulators
    start = RankedSet(0.0, 0.0, ())
    layer: list[list[RankedSet]] = [[start], *([] for _ in range(count))]
    finished: list[RankedSet] = []
    for number in range(most):
        following: list[list[_Partial]] = [[] for _ in range(count + 1)]
        for i in range(count):
            if not layer[i]:
                continue
            have_come = [(one, {keys[s] for s, _ in one.tokens}) for one in layer[i]]
            for j in range(i, count):
                if tokens[i, j] == 0 and j + 1 < count:
                    continue  # who takes the next lengths takes these
                column = means[:, i, j] + borders
                for s in np.argsort(column, kind="stable")[:PER_INTERVAL]:
                    if not np.isfinite(column[s]):
                        break
                    least_s, cell = float(means[s, i, j]), (int(s), float(tokens[i, j]))
                    following[j + 1] += [
                        (
                            one.guess_s + least_s + (0.0 if keys[s] in came else borders_s[s]),
                            one.least_s + least_s,
                            (*one.groups, (j, cell[0])),
                            one,
                            cell,
                        )
                        for one, came in have_come
                    ]
        layer = [_kept(partial, few) for partial in following]
        finished += layer[count]
        if number + 1 == count:
            break
    return _kinds_first(_distinct(finished), few)


def _kept(partial: Sequence[_Partial], few: float) -> list[RankedSet]:
    """The KEPT best ones, half of them the best of their kind. No others are made up."""
    sets, kinds = list[RankedSet](), set[Groups]()
    for guess_s, least_s, groups, one, (strategy, tokens) in sorted(partial):
        held = dict(one.tokens)
        held[strategy] = held.get(strategy, 0.0) + tokens
        sets.append(RankedSet(float(guess_s), least_s, groups, tuple(sorted(held.items()))))
        kinds.add(_kind(sets[-1], few))
        if len(sets) >= KEPT and len(kinds) >= KEPT // 2:
            break
    return _kinds_first(sets, few, KEPT // 2)[:KEPT]


def _kind(one: RankedSet, few: float) -> Groups:
    """How it shares out the tokens among strategies, to `few` tokens."""
    rounded = ((s, round(tokens / few)) for s, tokens in one.tokens)
    return tuple(each for each in rounded if each[1])


def _kinds_first(sets: Sequence[RankedSet], few: float, most: int | None = None) -> list[RankedSet]:
    """The first one for each way to share out the tokens among strategies, to `few` tokens (at most `most`), then the
    others.
    """
    kinds: dict[Groups, RankedSet] = {}
    for one in sets:
        kinds.setdefault(_kind(one, few), one)
    first = list(kinds.values())[:most]
    held = {one.groups for one in first}
    return [*first, *(one for one in sets if one.groups not in held)]


def _distinct(sets: Sequence[RankedSet]) -> list[RankedSet]:
    """Neighbouring groups of one strategy are one group."""
    found: dict[Groups, RankedSet] = {}
    for one in sorted(sets):
        kept = tuple(
            group for group, after in zip(one.groups, (*one.groups[1:], (-1, -1)), strict=True) if after[1] != group[1]
        )
        found.setdefault(kept, replace(one, groups=kept))
    return sorted(found.values())
