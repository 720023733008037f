"""Moves, swaps and ejections make a round shorter, and none longer."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.rounds.fill import filled
from fxpar.rounds.repair import repaired
from fxpar.rounds.work import Filling, Work, longest_ms
from tests.rounds.plain import drawn, some


def teams_of(work: Work, *members: list[int]) -> list[Filling]:
    """Of the smallest degree."""
    row = len(work.degrees) - 1
    return [
        Filling(row, float(work.fixed[row] + work.ms[row, mine].sum()), int(work.lengths[mine].sum()), mine)
        for mine in members
    ]


def members(rounds: list[list[Filling]]) -> list[list[list[int]]]:
    return [[sorted(team.members) for team in teams] for teams in rounds]


def test_a_sequence_moves_to_a_team_with_time():
    work = Work.of([300, 200, 100], 2, 2, some(1))
    assert members(repaired(work, [teams_of(work, [0, 1, 2], [])])) == [[[0], [1, 2]]]


def test_sequences_are_swapped():
    work = Work.of([600, 500, 300, 400], 2, 2, some(1))  # 600 and 500 against 400 and 300
    assert members(repaired(work, [teams_of(work, [0], [1, 2, 3])]))[0] != [[0], [1, 2, 3]]
    found = repaired(work, [[*teams_of(work, [0, 2], [1, 3])]])
    assert members(found) == [[[0, 3], [1, 2]]]


def test_a_sequence_goes_on_where_a_team_has_time_but_no_room():
    """The second team has no room for 400 before 350 goes to the third, and nothing to swap that helps."""
    work = Work.of([500, 450, 900, 100], 3, 3, some(1))
    rounds = [teams_of(work, [1, 2], [0], [3])]  # 500 + 450, 900, 100: in order 900, 500, 450, 100
    after = repaired(work, rounds)
    assert longest_ms(after[0]) < longest_ms(rounds[0])


@pytest.mark.parametrize("seed", range(3))
def test_rounds_become_shorter_and_keep_their_sequences(seed):
    work = Work.of(drawn(80, 1900, seed), 16, 8, some(1, 2, 4, 8))
    first, second = np.arange(0, 80, 2), np.arange(1, 80, 2)
    rounds = [filled(work, one, (0, 1, 2, 4)) for one in (first, second)]
    before = [longest_ms(one) for one in rounds]
    after = repaired(work, rounds)
    assert all(longest_ms(one) <= limit * (1 + 1e-9) for one, limit in zip(after, before, strict=True))
    assert sum(map(longest_ms, after)) < sum(before) * 0.999
    assert sorted(one for teams in after for team in teams for one in team.members) == list(range(80))
    for team in (team for teams in after for team in teams):
        assert work.lengths[team.members].sum() == team.tokens <= work.room[team.row]
        assert work.fixed[team.row] + work.ms[team.row, team.members].sum() == pytest.approx(team.load_ms)
