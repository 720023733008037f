"""Bounds are below the best plan of all plans, and close to what is found."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.rounds import plan_rounds
from fxpar.rounds.bound import any_cut_bound, round_bound, teams_within
from fxpar.rounds.work import Kinds, Work
from tests.rounds.plain import check_plan, drawn, shortest_plan, shortest_round, some, team_ms

TINY = [(4, 4, some(1, 2, 4)), (3, 4, some(1, 2)), (4, 4, some(2, 4)), (3, 6, some(1, 2, 4))]


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_a_tiny_case_undercuts_the_bounds(seed):
    count, devices, costs = TINY[seed % len(TINY)]
    lengths = np.random.default_rng(seed).integers(1, 1400 if 1 not in costs or seed > 3 else 1000, count)
    work = Work.of(lengths, devices, devices, costs)
    exact = shortest_round(lengths.tolist(), devices, costs)
    if exact < np.inf:
        bound, _ = round_bound(work, np.arange(count), exact)
        assert bound <= exact * (1 + 1e-9)
        assert bound > 0.5 * exact
    best = shortest_plan(lengths.tolist(), devices, costs)
    assert any_cut_bound(work) <= best * (1 + 1e-9)
    plan = plan_rounds(lengths, devices, costs, devices_per_node=devices)
    check_plan(plan, lengths.tolist(), devices, devices, costs)
    assert best * (1 - 1e-9) <= plan.predicted_ms <= 1.15 * best


def test_the_program_has_a_solution_for_every_round_that_there_is():
    lengths = drawn(7, 900, seed=3)[:4]
    work = Work.of(lengths, 4, 4, some(1, 2, 4))
    exact = shortest_round(lengths, 4, some(1, 2, 4))
    assert teams_within(work, Kinds.of(work), exact * (1 + 1e-6)) is not None
    assert teams_within(work, Kinds.of(work), 0.3 * exact) is None


def test_a_batch_that_needs_several_rounds_is_bounded_by_their_fixed_times():
    costs = some(1)
    lengths = [1000] * 6  # three rounds of two
    work = Work.of(lengths, 2, 2, costs)
    assert work.fewest_rounds == 3
    assert any_cut_bound(work) == pytest.approx(3 * team_ms(costs[1], [1000]))


def test_the_longest_round_leaves_work_to_the_others():
    """1,900 tokens on two devices take longer than all the rest does elsewhere. Of 4,900 tokens 4,000 fit beside each
    other, so another round has 900, three sequences of 300, on four devices.
    """
    costs = some(1, 2)
    lengths = [1900, *[300] * 10]
    rest_ms = 3 * costs[1].sequence_ms(np.array([300]))[0] / 4
    bound = any_cut_bound(Work.of(lengths, 4, 4, costs))
    assert bound == pytest.approx(team_ms(costs[2], [1900]) + 50 + rest_ms)
    assert bound < plan_rounds(lengths, 4, costs, devices_per_node=4).predicted_ms
