"""Strategies side by side, priced from their teams: each as if it were alone, on the ranks that it has.

A search guesses at pairs of what it knows: a wide replica for the longest sequences, narrow ones on all other ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import TeamsCost
from fxpar.cost.link_bytes import ByReplica, LinkBytes, ReplicaBytes
from fxpar.ir.axes import REPLICAS
from fxpar.ir.exec_graph import Outline
from fxpar.ir.strategy import SINGLE, Strategy
from fxpar.ir.teams import in_step, lowered_for, ranks_of_replica, team_budgets
from fxpar.memory.state import home_bytes
from fxpar.schedule.mini_batch import Pace
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.going_home import going_home, sent_home, staging_of
from fxpar.search.price import Depth, Lowered, Memory, Priced, extrapolated
from fxpar.search.pricing import SetPricer
from fxpar.search.switching import Outlines

BEST = 3  # strategies for some lengths, that are tried as teams
PAIRS = 12  # that a search takes up
PIPELINES = 7  # that stand one by one beside a wide replica


@dataclass
class Teams(Priced):
    """`teams` as they are priced one by one; tokens are those of the largest one's micro-batches. A guess, where they
    are strategies of all ranks that have such replicas: nothing is lowered for it.
    """

    teams: tuple[Priced, ...]

    @property
    def multiple(self) -> int:
        return math.lcm(*(team.multiple for team in self.teams))

    @cached_property
    def cost(self) -> TeamsCost:
        return TeamsCost(tuple(team.group_cost for team in self.teams))

    @cached_property
    def reduce_s(self) -> float:
        return max(team.reduce_s for team in self.teams)

    @property
    def pace(self) -> Pace | None:
        return None  # each goes at a pace of its own

    def predicted(self, tokens: int) -> Memory:
        """With the weights of the team that has most, and beside them so much that the sum is the fullest team's."""
        budgets = team_budgets(self.strategy, tokens)
        found = [team.at(budget) for team, budget in zip(self.teams, budgets, strict=True)]
        most = Memory(*map(max, zip(*(one.columns for one in found), strict=True)))
        return replace(most, step_bytes=max(one.weight_bytes + one.step_bytes for one in found) - most.weight_bytes)


@dataclass
class TeamsCandidate(Teams):
    """Each of `teams` was lowered for its own ranks. What lies at home is that of all ranks, and gradients go there
    together, of models with `depth`.
    """

    depth: Depth
    outlines: Outlines

    @cached_property
    def reduce_s(self) -> float:
        return max(0.0, self._of_all_layers([going_home(one, self.cluster).predicted_s for one in self._outlined]))

    @property
    def reduced(self) -> LinkBytes:
        found = [sent_home(one, self.cluster) for one in self._outlined]
        levels = [one.intra_node for one in found], [one.inter_node for one in found]
        return LinkBytes(*map(self._of_all_layers, levels))

    @cached_property
    def sent(self) -> ByReplica:
        """Of teams in step each program has replicas on all ranks, and the team runs its own."""
        found: list[ReplicaBytes] = []
        for number, team in enumerate(self.teams):
            own = self.strategy.of_team(number)
            first = own.offset // ranks_of_replica(own) if in_step(self.strategy) else 0
            found += cast(Lowered, team).sent[first : first + own.replicas]
        return tuple(found)

    def predicted(self, tokens: int) -> Memory:
        """With what all ranks share."""
        found, columns = super().predicted(tokens), zip(*self._home, strict=True)
        masters, optimizer, gradients = (round(self._of_all_layers(column)) for column in columns)
        staging = staging_of(found.weight_bytes, self._outlined, self._steps, self.cluster)
        return replace(found, home_bytes=masters + gradients, optimizer_bytes=optimizer, staging_bytes=staging)

    @cached_property
    def _outlined(self) -> tuple[Outline, ...]:
        """How parameters and gradients lie, in each sample of the model's depth."""
        return tuple(self.outlines(self.strategy, layers) for layers in self.depth.samples(self.strategy.stages))

    @cached_property
    def _home(self) -> list[tuple[int, int, int]]:
        """What `home_bytes` finds in each sample."""
        return [home_bytes(one) for one in self._outlined]

    @property
    def _steps(self) -> float:
        return float(self.depth.beyond(self.depth.samples(self.strategy.stages)))

    def _of_all_layers(self, values: Sequence[float]) -> float:
        """From those of the samples."""
        return extrapolated(values, self._steps)


