"""What groups of a mini-batch take at least, as if sequences could be shared out without rest: arrays over lengths.

`edges` are the limits that groups may have. A group takes the sequences of an interval (edges[i-1], edges[j]], first
index 0 for those from the shortest on; arrays [..., i, j] are over the intervals, inf where j < i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.cost.group_cost import ZB_H1_SHORTER, Cost, GroupCost, TeamsCost
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import team_budgets

WORTHS = (0.25, 0.4, 0.6, 0.8, 1.25, 1.6, 2.5, 4.0)  # of a rank of the first team, tried for a bound on teams


@dataclass(frozen=True)
class Intervals:
    """Sequences of mini-batches by interval: tokens, squares of lengths, the longest; each [mini-batches, i, j]."""

    edges: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]

    @cached_property
    def _prefix(self) -> np.ndarray:
        """[3, mini-batches, edges + 1]: tokens, squares, and the longest of the sequences up to each edge."""
        found = np.zeros((3, len(self.batches), len(self.edges) + 1))
        for number, batch in enumerate(self.batches):
            lengths = np.sort(np.array(batch, dtype=np.float64))
            ends = np.searchsorted(lengths, self.edges, side="right")
            found[0, number, 1:] = np.concatenate([[0.0], lengths.cumsum()])[ends]
            found[1, number, 1:] = np.concatenate([[0.0], (lengths**2).cumsum()])[ends]
            found[2, number, 1:] = np.concatenate([[0.0], lengths])[ends]
        return found

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._differences(self._prefix[0])

    @cached_property
    def squares(self) -> np.ndarray:
        return self._differences(self._prefix[1])

    @cached_property
    def longest(self) -> np.ndarray:
        """0 where there is no sequence."""
        upto = np.broadcast_to(self._prefix[2][:, None, 1:], self.tokens.shape)
        return np.where(self.tokens > 0, upto, 0.0)

    def _differences(self, prefix: np.ndarray) -> np.ndarray:
        return np.maximum(prefix[:, None, 1:] - prefix[:, :-1, None], 0.0)

    @cached_property
    def inside(self) -> np.ndarray:
        """[i, j]: whether it is an interval at all."""
        count = np.arange(len(self.edges))
        return count[:, None] <= count[None, :]


def least_seconds(cost: Cost, strategy: Strategy, budgets: Sequence[int | None], found: Intervals) -> np.ndarray:
    """[mini-batches, i, j] seconds that no sharing out of an interval's sequences over the replicas can undercut.

    `budgets[j]` are the most tokens of a micro-batch of a group with limit `edges[j]`; None: it cannot have that limit,
    and takes forever. As in `fxpar.batching.balance.lower_bound`: the mean over replicas, and the longest sequence
    alone, each with the least that fills the pipeline. And the replica with most to do, which fills its pipeline with
    its longest micro-batch: in few of them this takes long, many take longer themselves. Of teams side by side the
    budget is that of the largest, and what they take is bounded as in `fxpar.batching.teams.TeamsLoad.bound`.
    """
    possible = found.inside & np.array([one is not None for one in budgets])[None, :]
    if isinstance(cost, TeamsCost):
        least = _least_of_teams(cost, strategy, budgets, found)
    else:
        least = _least_alone(cost, strategy, budgets, found)
    return np.where(possible[None], np.where(found.tokens > 0, least, 0.0), np.inf)


def _least_alone(cost: GroupCost, strategy: Strategy, budgets: Sequence[int | None], found: Intervals) -> np.ndarray:
    limits = np.array([1.0 if one is None else float(one) for one in budgets])
    runs = np.ceil(found.tokens / limits)
    free = cost.per_token_s * found.tokens + cost.per_square_s * found.squares
    work = free + cost.fixed_s * runs
    fill = (cost.stages - 1) / (ZB_H1_SHORTER if cost.schedule == "zb_h1" else cost.virtual)
    alone = cost.fixed_s + cost.per_token_s * found.longest + cost.per_square_s * found.longest**2
    mean = work / strategy.replicas + fill * cost.fixed_s
    filled = _filled(free / strategy.replicas, cost.fixed_s, fill, runs if strategy.replicas == 1 else 1.0)
    least = np.maximum(np.maximum(mean, filled), alone * (1 + fill)) / cost.shared_by
    if cost.shared_by > 1:  # who waits leaves the core to others, but all of the work is done
        least = np.maximum(least, work / strategy.replicas)
    return least


def _least_of_teams(cost: TeamsCost, strategy: Strategy, budgets: Sequence[int | None], found: Intervals) -> np.ndarray:
    """The longest sequence in the team that takes least time for it, of those that hold it; all of them where each
    token, square and part of a micro-batch costs least at some prices of the teams' time, which add up to one: no
    prices say more than the fractional optimum.
    """
    limits = np.array([team_budgets(strategy, one or 1) for one in budgets], dtype=np.float64).T  # [teams, j]
    bins = np.array([team.bins for team in strategy.teams], dtype=np.float64)
    longest = np.full(found.tokens.shape, np.inf)
    for one, limit, of_bins in zip(cost.teams, limits, bins, strict=True):
        seconds = one.fixed_s + of_bins * (one.per_token_s * found.longest + one.per_square_s * found.longest**2)
        longest = np.minimum(longest, np.where(found.longest <= limit // of_bins, seconds, np.inf))
    replicas = np.array([team.replicas for team in strategy.teams], dtype=np.float64)
    tokens = np.array([one.per_token_s for one in cost.teams])[:, None] / replicas[:, None]
    tokens = tokens + np.array([one.fixed_s for one in cost.teams])[:, None] / replicas[:, None] / limits  # [teams, j]
    squares = np.array([one.per_square_s for one in cost.teams]) / replicas
    ranks = np.array([team.world for team in strategy.teams]) / strategy.world
    shared_by, least = cost.teams[0].shared_by, longest / cost.teams[0].shared_by
    for prices in (ranks,) if shared_by > 1 else (ranks, *_prices(ranks)):
        per_token, per_square = (prices[:, None] * tokens).min(axis=0), float((prices * squares).min())
        least = np.maximum(least, per_token * found.tokens + per_square * found.squares)
    return least


def _prices(ranks: np.ndarray) -> list[np.ndarray]:
    """[teams] each: of what the ranks of a team are worth against those of the others."""
    found = [ranks * np.where(np.arange(len(ranks)) == 0, worth, 1.0) for worth in WORTHS]
    return [one / one.sum() for one in found]


def _filled(free: np.ndarray, fixed_s: float, fill: float, fewest: np.ndarray | float) -> np.ndarray:
    """Least seconds of a replica with `free` (what does not depend on micro-batches) in m micro-batches, `fewest` or
    more: free + m * fixed, and `fill` times their mean before and after.
    """
    if fixed_s == 0:
        return free
    m = np.maximum(np.sqrt(fill * free) / math.sqrt(fixed_s), np.maximum(fewest, 1.0))  # the quotient may be too large
    return free + m * fixed_s + fill * (free / m + fixed_s)


def least_mini_batch(per_interval: np.ndarray, most: int) -> float:
    """Mean over mini-batches of the least sum of at most `most` intervals that hold all lengths.

    `per_interval` [mini-batches, i, j] is the least of all strategies. Each mini-batch may have its own best intervals,
    so no set of strategies has a smaller mean.
    """
    batches, count, _ = per_interval.shape
    best = np.full((batches, count + 1), np.inf)
    best[:, 0] = 0.0
    for _ in range(most):
        # [mini-batches, j]: one interval more, over all of its beginnings
        more = (best[:, :-1, None] + per_interval).min(axis=1)
        best[:, 1:] = np.minimum(best[:, 1:], more)
    return float(best[:, -1].mean())
