"""Short sequences ride in longer groups where that is predicted to be faster, and only there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching import GroupCost, RunTime, length_groups, plan_batch
from tests.batching.planning import check_plan, mini_batches, no_switches
from tests.repeat import examples

LINEAR = GroupCost(0.0, 1e-6, 0.0)


def both(lengths, groups, costs, border_s=no_switches, **how):
    """Plans with and without riders."""
    return [plan_batch(lengths, groups, costs, border_s, ride=ride, **how) for ride in (True, False)]


@given(mini_batches(most=15), st.lists(st.sampled_from([0.0, 1e-5, 1e-3]), min_size=4, max_size=4), st.booleans())
@settings(max_examples=examples(40))
def test_never_slower_and_each_sequence_once_within_limits_and_budgets(case, hops, packed):
    lengths, groups, costs = case

    def border_s(running, runs):
        hidden = [run.seconds / 2 * (1 + 1 / run.micro_batches) for run in runs]
        return sum(max(0.0, hops[g] - run) for g, run in zip(running, [0.0, *hidden], strict=False))

    plan, without = both(lengths, groups, costs, border_s, packed=packed)
    check_plan(plan, lengths, groups, costs)
    assert plan.predicted_s <= without.predicted_s
    assert not without.rides
    runs = tuple(RunTime(group.predicted_s, group.slots) for group in plan.groups)
    assert plan.switch_s == pytest.approx(border_s(plan.order, runs), abs=1e-12)
    assert plan == plan_batch(lengths, groups, costs, border_s, packed=packed)


def test_a_whole_group_may_pass_over_the_next_one():
    """Three long sequences on two replicas: the hole is a long sequence wide. Those between leave none."""
    groups = length_groups({100: "dp4", 200: "tp4", 1000: "dp2.tp2"}, world=4, token_budget=1000)
    lengths = [1000] * 3 + [200] * 40 + [100] * 10
    plan, without = both(lengths, groups, [LINEAR, replace(LINEAR, per_token_s=3e-7), LINEAR])
    assert without.predicted_s == pytest.approx(2000e-6 + 2400e-6 + 300e-6)
    assert plan.predicted_s == pytest.approx(2000e-6 + 2400e-6)
    assert plan.merged == ((0, 2),)
    assert not plan.rides


def test_only_as_many_as_fit_into_the_hole():
    groups = length_groups({100: "dp4", 1000: "dp2.tp2"}, world=4, token_budget=1000)
    plan, without = both([1000] * 3 + [100] * 24, groups, [LINEAR, LINEAR])
    ((own, into, number),) = plan.rides
    assert (own, into) == (0, 1)
    assert 8 <= number <= 12
    assert plan.predicted_s <= without.predicted_s - 200e-6 + 1e-12
    assert f"{number} of the sequences of group 0 ride in group 1" in str(plan)


def test_rows_that_are_not_full_take_short_ones():
    """A run costs much and a token little: two rows of the long group have room for the row of the short one."""
    groups = length_groups({100: "cp4", 600: "tp4"}, world=4, token_budget={100: 200, 600: 1000})
    dear, cheap = GroupCost(1e-3, 1e-6, 0.0), GroupCost(5e-3, 1e-6, 0.0)
    plan, without = both([600, 600, *[100] * 20], groups, [dear, cheap])
    assert plan.rides == ((0, 1, 8),)
    assert without.predicted_s - plan.predicted_s == pytest.approx(4e-3)


def test_where_a_group_takes_multiples_only_those_ride():
    groups = length_groups({100: "dp4", 1000: "dp2.tp2"}, world=4, token_budget=1000)
    groups = (groups[0], replace(groups[1], multiple=2))
    lengths = [1000] * 3 + [100] * 8 + [99] * 8
    plan, without = both(lengths, groups, [LINEAR, LINEAR])
    assert plan.predicted_s < without.predicted_s
    assert plan.rides
    assert all(lengths[i] % 2 == 0 for i in plan.groups[1].sequences)


def test_groups_that_do_not_join_take_no_riders():
    groups = length_groups({100: "dp4", 1000: "dp2.tp2"}, world=4, token_budget=1000)
    plan = plan_batch([1000] * 3 + [100] * 8, groups, [LINEAR, LINEAR], no_switches, merge=False)
    assert not plan.merged
    assert not plan.rides
    assert plan.order == (0, 1)


def test_no_gain_no_rides():
    """Four equal sequences on four replicas leave nothing to fill."""
    groups = length_groups({100: "dp4", 1000: "tp4"}, world=4)
    plan, without = both([100] * 400 + [1000] * 4, groups, [LINEAR, GroupCost(0.0, 2e-6, 0.0)])
    assert plan == without


def test_a_gain_on_a_long_tail():
    """As on one GPU node: launches weigh, and long sequences leave rows half empty."""
    draw = random.Random(5)
    lengths = [min(2048, int(draw.lognormvariate(5.85, 1.46)) + 1) for _ in range(100)]
    groups = length_groups({256: "dp4", 1024: "dp2.pp2", 2048: "cp4"}, world=4)
    costs = [
        GroupCost(1.45e-3, 2.4e-7, 9e-12),
        GroupCost(0.89e-3, 0.84e-7, 6e-12, stages=2),
        GroupCost(1.85e-3, 0.85e-7, 9e-12),
    ]
    plan, without = both(lengths, groups, costs, lambda running, runs: 1e-4 * len(running))
    check_plan(plan, lengths, groups, costs)
    assert plan.predicted_s < 0.995 * without.predicted_s


def test_a_guess_that_does_not_come_true_is_dropped():
    """What riders save, the switch that their group has hidden takes instead."""
    groups = length_groups({100: "dp4", 1000: "dp2.tp2"}, world=4, token_budget=1000)

    def border_s(running, runs):
        return max(0.0, 600e-6 - runs[0].seconds) if len(running) > 1 else 1.0

    plan, without = both([1000] * 3 + [100] * 24, groups, [LINEAR, LINEAR], border_s)
    assert without.predicted_s == pytest.approx(2600e-6)
    assert plan == without
