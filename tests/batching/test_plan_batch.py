"""Planning a mini-batch: every sequence once, budgets, balance near the optimum, equal plans on all ranks."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching import GroupCost, length_groups, plan_batch, planner
from fxpar.batching.loads import Load
from fxpar.errors import EmptyMiniBatchError, GroupCostsError, SequenceError, SequenceTooLongError
from tests.batching.planning import (
    IN_BINS,
    LINEAR,
    SQUARE,
    best_free,
    check_plan,
    mini_batches,
    no_switches,
    one_group,
    seconds,
)
from tests.repeat import examples

ROOT = str(Path(__file__).resolve().parents[2])


# --------------------------------------------------------------------------------------------------- properties
@given(mini_batches(), st.booleans(), st.booleans(), st.sampled_from([0.0, 1e-4, 1e-2]))
@settings(max_examples=examples(40))
def test_every_sequence_runs_once_within_the_budget(case, packed, merge, hop_s):
    lengths, groups, costs = case
    given, how = (lengths, groups, costs, lambda order, run_s: hop_s * len(order)), {"packed": packed, "merge": merge}
    plan = plan_batch(*given, **how)
    check_plan(plan, lengths, groups, costs, packed)
    assert plan_batch(*given, **how, least_border_s=no_switches) == plan
    assert merge or not plan.merged
    if not packed:
        assert all(len(micro.sequences) == 1 for group in plan.groups for micro in group.micro_batches())


@given(mini_batches(choices=[*IN_BINS, "dp4"]), st.booleans(), st.sampled_from([0.0, 1e-2]))
@settings(max_examples=examples(40))
def test_bins_hold_whole_sequences_and_the_dearest_counts(case, packed, hop_s):
    lengths, groups, costs = case
    plan = plan_batch(lengths, groups, costs, lambda order, run_s: hop_s * len(order), packed=packed)
    check_plan(plan, lengths, groups, costs, packed)


def test_bins_of_a_micro_batch_are_even():
    """Four long sequences and eight short ones: each of two bins gets two and four, in as few runs as the budget has
    room for.
    """
    groups = one_group("rows4", limit=100, budget=1200)
    plan = plan_batch([100] * 4 + [50] * 8, groups, [LINEAR], no_switches)
    ((micro,),) = plan.groups[0].replicas
    assert micro.bins == (3, 3, 3, 3)
    assert plan.predicted_s == pytest.approx(4 * 200e-6)


def test_a_budget_is_that_of_all_bins():
    """Two of four sequences fit in a bin of 100 tokens only where they have 50."""
    for length, runs in ((50, 1), (51, 2)):
        plan = plan_batch([length] * 4, one_group("rows2", 100, 200, world=2), [LINEAR], no_switches)
        assert len(plan.groups[0].replicas[0]) == runs


@given(mini_batches())
@settings(max_examples=examples(20))
def test_planning_again_gives_the_same(case):
    lengths, groups, costs = case
    first, again = (plan_batch(given, groups, costs, no_switches) for given in (lengths, np.array(lengths)))
    assert first == again
    assert first.fingerprint() == again.fingerprint()


def test_what_earlier_calls_worked_out_changes_nothing(monkeypatch):
    """Groups of other limits, strategies, budgets and costs, with and without packing, on the same sequences."""
    known: planner.KnownLoads = {}
    made, lengths = [], [5, 9, 30, 31, 64, 64, 80, 100]
    of = Load.of
    monkeypatch.setattr(Load, "of", lambda *given: made.append(given) or of(*given))
    for short, strategy, budget, cost, packed in itertools.product(
        (30, 64),
        ("dp4", "dp2.pp2", "dp4+zero2"),
        (100, 200),
        (LINEAR, replace(LINEAR, per_square_s=1e-8), SQUARE, replace(SQUARE, stages=2)),
        (True, False),
    ):
        groups = length_groups({short: strategy, 100: "tp4"}, world=4, token_budget=budget)
        given = (lengths, groups, (cost, SQUARE), no_switches)
        assert plan_batch(*given, packed=packed, known=known) == plan_batch(*given, packed=packed)
    count = len(made)
    assert plan_batch(*given, packed=packed, known=known) == plan_batch(*given, packed=packed, known=known)
    assert len(made) == count


def fingerprint_of_a_long_plan() -> str:
    draw = random.Random(3)
    lengths = [min(4000, int(draw.lognormvariate(5, 1.3)) + 1) for _ in range(300)]
    groups = length_groups({200: "dp4", 1000: "dp2.tp2+zero2", 4000: "cp4"}, world=4)
    costs = [GroupCost(0.01, 3e-5, 1e-9), GroupCost(0.015, 2e-5, 7e-10), GroupCost(0.02, 1e-5, 5e-10)]
    return plan_batch(lengths, groups, costs, lambda order, run_s: 0.01 * len(order)).fingerprint()


@pytest.mark.nightly  # ranks compare their plans in every step
def test_another_process_plans_the_same():
    """Its hashes have another seed than those of this one."""
    code = "from tests.batching.test_plan_batch import *; print(fingerprint_of_a_long_plan())"
    seed = str(random.SystemRandom().randrange(2**32))
    env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ROOT}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()
    assert found == fingerprint_of_a_long_plan(), seed
    assert len(found) == 16


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(2, 3), st.sampled_from([100, 150, 1000]))
@settings(max_examples=examples(40))
def test_within_four_thirds_of_the_optimum(lengths, replicas, budget):
    cost = GroupCost(0.0, 1e-6, 1e-8)
    groups = one_group(f"dp{replicas}", budget=budget, world=replicas)
    (group,) = plan_batch(lengths, groups, [cost], no_switches).groups
    assert group.predicted_s <= (4 / 3 - 1 / (3 * replicas)) * best_free(lengths, replicas, budget, cost) * (1 + 1e-9)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.sampled_from([100, 130, 1000]))
@settings(max_examples=examples(25))
def test_near_the_optimum_with_a_cost_per_run(lengths, budget):
    cost = GroupCost(5e-5, 1e-6, 1e-8)
    (group,) = plan_batch(lengths, one_group("dp2", budget=budget, world=2), [cost], no_switches).groups
    best = best_free(lengths, 2, budget, cost)
    assert group.lower_bound_s <= best * (1 + 1e-9)
    assert group.predicted_s <= 4 / 3 * best


@pytest.mark.parametrize("strategy", ["dp4", "dp8+zero1", "dp4+zero2", "dp8+zero3"])
@pytest.mark.parametrize("packed", [True, False])
def test_many_sequences_are_near_the_bound(strategy, packed):
    draw = random.Random(1)
    lengths = [min(4096, int(draw.lognormvariate(5.5, 1.2)) + 1) for _ in range(400)]
    groups = one_group(strategy, limit=4096, budget=8192, world=int(strategy[2]))
    plan = plan_batch(lengths, groups, [SQUARE], no_switches, packed=packed)
    check_plan(plan, lengths, groups, [SQUARE])
    (group,) = plan.groups
    assert group.predicted_s <= 1.08 * group.lower_bound_s


def test_attention_is_balanced_not_tokens():
    """One sequence of 1000 tokens costs as much attention as ten thousand of ten."""
    lengths = [1000] + [10] * 300
    cost = GroupCost(0.0, 1e-6, 1e-8)
    (group,) = plan_batch(lengths, one_group("dp2", limit=1000, budget=4000, world=2), [cost], no_switches).groups
    tokens = sorted(sum(m.tokens for m in micros) for micros in group.replicas)
    assert tokens == [1000, 3000]


def test_lock_step_puts_equal_runs_side_by_side():
    lengths = [100] * 4 + [10] * 4
    (group,) = plan_batch(lengths, one_group("dp4+zero3", budget=100), [SQUARE], no_switches).groups
    assert group.predicted_s == pytest.approx(SQUARE.seconds([100]) + SQUARE.seconds([10]))
    assert [[m.tokens for m in micros] for micros in group.replicas] == [[100, 10]] * 4


def test_few_micro_batches():
    """Sixteen sequences that fit in pairs: two runs per replica, not four."""
    (group,) = plan_batch([50] * 16, one_group("dp4", budget=100), [SQUARE], no_switches).groups
    assert [len(micros) for micros in group.replicas] == [2] * 4


def test_longest_run_comes_first():
    draw = random.Random(2)
    lengths = [draw.randint(1, 100) for _ in range(60)]
    for strategy in ("dp4", "dp4+zero2"):
        (group,) = plan_batch(lengths, one_group(strategy, budget=150), [SQUARE], no_switches).groups
        for micros in group.replicas:
            times = [SQUARE.seconds([lengths[i] for i in micro.sequences]) for micro in micros]
            assert times == sorted(times, reverse=True)


def test_no_cost_at_all_still_balances_tokens():
    free = GroupCost(0.0, 0.0, 0.0)
    (group,) = plan_batch([10] * 8, one_group("dp4"), [free], no_switches).groups
    assert [sum(m.tokens for m in micros) for micros in group.replicas] == [20] * 4


# --------------------------------------------------------------------------------------------------- edges
@pytest.mark.parametrize("strategy", ["dp4", "dp4+zero3", "dp2.tp2", "cp4"])
def test_one_sequence(strategy):
    groups = one_group(strategy)
    plan = plan_batch([7], groups, [SQUARE], no_switches)
    check_plan(plan, [7], groups, [SQUARE])
    assert plan.predicted_s == pytest.approx(SQUARE.seconds([7]))
    assert sorted(len(micros) for micros in plan.groups[0].replicas) == [0] * (groups[0].replicas - 1) + [1]


@pytest.mark.parametrize("bounded", [True, False])
def test_borders_of_groups_that_cannot_win_are_not_asked_for(monkeypatch, bounded):
    """Two groups take less by less than a border takes at least: by their bounds, or by their micro-batches."""
    groups, costs, asked = length_groups({10: "dp4", 40: "cp4"}, world=4, token_budget=40), [LINEAR] * 2, set()
    alone_s, apart_s = LINEAR.seconds([5, 30]), LINEAR.seconds([5]) + LINEAR.seconds([30])
    hop_s = abs(apart_s - alone_s) + alone_s

    def border_s(order, run_s):
        asked.add(order)
        return hop_s * len(order)

    if not bounded:
        monkeypatch.setattr(Load, "bound", 0)
    plan = plan_batch([5, 30], groups, costs, border_s, least_border_s=lambda order, _: 0.99 * hop_s * len(order))
    assert plan.order == (1,)
    assert asked == {(1,)}
    # What takes least without borders is not best with them.
    costs = [replace(LINEAR, per_token_s=0.0), LINEAR]
    assert plan_batch([5, 30], groups, costs, border_s, least_border_s=no_switches).order == (1,)
    assert asked == {(0, 1), (1,)}


def test_more_replicas_than_sequences():
    """Hazard H4: nothing is cut to a multiple of the replicas, and nothing is made up to fill them."""
    for count in range(1, 10):
        groups = one_group("dp4")
        plan = plan_batch([60] * count, groups, [SQUARE], no_switches)
        check_plan(plan, [60] * count, groups, [SQUARE])
        assert plan.tokens == 60 * count
        assert plan.groups[0].slots == -(-count // 4)


def test_empty_groups_are_left_out():
    """Hazard H4: a length group without sequences does not run a dummy batch."""
    groups = length_groups({10: "dp4", 20: "dp2.tp2", 40: "cp4"}, world=4)
    plan = plan_batch([5, 30], groups, [SQUARE] * 3, no_switches, merge=False)
    assert plan.order == (0, 2)
    assert plan.merged == ()


def test_a_sequence_as_long_as_the_limit():
    groups = length_groups({10: "dp4", 20: "cp4"}, world=4)
    plan = plan_batch([10, 11, 20], groups, [SQUARE] * 2, no_switches, merge=False)
    assert [g.sequences for g in plan.groups] == [(0,), (1, 2)]


def test_json_round_trip():
    plan = plan_batch([5, 30, 8], one_group(), [SQUARE], no_switches)
    data = json.loads(json.dumps(plan.to_json()))
    assert sorted(i for micros in data["groups"][0]["replicas"] for micro in micros for i in micro) == [0, 1, 2]
    assert data["predicted_s"] == plan.predicted_s


def test_time_is_worked_out_from_the_cost():
    groups = one_group("dp2", budget=100, world=2)
    (group,) = plan_batch([100, 60, 40, 30], groups, [SQUARE], no_switches).groups
    assert group.predicted_s == pytest.approx(seconds(group, SQUARE, [100, 60, 40, 30]))


# --------------------------------------------------------------------------------------------------- errors
def test_too_long_names_sequence_length_and_limit():
    with pytest.raises(SequenceTooLongError, match=r"sequence 1 .* 101 tokens.* 100 .*'dp4'.*Add a strategy.*split"):
        plan_batch([5, 101], one_group(), [LINEAR], no_switches)


def test_no_sequences():
    with pytest.raises(EmptyMiniBatchError, match="no sequence"):
        plan_batch([], one_group(), [LINEAR], no_switches)


@pytest.mark.parametrize("length", [0, -1])
def test_sequence_without_tokens(length):
    with pytest.raises(SequenceError, match=r"sequence 2 .* at least one"):
        plan_batch([5, 6, length], one_group(), [LINEAR], no_switches)


def test_costs_for_other_groups():
    with pytest.raises(GroupCostsError, match="1 length groups but 2 costs"):
        plan_batch([5], one_group(), [LINEAR] * 2, no_switches)


def test_a_plan_is_printed_as_a_table():
    """One line per group that runs, and what was merged."""
    groups = length_groups({100: "dp4", 1000: "dp2.tp2"}, world=4)
    lengths = [10, 20, 900, 800, 30]
    plan = plan_batch(lengths, groups, [LINEAR, SQUARE], no_switches, merge=False)
    head, titles, *rows = str(plan).splitlines()
    assert head.startswith("5 sequences, 1,760 tokens; predicted ")
    assert titles.split()[:3] == ["group", "up", "to"]
    assert [row.split()[:5] for row in rows] == [
        ["0", "100", "dp4", "3", "60"],
        ["1", "1,000", "dp2.tp2", "2", "1,700"],
    ]
    assert [row.split()[5:8] for row in rows] == [["0", "to", "1"], ["1", *rows[1].split()[6:8]]]
    merged = plan_batch(lengths, groups, [LINEAR, LINEAR], lambda order, run_s: float(len(order)))
    assert str(merged).splitlines()[-1] == "the sequences of group 0 run in group 1"


@pytest.mark.parametrize(
    ("lengths", "shared_by", "expected"),
    [
        ([40, 40, 40, 40], 2.0, 40),  # all are busy all the time
        ([80, 10, 10, 10], 1.0, 80),
        ([80, 10, 10, 10], 2.0, 40),  # the long one has a core to itself after a while
        ([80, 40, 40, 40], 2.0, 50),  # all of the work is done: a quarter each
        ([80, 10, 10, 10], 1.25, 64),
    ],
)
def test_a_replica_that_waits_leaves_its_core_to_the_others(lengths, shared_by, expected):
    cost = replace(LINEAR, shared_by=shared_by)
    (group,) = plan_batch(lengths, one_group(), [cost], no_switches).groups
    assert group.predicted_s == pytest.approx(expected * 1e-6)
    assert group.lower_bound_s <= group.predicted_s


def test_a_bubble_costs_nothing_where_others_have_work():
    """Two pipelines of two ranks each on two cores: while one rank waits, another one runs."""
    groups, lengths = one_group("dp2.pp2", budget=100), [50] * 8
    alone = plan_batch(lengths, groups, [replace(LINEAR, stages=2)], no_switches).predicted_s
    shared = plan_batch(lengths, groups, [replace(LINEAR, stages=2, shared_by=2.0)], no_switches).predicted_s
    assert alone == pytest.approx(250e-6)
    assert shared == pytest.approx(200e-6)
