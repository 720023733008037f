"""Groups that are not worth a switch run in a larger one, and only then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching import GroupCost, RunTime, length_groups, plan_batch
from fxpar.batching import planner as planner_module
from tests.batching.planning import check_plan, mini_batches
from tests.repeat import examples

FAST, SLOW = GroupCost(1e-3, 1e-6, 0.0), GroupCost(4e-3, 4e-6, 0.0)
TWO = length_groups({100: "dp4", 1000: "cp4"}, world=4)


def per_hop(seconds: float):
    return lambda order, run_s: seconds * (len(order) - 1)


def test_a_dear_switch_merges():
    plan = plan_batch([50, 900], TWO, [FAST, SLOW], per_hop(1.0))
    least_s = planner_module.least_batch_s([50, 900], TWO, [FAST, SLOW], per_hop(1.0))
    assert least_s == pytest.approx(plan.predicted_s)
    assert plan.merged == ((0, 1),)
    assert plan.order == (1,)
    assert plan.switch_s == 0.0


def test_a_cheap_switch_does_not():
    plan = plan_batch([50] * 400 + [900], TWO, [FAST, SLOW], per_hop(1e-6))
    assert plan.merged == ()
    assert plan.order == (0, 1)
    assert plan.switch_s == pytest.approx(1e-6)


def test_the_decision_turns_where_the_times_are_equal():
    lengths = [50] * 8 + [900]
    apart = plan_batch(lengths, TWO, [FAST, SLOW], per_hop(0.0), merge=False)
    together = plan_batch(lengths, TWO, [FAST, SLOW], per_hop(10.0))
    even = together.predicted_s - apart.predicted_s
    assert even > 0
    assert plan_batch(lengths, TWO, [FAST, SLOW], per_hop(even * 0.999)).merged == ()
    assert plan_batch(lengths, TWO, [FAST, SLOW], per_hop(even * 1.001)).merged == ((0, 1),)


def test_no_gain_no_merge():
    same = length_groups({100: "cp4", 1000: "cp4"}, world=4, token_budget=1000)
    cost = GroupCost(0.0, 1e-6, 0.0)
    assert plan_batch([50, 900], same, [cost, cost], per_hop(0.0)).merged == ()


def test_never_into_a_smaller_group():
    plan = plan_batch([50] * 1000 + [900], TWO, [FAST, SLOW], lambda order, run_s: 0.0 if order == (0,) else 100.0)
    check_plan(plan, [50] * 1000 + [900], TWO, [FAST, SLOW])
    assert 1 in plan.order


def test_merge_can_be_switched_off():
    plan = plan_batch([50, 900], TWO, [FAST, SLOW], per_hop(1.0), merge=False)
    assert plan.order == (0, 1)
    assert plan.predicted_s > 1.0


def test_into_an_empty_group_that_saves_the_switch():
    """The weights already lie as group 1 needs them; group 0 alone would need a switch."""
    plan = plan_batch([50], TWO, [FAST, SLOW], lambda order, run_s: 0.0 if order == (1,) else 1.0)
    assert plan.order == (1,)
    assert plan.merged == ((0, 1),)


def hidden_behind_runs(seconds: float):
    """A border is hidden by the run before it, as far as that lasts."""
    return lambda order, runs: sum(max(0.0, seconds - run.seconds) for run in runs[:-1])


def test_a_border_that_a_run_hides_does_not_merge():
    lengths = [50] * 400 + [900]
    apart = plan_batch(lengths, TWO, [FAST, SLOW], per_hop(0.0), merge=False)
    border = 0.9 * apart.groups[0].predicted_s
    assert plan_batch(lengths, TWO, [FAST, SLOW], hidden_behind_runs(border)).merged == ()
    assert plan_batch(lengths, TWO, [FAST, SLOW], hidden_behind_runs(border)).switch_s == 0.0
    assert plan_batch(lengths, TWO, [FAST, SLOW], hidden_behind_runs(100.0)).merged == ((0, 1),)


def test_borders_are_asked_with_micro_batches_and_bounded_with_one():
    asked = {}

    def border_s(order, runs):
        asked.setdefault(order, []).append(runs)
        return 0.0

    plan = plan_batch([50] * 400 + [900], TWO, [FAST, SLOW], border_s)
    assert plan.order == (0, 1)
    assert plan.groups[0].slots > 1
    assert tuple(RunTime(group.predicted_s, group.slots) for group in plan.groups) in asked[plan.order]
    assert all(run.micro_batches == 1 for run in asked[1,][0])  # only looked at, not worked out


def brute_force(lengths, groups, costs, border_s) -> float:
    """Least time over all choices of running groups, each planned on its own."""
    best = float("inf")
    for size in range(1, len(groups) + 1):
        for chosen in itertools.combinations(range(len(groups)), size):
            if max(lengths) > groups[chosen[-1]].limit:
                continue
            part = plan_batch(
                lengths, [groups[g] for g in chosen], [costs[g] for g in chosen], lambda order, run_s: 0.0, merge=False
            )
            if len(part.order) == size:
                runs = tuple(RunTime(group.predicted_s, group.slots) for group in part.groups)
                best = min(best, part.predicted_s + border_s(chosen, runs))
    return best


@given(mini_batches(most=15), st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 1e-2]), min_size=4, max_size=4), st.booleans())
@settings(max_examples=examples(25))
def test_the_best_choice_is_found(case, hops, hidden):
    lengths, groups, costs = case

    def border_s(order, runs):
        """The run before hides a border, the last micro-batch of it most."""
        hides = [run.seconds / 2 * (1 + 1 / run.micro_batches) if hidden else 0.0 for run in runs]
        return sum(max(0.0, hops[g] - run) for g, run in zip(order, [0.0, *hides], strict=False))

    plan = plan_batch(lengths, groups, costs, border_s, ride=False)
    assert plan.predicted_s == pytest.approx(brute_force(lengths, groups, costs, border_s), rel=1e-9, abs=1e-12)
    assert planner_module.least_batch_s(lengths, groups, costs, border_s) <= plan.predicted_s * (1 + 1e-9)


def test_more_groups_than_are_searched_through(monkeypatch):
    """Local search on eight groups ends where trying everything does."""
    groups = length_groups({10 * 2**k: "dp4" if k < 5 else "cp4" for k in range(8)}, world=4)
    costs = [GroupCost(1e-3 * (k + 1), 1e-6 * (k + 1), 0.0) for k in range(8)]
    lengths = [9, 15, 15, 30, 70, 70, 150, 300, 600, 1200] * 3
    local = plan_batch(lengths, groups, costs, per_hop(5e-3))
    check_plan(local, lengths, groups, costs)
    monkeypatch.setattr(planner_module, "EXHAUSTIVE", 8)
    everything = plan_batch(lengths, groups, costs, per_hop(5e-3))
    assert local.merged
    assert local.predicted_s == pytest.approx(everything.predicted_s)
