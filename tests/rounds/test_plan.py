"""Plans of rounds, checked by plain code; figures of FlexSP's case on drawn lengths; bad input."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.errors import DegreeError, LengthsError, SequenceFitsNoTeamError
from fxpar.rounds import PUBLISHED, TeamCost, homogeneous_ms, plan_rounds
from fxpar.rounds.search import MOST_TOGETHER
from fxpar.rounds.work import Work
from fxpar.search.lengths import NAMED
from tests.rounds.plain import check_plan, drawn, shortest_plan, some

CONTEXT = 192 * 1024


def wikipedia(count: int, devices: int, seed: int = 0) -> np.ndarray:
    """Drawn lengths and one of 93K, padded."""
    found = NAMED["wikipedia"].draw(count, CONTEXT, np.random.default_rng(seed))
    found[0] = 93_440
    unit = 2 * devices
    return -(-found // unit) * unit


def test_a_batch_on_64_devices():
    costs = PUBLISHED["flexsp-7b"].teams([2**power for power in range(1, 7)], 64, CONTEXT)
    lengths = wikipedia(300, 64)
    plan = plan_rounds(lengths, 64, costs)
    check_plan(plan, lengths.tolist(), 64, 8, costs)
    assert plan.gap < 0.035
    alike = homogeneous_ms(lengths, 64, costs)
    assert set(alike) == {16, 32, 64}  # that hold 93,440 tokens
    assert plan.predicted_ms < 0.9 * min(alike.values())
    assert plan == plan_rounds(list(lengths), 64, costs)  # the same again


def test_one_device_alone_sends_nothing():
    costs = PUBLISHED["flexsp-7b"].teams([2**power for power in range(7)], 64, CONTEXT)
    lengths = wikipedia(300, 64)
    plan = plan_rounds(lengths, 64, costs)
    check_plan(plan, lengths.tolist(), 64, 8, costs)
    assert any(team.degree == 1 for one in plan.rounds for team in one.teams)
    assert plan.gap < 0.035


def test_layouts_are_looked_for_where_there_are_too_many():
    costs = PUBLISHED["flexsp-7b"].teams([2**power for power in range(1, 9)], 256, CONTEXT)
    lengths = wikipedia(1500, 256)
    plan = plan_rounds(lengths, 256, costs)
    check_plan(plan, lengths.tolist(), 256, 8, costs)
    assert plan.gap < 0.05
    assert plan.predicted_ms < 1.1 * plan.any_cut_bound_ms


@pytest.mark.parametrize(
    ("devices", "per_node", "degrees", "count", "longest"),
    [
        (1, 8, (1,), 1, 900),
        (12, 6, (1, 2, 4, 8), 40, 3900),
        (6, 8, (4,), 30, 900),  # two devices wait
        (16, 8, (16, 8), 3, 14_000),
    ],
)
def test_clusters_of_other_sizes(devices, per_node, degrees, count, longest):
    lengths, costs = drawn(count, longest), some(*degrees)
    plan = plan_rounds(lengths, devices, costs, devices_per_node=per_node)
    check_plan(plan, lengths, devices, per_node, costs)


def test_teams_of_one_degree_are_never_shorter_where_the_largest_leaves_devices_over():
    costs = PUBLISHED["flexsp-7b"].teams([1, 2, 4], 6, 4096)
    lengths = -(-NAMED["github"].draw(16, 4096, np.random.default_rng(0)) // 12) * 12
    plan = plan_rounds(lengths, 6, costs)
    check_plan(plan, lengths.tolist(), 6, 8, costs)
    assert plan.predicted_ms <= min(homogeneous_ms(lengths, 6, costs).values())


def test_degrees_that_are_no_powers_of_two():
    costs = {d: TeamCost(50.0, (1 + 0.3 * (d > 1)) / d, 2e-3 / d, 1000 * d) for d in (1, 2, 3, 5, 6, 12)}
    lengths = drawn(50, 2900, seed=4)
    plan = plan_rounds(lengths, 24, costs, devices_per_node=8)
    check_plan(plan, lengths, 24, 8, costs)
    powers = {d: costs[d] for d in (1, 2)} | {4: TeamCost(50.0, 1.3 / 4, 2e-3 / 4, 4000)}
    assert plan.predicted_ms < 1.02 * plan_rounds(lengths, 24, powers).predicted_ms


def test_many_rounds_are_planned_in_parts():
    lengths, costs = drawn(300, 900, seed=5), some(1, 2)
    assert Work.of(lengths, 2, 8, costs).fewest_rounds > 2 * MOST_TOGETHER
    plan = plan_rounds(lengths, 2, costs)
    check_plan(plan, lengths, 2, 8, costs)
    assert plan.predicted_ms < 1.1 * plan.any_cut_bound_ms


def test_sequences_of_which_two_have_no_room_together():
    """By their tokens fewer rounds would do, and each device holds one of them."""
    plan = plan_rounds([520] * 14, 2, some(1))
    check_plan(plan, [520] * 14, 2, 8, some(1))
    assert len(plan.rounds) == 7
    lengths = [one for length in (520, 530, 560, 601) for one in [length] * 4]  # that say no step between them
    plan = plan_rounds(lengths, 2, some(1))
    check_plan(plan, lengths, 2, 8, some(1))
    assert len(plan.rounds) == 8


def test_long_sequences_share_rounds_that_are_no_neighbours():
    """Memory makes three rounds of neighbours, and two of the longest with the shortest."""
    plan = plan_rounds([9000, 7000, 6500, 3500], 4, {4: TeamCost(600.0, 0.01, 1e-6, 13_500)})
    assert sorted(sorted(team.lengths) for one in plan.rounds for team in one.teams) == [[3500, 9000], [6500, 7000]]


def test_of_few_sequences_all_cuts_are_tried():
    """Two behind each other on all devices save what a round takes anyway, which estimates do not see."""
    per_token = {1: 0.0164, 2: 0.3134, 4: 0.1567, 8: 0.0959}
    costs = {degree: TeamCost(100.0, ms, 1.45e-7 / degree, 3120 * degree) for degree, ms in per_token.items()}
    given = [11_648, 3616, 2768, 400]
    assert plan_rounds(given, 8, costs).predicted_ms == pytest.approx(shortest_plan(given, 8, costs))


def test_a_degree_that_holds_no_sequence():
    plan = plan_rounds([6000] * 3, 8, some(1, 8))
    check_plan(plan, [6000] * 3, 8, 8, some(1, 8))
    assert [one.layout for one in plan.rounds] == ["8"] * 3
    assert plan.gap < 0.01


def test_what_a_plan_says_of_itself():
    plan = plan_rounds([1900, 600, 500, 400], 4, some(1, 2))
    check_plan(plan, [1900, 600, 500, 400], 4, 8, some(1, 2))
    assert plan.predicted_ms == pytest.approx(shortest_plan([1900, 600, 500, 400], 4, some(1, 2)))
    assert [one.layout for one in plan.rounds] == ["2 x 2"]
    assert plan.rounds[0].teams[0].sequences == (0,)
    assert plan.gap == plan.predicted_ms / plan.bound_ms - 1


def test_bad_input():
    with pytest.raises(SequenceFitsNoTeamError, match=r"sequence 2 has 5,000 tokens.*of 2 ranks, holds 2,000.*5 dev"):
        plan_rounds([100, 5000], 4, some(1, 2))
    with pytest.raises(SequenceFitsNoTeamError, match=r"5,000 tokens.*of 2 ranks, holds 2,000.*5 dev"):
        plan_rounds([5000], 4, some(1, 2))  # no multiple of what all lengths are multiples of fits
    with pytest.raises(DegreeError, match="degree 8: a team has from 1 to 4 ranks"):
        plan_rounds([100], 4, some(8))
    with pytest.raises(DegreeError, match="there is no degree"):
        plan_rounds([100], 4, {})
    for wrong in ([], [0], [1.5], [float("nan")], [[1]], [-1]):
        with pytest.raises(LengthsError, match="whole numbers from 1 on"):
            plan_rounds(wrong, 4, some(1))
