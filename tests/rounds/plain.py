"""Plans of rounds checked by plain code that shares none with the planner, and tiny cases to try all plans of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from fxpar.rounds import RoundPlan, TeamCost

COSTS = {
    degree: TeamCost(50.0, (1.0 + 0.05 * (degree > 1) + 0.8 * (degree > 2)) / degree, 2e-3 / degree, 1000 * degree)
    for degree in (1, 2, 4, 8, 16)
}


def some(*degrees: int) -> dict[int, TeamCost]:
    return {degree: COSTS[degree] for degree in degrees}


def drawn(count: int, longest: int, seed: int = 0, unit: int = 16) -> list[int]:
    """Lengths with a long tail, multiples of `unit`."""
    rng = np.random.default_rng(seed)
    found = np.clip(np.exp(rng.normal(4.5, 1.3, count)), 1, longest).astype(int)
    return [int(-(-one // unit) * unit) for one in found]


def check_plan(
    plan: RoundPlan, lengths: Sequence[int], devices: int, per_node: int, costs: Mapping[int, TeamCost]
) -> None:
    """Every sequence once, memory held, ranks apart and in place, times by the formula, bounds below."""
    seen: list[int] = []
    total = 0.0
    for one in plan.rounds:
        taken, times = [], []
        for team in one.teams:
            cost, ranks = costs[team.degree], team.ranks
            assert 0 <= ranks[0] <= ranks[-1] < devices
            if team.degree <= per_node:
                assert ranks[0] // per_node == ranks[-1] // per_node
            assert team.sequences
            assert [lengths[place] for place in team.sequences] == list(team.lengths)
            assert sum(team.lengths) <= cost.tokens
            ms = cost.fixed_ms
            for length in team.lengths:
                ms += cost.per_token_ms * length + cost.per_square_ms * length * length
            assert math.isclose(ms, team.ms, rel_tol=1e-10)
            taken += ranks
            times.append(ms)
            seen += team.sequences
        assert len(taken) == len(set(taken))
        assert math.isclose(max(times), one.ms, rel_tol=1e-10)
        assert one.bound_ms <= one.ms * (1 + 1e-9)
        total += max(times)
    assert sorted(seen) == list(range(len(lengths)))
    assert math.isclose(total, plan.predicted_ms, rel_tol=1e-10)
    assert plan.any_cut_bound_ms <= plan.predicted_ms * (1 + 1e-9)


def team_ms(cost: TeamCost, lengths: Sequence[int]) -> float:
    """Of a team with these sequences."""
    return cost.fixed_ms + float(cost.sequence_ms(np.asarray(lengths)).sum())


def shortest_round(lengths: Sequence[int], devices: int, costs: Mapping[int, TeamCost]) -> float:
    """What the best round with these sequences takes, of all that there are; inf if there is none."""
    best = math.inf
    for layout in _layouts(devices, tuple(sorted(costs))):
        for where in itertools.product(range(len(layout)), repeat=len(lengths)):
            members: list[list[int]] = [[] for _ in layout]
            for length, team in zip(lengths, where, strict=True):
                members[team].append(length)
            if all(sum(mine) <= costs[degree].tokens for degree, mine in zip(layout, members, strict=True)):
                used = [(degree, mine) for degree, mine in zip(layout, members, strict=True) if mine]
                best = min(best, max(team_ms(costs[degree], mine) for degree, mine in used))
    return best


def shortest_plan(lengths: Sequence[int], devices: int, costs: Mapping[int, TeamCost]) -> float:
    """What the best plan takes, over all cuts into rounds."""
    whole = (1 << len(lengths)) - 1

    @cache
    def rest(left: int) -> float:
        if not left:
            return 0.0
        first, best, subset = left & -left, math.inf, left
        while subset:
            if subset & first:  # the round of the first sequence that is left
                mine = [length for place, length in enumerate(lengths) if subset >> place & 1]
                best = min(best, shortest_round(mine, devices, costs) + rest(left & ~subset))
            subset = (subset - 1) & left
        return best

    return rest(whole)


def _layouts(devices: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not degrees:
        return [()]
    *smaller, degree = degrees
    return [
        (*rest, *([degree] * count))
        for count in range(devices // degree + 1)
        for rest in _layouts(devices - count * degree, tuple(smaller))
    ]
