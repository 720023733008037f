"""`plan_rounds`: which sequences run at the same time, in teams of which ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.rounds.bound import any_cut_bound
from fxpar.rounds.cost import TeamCost
from fxpar.rounds.layouts import place
from fxpar.rounds.search import bounded, find_rounds
from fxpar.rounds.work import Filling, Work, longest_ms


@dataclass(frozen=True)
class Team:
    """`ranks` with these sequences: their places in what was planned, and their lengths. It takes `ms`."""

    ranks: range
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    ms: float

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Round:
    """Teams on disjoint ranks that run at the same time; ranks without one wait. No round with its sequences takes less
    than `bound_ms`.
    """

    teams: tuple[Team, ...]
    bound_ms: float

    @property
    def ms(self) -> float:
        """What it takes: as long as its longest team."""
        return max(team.ms for team in self.teams)

    @property
    def layout(self) -> str:
        """Such as `32, 8 x 4`: the degrees of its teams, the largest first."""
        degrees = [team.degree for team in self.teams]
        counts = {degree: degrees.count(degree) for degree in sorted(set(degrees), reverse=True)}
        return ", ".join(f"{degree} x {count}" if count > 1 else str(degree) for degree, count in counts.items())


@dataclass(frozen=True)
class RoundPlan:
    """Rounds that run one after the other, each sequence in one of their teams.

    No plan with the same sequences in each round takes less than `bound_ms`, and none at all less than
    `any_cut_bound_ms`.
    """

    rounds: tuple[Round, ...]
    any_cut_bound_ms: float

    @property
    def predicted_ms(self) -> float:
        return sum(one.ms for one in self.rounds)

    @property
    def bound_ms(self) -> float:
        """The sum over rounds, or what holds for all plans, if that says more."""
        return max(sum(one.bound_ms for one in self.rounds), self.any_cut_bound_ms)

    @property
    def gap(self) -> float:
        """By how much it takes longer than `bound_ms` at most: 0.01 is one percent."""
        return self.predicted_ms / self.bound_ms - 1


def plan_rounds(
    lengths: Sequence[int] | np.ndarray,
    devices: int,
    costs: Mapping[int, TeamCost],
    *,
    devices_per_node: int = 8,
) -> RoundPlan:
    """Plan sequences of these `lengths` [K] in tokens on `devices`, in teams of the degrees of `costs`.

    A round ends with its last team, and the next one begins then. Which sequences share a round, how many teams of each
    degree it has, and who is in which are all chosen, so that the sum over rounds is short. It is the problem of FlexSP
    (arXiv 2412.01523, section 4). Teams stand on the ranks in descending order, and none of up to `devices_per_node`
    ranks stands on two nodes. Equal arguments give equal plans.

    Raises LengthsError, DegreeError, SequenceFitsNoTeamError.
    """
    work = Work.of(lengths, devices, devices_per_node, costs)
    rounds = [_round(work, *bounded(work, teams)) for teams in find_rounds(work)]
    return RoundPlan(tuple(rounds), any_cut_bound(work))


def _round(work: Work, found: Sequence[Filling], bound_ms: float) -> Round:
    """With ranks; idle teams are left out, as none of the others needs another place without them."""
    used = [team for team in found if team.members]
    counts = [sum(team.row == row for team in used) for row in range(len(work.degrees))]
    firsts = place(counts, work.degrees, work.devices, work.devices_per_node)
    assert firsts is not None, "a layout was taken that cannot be placed"
    teams = [
        _team(work, team, first)
        for row, ranks in enumerate(firsts)
        for team, first in zip((one for one in used if one.row == row), ranks, strict=True)
    ]
    return Round(tuple(teams), bound_ms)


def _team(work: Work, team: Filling, first: int) -> Team:
    members = sorted(team.members)
    sequences = tuple(int(one) for one in work.places[members])
    lengths = tuple(int(one) for one in work.lengths[members])
    return Team(range(first, first + work.degrees[team.row]), sequences, lengths, team.load_ms)


def homogeneous_ms(
    lengths: Sequence[int] | np.ndarray,
    devices: int,
    costs: Mapping[int, TeamCost],
    *,
    devices_per_node: int = 8,
) -> dict[int, float]:
    """What the best plan takes in which all teams have the same degree, by degree: of each that holds the longest
    sequence. Raises what `plan_rounds` raises.
    """
    longest = int(Work.of(lengths, devices, devices_per_node, costs).lengths[0])
    works = (
        Work.of(lengths, devices, devices_per_node, {degree: cost})
        for degree, cost in costs.items()
        if cost.tokens >= longest
    )
    return {work.degrees[0]: sum(map(longest_ms, find_rounds(work))) for work in works}
