"""Layouts are filled longest first, within memory, and screened about as they are filled."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.rounds.cost import TeamCost
from fxpar.rounds.fill import best_filled, filled, screened
from fxpar.rounds.layouts import all_layouts
from fxpar.rounds.work import Work, longest_ms
from tests.rounds.plain import drawn, some, team_ms


def test_each_goes_to_the_team_that_would_end_first():
    work = Work.of([500, 400, 300, 100], 2, 2, some(1))
    teams = filled(work, np.arange(4), (2,))
    assert [team.members for team in teams] == [[0, 3], [1, 2]]
    assert [team.tokens for team in teams] == [600, 700]
    assert teams[0].load_ms == pytest.approx(team_ms(some(1)[1], [500, 100]))


def test_a_full_team_is_passed_over_and_takes_a_shorter_one_later():
    """Attention makes 800 take longer than twice 450. The team of those ends first, and has no room for 120, but for
    100 afterwards.
    """
    work = Work.of([800, 450, 450, 120, 100], 2, 4, {1: TeamCost(50.0, 0.0, 1e-3, 1000)})
    teams = filled(work, np.arange(5), (2,))
    assert [team.members for team in teams] == [[0, 3], [1, 2, 4]]
    assert [team.load_ms for team in teams] == pytest.approx([704.4, 465.0])
    assert filled(work, np.arange(5), (1,)) is None


def test_a_team_of_another_degree_takes_what_has_no_room():
    work = Work.of([1990, 900, 60, 10], 3, 4, some(1, 2))
    teams = filled(work, np.arange(4), (1, 1))
    assert [(work.degrees[team.row], team.members) for team in teams] == [(2, [0]), (1, [1, 2, 3])]
    assert filled(work, np.arange(4), (1, 0)) is None


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_held_where_it_is_tight(seed):
    lengths = drawn(60, 900, seed)
    devices = -(-sum(lengths) // 940)
    work = Work.of(lengths, devices, 8, some(1))
    teams = filled(work, np.arange(60), (devices,))
    assert teams is not None
    assert all(team.tokens <= 1000 for team in teams)
    assert sorted(one for team in teams for one in team.members) == list(range(60))


def test_the_screen_finds_good_layouts():
    work = Work.of(drawn(60, 3900, seed=2), 16, 8, some(1, 2, 4, 8))
    layouts = all_layouts(16, work.degrees, 8)
    looks = screened(work, np.arange(60), layouts)
    taken = [filled(work, np.arange(60), one) for one in layouts]
    found = np.array([np.inf if one is None else longest_ms(one) for one in taken])
    both = np.isfinite(looks) & np.isfinite(found)
    assert both.sum() > 10
    assert np.median(np.abs(looks[both] / found[both] - 1)) < 0.1
    assert longest_ms(best_filled(work, np.arange(60), layouts, 6)[0]) <= 1.02 * found.min()
