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
    assert members(repaired(work, [teams_of(work, [0, 1, 2], [])])) == [[[1, 2], [0]]]


def test_sequences_are_swapped():
    work = Work.of([600, 500, 450, 400], 2, 2, some(1))  # no team has room for a third
    assert members(repaired(work, [teams_of(work, [0, 2], [1, 3])])) == [[[1, 2], [0, 3]]]


def test_a_sequence_takes_the_place_of_two_where_there_is_no_room_for_it():
    """700 and 300 take longest, and 1,000 tokens are all that a team holds. 700 goes to the second team, whose 500
    comes back and whose 250 goes on to the first.
    """
    work = Work.of([700, 700, 500, 300, 250, 250], 3, 3, some(1))
    rounds = [teams_of(work, [1], [2, 4, 5], [0, 3])]
    after = repaired(work, rounds)
    assert members(after) == [[[1, 4], [0, 5], [2, 3]]]
    assert longest_ms(after[0]) < longest_ms(rounds[0])


def test_a_sequence_goes_to_another_round_that_has_time():
    work = Work.of([900, 300, 200], 2, 2, some(1))
    after = repaired(work, [teams_of(work, [0], []), teams_of(work, [1, 2], [])])
    assert sum(map(longest_ms, after)) < work.fixed[0] * 2 + work.ms[0].sum() - work.ms[0, 2]
    assert longest_ms(after[0]) == work.fixed[0] + work.ms[0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_rounds_become_shorter_and_keep_their_sequences(seed):
    work = Work.of(drawn(60, 900, seed), 16, 8, some(1, 2, 4, 8))
    first, second = np.arange(0, 60, 2), np.arange(1, 60, 2)
    rounds = [filled(work, one[::-1], (0, 1, 2, 4)) for one in (first, second)]  # the shortest first
    before = [longest_ms(one) for one in rounds]
    after = repaired(work, rounds)
    assert all(longest_ms(one) <= limit * (1 + 1e-9) for one, limit in zip(after, before, strict=True))
    assert sum(map(longest_ms, after)) < sum(before) * 0.999
    assert sorted(one for teams in after for team in teams for one in team.members) == list(range(60))
    for team in (team for teams in after for team in teams):
        assert work.lengths[team.members].sum() == team.tokens <= work.room[team.row]
        assert work.fixed[team.row] + work.ms[team.row, team.members].sum() == pytest.approx(team.load_ms)