def of_teams(
    strategy: Strategy,
    cluster: ClusterSpec,
    anchors: tuple[int, ...],
    depth: Depth,
    outlines: Outlines,
    priced: Callable[[Strategy], Priced],
) -> TeamsCandidate:
    """Of a strategy with teams. `priced` prices one of them, once for all that have the same places in their nodes."""
    known: dict[Strategy, Priced] = {}
    teams = []
    for number in range(len(strategy.teams)):
        team = lowered_for(strategy, number)
        alike = replace(team, offset=team.offset % cluster.devices_per_node)
        if alike not in known:
            known[alike] = priced(alike)
        teams.append(known[alike])
    return TeamsCandidate(strategy, cluster, anchors, tuple(teams), depth, outlines)


def pairs(
    candidates: Sequence[Priced], seconds: Sequence[np.ndarray], pricer: SetPricer, intervals: Intervals
) -> list[tuple[Teams, np.ndarray]]:
    """Guesses at a wide replica beside narrow ones, with their `least_seconds`: those that may take least. `seconds`
    are those of the candidates, of which the best for some lengths are tried: the wide ones for the longest, by their
    number of ranks, and the narrow ones for the shortest. Of these, pipelines may have as many ranks as the wide
    replica, as HSPMD runs them: tensors are cut into fewer parts there.
    """
    world, edges = pricer.cluster.world, range(len(intervals.edges))
    known = [n for n, one in enumerate(candidates) if _may_be_team(one.strategy)]
    means = {n: seconds[n].mean(axis=0) for n in known}
    by_ranks: dict[int, list[int]] = {}
    for n in known:
        by_ranks.setdefault(world // candidates[n].strategy.replicas, []).append(n)
    narrow = {n for j in edges for n in sorted(known, key=lambda n: means[n][0, j])[:BEST]}
    found = []
    for ranks, several in by_ranks.items():
        wide = {n for i in edges for n in sorted(several, key=lambda n: means[n][i, -1])[:BEST]}
        for one, other in itertools.product(sorted(wide), sorted(narrow)):
            each = world // candidates[other].strategy.replicas
            staged = candidates[other].strategy.pipeline_size > 1
            if each > ranks or (each == ranks and not staged) or (world - ranks) % each or one == other:
                continue
            guess = _pair(candidates[one], candidates[other], (world - ranks) // each)
            budgets = pricer.budgets(guess, intervals.edges)
            found.append((guess, least_seconds(guess.cost, guess.strategy, budgets, intervals)))
    return sorted(found, key=lambda pair: float(pair[1].mean(axis=0)[0, -1]))[:PAIRS]


def without_teams(candidates: Sequence[Priced], seconds: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`seconds` of the candidates, endless for those that are several teams."""
    pairs = zip(candidates, seconds, strict=True)
    return [np.full_like(each, np.inf) if one.strategy.teams else each for one, each in pairs]


def _may_be_team(strategy: Strategy) -> bool:
    """Whether it has replicas that are the same on their ranks alone: ZeRO is over all of them."""
    return strategy.degree(REPLICAS) > 1 and not (strategy.blocks or strategy.rules or strategy.zero)


def _pair(wide: Priced, narrow: Priced, count: int) -> Teams:
    """A few pipelines stand one by one, each on ranks of its own: stages of replicas would lie between each other."""
    apart = narrow.strategy.pipeline_size > 1 and count <= PIPELINES
    each = (1,) * count if apart else (count,)
    teams = _replicas(wide.strategy, 1), *(_replicas(narrow.strategy, copies) for copies in each)
    return Teams(Strategy((), teams=teams), wide.cluster, wide.anchors, (wide, *[narrow] * len(each)))


def _replicas(strategy: Strategy, count: int) -> Strategy:
    axes = tuple(axis for axis in strategy.axes if axis[0] != REPLICAS)
    return replace(strategy, axes=(((REPLICAS, count), *axes) if count > 1 else axes) or SINGLE.axes)
