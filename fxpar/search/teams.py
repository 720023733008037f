"""Strategies side by side, priced from their teams: each as if it were alone, on the ranks that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import TeamsCost
from fxpar.ir.exec_graph import Outline
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import team_budgets
from fxpar.memory.state import home_bytes
from fxpar.schedule.mini_batch import Pace
from fxpar.search.price import STAGING_BYTES, Depth, Memory, Priced, extrapolated, going_home_s
from fxpar.search.switching import Outlines
from fxpar.store.home import home_layout, param_specs
from fxpar.switch.node_first import room_for_sums


@dataclass
class TeamsCandidate(Priced):
    """`teams` as they are priced alone; what lies at home is that of all ranks, and gradients go there together, of
    models with `depth`. Its tokens are those of the largest team's micro-batches.
    """

    teams: tuple[Priced, ...]
    depth: Depth
    outlines: Outlines

    @property
    def multiple(self) -> int:
        return math.lcm(*(team.multiple for team in self.teams))

    @cached_property
    def cost(self) -> TeamsCost:
        return TeamsCost(tuple(team.group_cost for team in self.teams))

    @cached_property
    def reduce_s(self) -> float:
        return max(0.0, self._of_all_layers([going_home_s(one, self.cluster) for one in self._outlined]))

    @property
    def pace(self) -> Pace | None:
        return None  # each goes at a pace of its own

    def predicted(self, tokens: int) -> Memory:
        """Of the fullest rank of each kind: weights of the team that has most, and what there is beside them so that
        the sum is that of the fullest team.
        """
        found = [team.at(budget) for team, budget in zip(self.teams, team_budgets(self.strategy, tokens), strict=True)]
        weights = max(one.weight_bytes for one in found)
        masters, optimizer, gradients, sums = (
            round(self._of_all_layers(each)) for each in zip(*self._home, strict=True)
        )
        return Memory(
            home_bytes=masters + gradients,
            optimizer_bytes=optimizer,
            weight_bytes=weights,
            step_bytes=max(one.weight_bytes + one.step_bytes for one in found) - weights,
            gradient_bytes=max(one.gradient_bytes for one in found),
            staging_bytes=min(STAGING_BYTES, 2 * weights) + sums,
        )

    @cached_property
    def _outlined(self) -> tuple[Outline, ...]:
        """How parameters and gradients lie, in each sample of the model's depth."""
        return tuple(self.outlines(self.strategy, layers) for layers in self.depth.samples(self.strategy.stages))

    @cached_property
    def _home(self) -> list[tuple[int, ...]]:
        """What `home_bytes` finds, and what sums inside of nodes take, in each sample."""
        world, cluster = self.strategy.world, self.cluster
        homes = [home_layout(param_specs(one), world) for one in self._outlined]
        sums = [room_for_sums(home, cluster, STAGING_BYTES) for home in homes]
        return [(*home_bytes(one), room) for one, room in zip(self._outlined, sums, strict=True)]

    def _of_all_layers(self, values: Sequence[float]) -> float:
        """From those of the samples."""
        return extrapolated(values, float(self.depth.beyond(self.depth.samples(self.strategy.stages))))


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
        team = strategy.of_team(number)
        alike = replace(team, offset=team.offset % cluster.devices_per_node)
        if alike not in known:
            known[alike] = priced(alike)
        teams.append(known[alike])
    return TeamsCandidate(strategy, cluster, anchors, tuple(teams), depth, outlines)
