"""The search: cuts that look best are filled, the best of those repaired, and rounds tried in layouts of the bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fxpar.rounds.bound import round_bound, teams_within
from fxpar.rounds.cut import Cut, all_cuts, cuts, rounds_of
from fxpar.rounds.fill import best_filled, filled
from fxpar.rounds.layouts import MOST_LAYOUTS, all_layouts, count_layouts, placeable
from fxpar.rounds.repair import repaired
from fxpar.rounds.work import Filling, Kinds, Work, longest_ms

MORE_ROUNDS = 2  # than the tokens need, that are tried
MANY = 512  # sequences, of which these are tried; of fewer as many more, as that takes no longer:
CUTS = 6  # that are filled, for each number of rounds
CUTS_LOOKED_FOR = 3  # the same where layouts have to be looked for
TRY_ALL = 8  # sequences, of which all cuts are filled
LAYOUTS = 4  # that are filled per round, of those that were screened
REPAIRED = 3  # of the cuts
STEP = 0.02  # of a time, to the next one for which a layout is looked for; steps grow
LOOKS = 14
MOST_TOGETHER = 8  # rounds that are cut together; more are planned in parts


def _known_layouts(work: Work) -> np.ndarray | None:
    """[L, D] all layouts; None where there are too many."""
    if count_layouts(work.devices, work.degrees) > MOST_LAYOUTS:
        return None
    return all_layouts(work.devices, work.degrees, work.devices_per_node)


class _Rounds:
    """Rounds of neighbours, each filled once."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.known: dict[tuple[int, int], list[Filling] | None] = {}
        self.layouts = _known_layouts(work)

    def filled(self, cut: Cut) -> list[list[Filling]] | None:
        """None if a round does not hold its sequences."""
        found = []
        for first, last in rounds_of(cut):
            if (first, last) not in self.known:
                self.known[first, last] = self._fill(np.arange(first, last))
            teams = self.known[first, last]
            if teams is None:
                return None
            found.append(teams)
        return found

    def _fill(self, members: np.ndarray) -> list[Filling] | None:
        layouts = self._looked_for(members) if self.layouts is None else self.layouts
        return next(iter(best_filled(self.work, members, layouts, LAYOUTS * _closer(self.work))), None)

    def _looked_for(self, members: np.ndarray) -> np.ndarray:
        """[1, D] the layout of the aggregate program for the first time that has one; [0, D] if none has."""
        work, kinds = self.work, Kinds.of(self.work, members)
        device_ms = (kinds.ms * np.array(work.degrees)[:, None]).min(0)
        limit = float(work.fixed.max() + (device_ms * kinds.counts).sum() / work.devices)
        limit = max(limit, float((kinds.ms + work.fixed[:, None]).min(0).max())) * (1 + 1e-9)
        none = np.zeros((0, len(work.degrees)), dtype=np.int64)
        if kinds.lengths @ kinds.counts > work.capacity:
            return none
        step = STEP
        for _ in range(LOOKS):
            counts = teams_within(work, kinds, limit)
            if counts is not None:
                return np.array([placeable(counts, work.degrees, work.devices, work.devices_per_node)])
            limit *= 1 + step
            step *= 1.5
        return none


def find_rounds(work: Work) -> list[list[Filling]]:
    """Rounds for all sequences; each has some. Where teams of the largest degree leave devices over, few layouts fill
    all of them, so teams of one degree throughout are tried too.
    """
    found = _found(work)
    if work.devices % work.degrees[0]:
        held = [row for row, room in enumerate(work.room.tolist()) if room >= work.lengths[0]]
        found = min([found, *(_of_one_degree(work, row) for row in held)], key=_total)
    return found


def _of_one_degree(work: Work, row: int) -> list[list[Filling]]:
    found = _found(work.with_degree(row))
    for team in (team for teams in found for team in teams):
        team.row = row
    return found


def _found(work: Work) -> list[list[Filling]]:
    """Very many rounds are planned in parts of neighbours."""
    parts = -(-work.fewest_rounds // MOST_TOGETHER)
    if parts == 1:
        found = _find_together(work)
    else:
        tokens = np.cumsum(work.lengths)
        edges = np.searchsorted(tokens, tokens[-1] * np.arange(parts + 1) / parts)
        edges[-1] = len(tokens)
        found = [teams for first, last in pairwise(edges.tolist()) for teams in _find_part(work, first, last)]
        found = repaired(work, found)
    return [teams for teams in found if any(team.members for team in teams)]


def _find_part(work: Work, first: int, last: int) -> list[list[Filling]]:
    found = _find_together(work.part(first, last))
    for team in (team for teams in found for team in teams):
        team.members = [first + one for one in team.members]
    return found


def _find_together(work: Work) -> list[list[Filling]]:
    rounds, simple = _Rounds(work), in_turn(work)
    closer = _closer(work)
    count = CUTS * closer if rounds.layouts is not None else CUTS_LOOKED_FOR
    most = work.fewest_rounds + MORE_ROUNDS
    while True:
        some = all_cuts(work) if len(work.lengths) <= TRY_ALL else cuts(work, most, count)
        known = [rounds.filled(cut) for cut in some]
        if any(known) or most >= len(simple):
            break
        most *= 2
    tried = sorted((one for one in known if one is not None), key=_total)[: REPAIRED * closer]
    return min((repaired(work, one) for one in [*tried, simple]), key=_total)


def _closer(work: Work) -> int:
    """How many times as much is tried, as there are few sequences."""
    return min(8, max(1, MANY // len(work.lengths)))


def _total(rounds: Sequence[Sequence[Filling]]) -> float:
    return sum(longest_ms(teams) for teams in rounds)


def bounded(work: Work, teams: list[Filling]) -> tuple[list[Filling], float]:
    """The round, and what none with its sequences can undercut. Layouts that the bound came across, and of few
    sequences those that look best, are filled; the round is in one of them where that is better.
    """
    members = np.sort(np.array([one for team in teams for one in team.members]))
    bound, found = round_bound(work, members, longest_ms(teams))
    placed = {placeable(one, work.degrees, work.devices, work.devices_per_node) for one in found}
    others = [other for counts in sorted(placed) if (other := filled(work, members, counts)) is not None]
    layouts = _known_layouts(work)
    if layouts is not None and _closer(work) > 1:
        others += best_filled(work, members, layouts, LAYOUTS * _closer(work))
    best = sorted(others, key=longest_ms)[: REPAIRED * _closer(work)]
    return min([teams, *(repaired(work, [one])[0] for one in best)], key=longest_ms), bound


def in_turn(work: Work) -> list[list[Filling]]:
    """A plan that always exists: longest first into the fullest team with room, of the degree that holds most; as many
    rounds as that takes.
    """
    row = int(work.room.argmax())
    most = [work.devices // degree * (number == row) for number, degree in enumerate(work.degrees)]
    per_round = placeable(most, work.degrees, work.devices, work.devices_per_node)[row]
    teams: list[Filling] = []
    for one, tokens in enumerate(work.lengths.tolist()):
        fits = [team for team in teams if team.tokens + tokens <= work.room[row]]
        if not fits:
            teams.append(Filling(row, float(work.fixed[row])))
        team = max(fits, key=lambda team: team.tokens, default=teams[-1])
        team.members.append(one)
        team.tokens += tokens
        team.load_ms += float(work.ms[row, one])
    return [teams[first : first + per_round] for first in range(0, len(teams), per_round)]
