"""Groups of pipelines: how finely their sequences are cut, and what the bubble is taken to cost."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.batching import GroupCost, plan_batch
from fxpar.batching.balance import Share, _least_load, makespan, share_out
from fxpar.batching.bounds import lower_bound
from fxpar.batching.packing import PackingRule, SequenceItem, as_bin, longest_first, spread_within
from fxpar.errors import ScheduleOptionError
from fxpar.schedule import Costs, schedule, simulate
from tests.batching.planning import check_plan, no_switches, one_group, seconds
from tests.batching.test_balance import items_of, packings
from tests.repeat import examples


# ------------------------------------------------------------------------------------------------ the cost model
def simulated(kind: str, ranks: int, runs: Sequence[float], virtual: int = 1) -> float:
    """Time of micro-batches by the schedule's own simulator, with backwards twice as dear as forwards."""
    filled = [*runs, *[runs[-1]] * (-len(runs) % ranks if virtual > 1 else 0)]
    plan = schedule(kind, ranks, len(filled), virtual=virtual)
    part = [c / virtual / 3 for c in filled]
    costs = Costs(lambda a: part[a.micro_batch], lambda a: 2 * part[a.micro_batch])
    return simulate(plan, costs).makespan_ms


runs_of = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(lambda found: sorted(found, reverse=True))
ONE_PER_TOKEN = {"fixed_s": 0.0, "per_token_s": 1.0, "per_square_s": 0.0}


@given(runs_of, st.integers(1, 6))
def test_gpipe_takes_what_is_predicted(runs, ranks):
    predicted = GroupCost(**ONE_PER_TOKEN, stages=ranks).replica_s([[n] for n in runs])
    assert predicted == pytest.approx(simulated("gpipe", ranks, runs))


@given(runs_of, st.integers(1, 6))
def test_1f1b_takes_hardly_less_than_is_predicted(runs, ranks):
    predicted = GroupCost(**ONE_PER_TOKEN, stages=ranks).replica_s([[n] for n in runs])
    assert 0.85 * predicted <= simulated("1f1b", ranks, runs) <= predicted * (1 + 1e-9)


@given(runs_of, st.integers(1, 6))
def test_zb_h1_takes_what_is_predicted(runs, ranks):
    predicted = GroupCost(**ONE_PER_TOKEN, stages=ranks, schedule="zb_h1").replica_s([[n] for n in runs])
    assert predicted == pytest.approx(simulated("zb_h1", ranks, runs))


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 4), st.integers(1, 3))
def test_interleaved_of_equal_micro_batches_takes_what_is_predicted(count, length, ranks, virtual):
    cost = GroupCost(**ONE_PER_TOKEN, stages=ranks, virtual=virtual)
    if virtual > 1:
        assert cost.replica_s([[length]] * count) == pytest.approx(
            simulated("interleaved_1f1b", ranks, [length] * count, virtual)
        )


def test_nothing_to_run_takes_no_time():
    assert GroupCost(1.0, 1.0, 1.0, stages=4).replica_s([]) == 0.0


@pytest.mark.parametrize("counts", [{"stages": 0}, {"virtual": 0}, {"stages": -1}])
def test_counts_below_one(counts):
    with pytest.raises(ScheduleOptionError, match="must be 1 or more"):
        GroupCost(0.0, 0.0, 0.0, **counts)


def test_a_schedule_that_there_is_not():
    with pytest.raises(ScheduleOptionError, match="'zb_h2'"):
        GroupCost(0.0, 0.0, 0.0, schedule="zb_h2")


# --------------------------------------------------------------------------------------------- against brute force
def best_time(items: Sequence[SequenceItem], rule: PackingRule) -> int:
    """Least time over all packings and all ways to hand them to replicas."""
    packs = packings(items, rule.budget) if rule.packed else [[as_bin([item]) for item in items]]
    best = None
    for bins in packs:
        for owners in itertools.product(range(rule.replicas), repeat=len(bins)):
            shares: list[Share] = [[] for _ in range(rule.replicas)]
            for one, owner in sorted(zip(bins, owners, strict=True), key=lambda pair: -pair[0].cost):
                shares[owner].append(one)
            time = makespan(shares, rule)
            best = time if best is None else min(best, time)
    assert best is not None
    return best


rules = st.builds(
    PackingRule,
    replicas=st.integers(1, 3),
    budget=st.sampled_from([50, 60, 100, 1000]),
    fixed=st.sampled_from([0, 1, 7, 50, 1000]),
    lockstep=st.booleans(),
    packed=st.booleans(),
    stages=st.sampled_from([2, 3, 4, 8]),
    virtual=st.integers(1, 3),
)
rules |= st.builds(replace, rules, virtual=st.just(1), zero_bubble=st.just(True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), rules, st.sampled_from([0, 1, 3]))
@settings(max_examples=examples(40))
def test_no_plan_undercuts_the_bound(lengths, rule, slope):
    items = longest_first(SequenceItem(i, n, slope * n + slope * n * n // 10) for i, n in enumerate(lengths))
    found, best = makespan(share_out(items, rule), rule), best_time(items, rule)
    assert lower_bound(items, rule) <= best <= found
    if rule.virtual == 1:
        assert 3 * found <= 4 * best


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), rules)
@settings(max_examples=examples(40))
def test_every_sequence_once_within_the_budget(lengths, rule):
    items = longest_first(SequenceItem(i, n, n + n * n // 10) for i, n in enumerate(lengths))
    shares = share_out(items, rule)
    assert len(shares) == rule.replicas
    bins = [one for share in shares for one in share]
    assert sorted(item.index for one in bins for item in one.items) == list(range(len(lengths)))
    assert all(one == as_bin(one.items) and one.tokens <= rule.budget for one in bins)
    assert all([one.cost for one in share] == sorted((b.cost for b in share), reverse=True) for share in shares)
    assert lower_bound(items, rule) <= makespan(shares, rule)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), rules)
@settings(max_examples=examples(40))
def test_numbers_of_micro_batches_that_are_not_tried_take_longer(lengths, rule):
    items = longest_first(SequenceItem(i, n, n + n * n // 10) for i, n in enumerate(lengths))
    total = sum(item.cost for item in items)
    for count in range(1, len(items) + 1):
        bins = spread_within(items, count, rule.budget)
        if bins:
            assert len(bins) == count
            assert _least_load(total, items[0].cost, count, rule) <= rule.time([one.cost for one in bins])


# ------------------------------------------------------------------------------------------------ how finely to cut
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("fixed", "runs"), [(0, 64), (12, 16), (48, 8), (192, 4), (10**6, 1)])
def test_as_many_runs_as_outweigh_the_bubble(lockstep, fixed, runs):
    """64 equal sequences of cost 16 on a replica of 4 ranks: the best number is sqrt(3 * 1024 / fixed)."""
    rule = PackingRule(2, 10**6, fixed, lockstep=lockstep, stages=4)
    assert [len(share) for share in share_out(items_of(*[16] * 128), rule)] == [runs] * 2


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("stages", "fixed", "runs"), [(4, 10, 12), (3, 10, 9), (8, 8, 24)])
def test_interleaved_runs_fill_their_rounds(lockstep, stages, fixed, runs):
    """sqrt((stages - 1) / 2 * 1024 / fixed) is 12.4, 10.1 and 21.2; of the rounds next to it the cheaper one is run."""
    rule = PackingRule(2, 10**6, fixed, lockstep=lockstep, stages=stages, virtual=2)
    assert [len(share) for share in share_out(items_of(*[1] * 2048), rule)] == [runs] * 2


def test_one_long_sequence_is_not_cut_but_leaves_the_short_ones_together():
    """The longest run is that sequence whatever the others do: they go in few runs no longer than it."""
    (share,) = share_out(items_of(100, *[10] * 20), PackingRule(1, 1000, 5, stages=4))
    assert [one.cost for one in share] == [100, 100, 100]


def test_dear_sequences_share_a_replica():
    """A replica that runs a long sequence has a long bubble, which leaves it less time: so only one has them."""
    items, rule = items_of(40, 40, 40, *[1] * 400), PackingRule(2, 1000, stages=8)
    shares = share_out(items, rule)
    assert sorted(max(one.cost for one in share) for share in shares) == [1, 40]
    assert makespan(shares, rule) <= 1.01 * lower_bound(items, rule)


@pytest.mark.parametrize("strategy", ["pp4", "dp2.pp4", "dp4.pp8", "dp2.pp4+zero2", "dp4.pp8+zero3"])
@pytest.mark.parametrize("packed", [True, False])
def test_many_sequences_are_near_the_bound(strategy, packed):
    draw = random.Random(1)
    lengths = [min(4096, int(draw.lognormvariate(5.5, 1.2)) + 1) for _ in range(400)]
    world = {"pp4": 4, "dp2.pp4": 8, "dp4.pp8": 32}[strategy.split("+")[0]]
    groups = one_group(strategy, limit=4096, budget=8192, world=world)
    cost = GroupCost(1e-3, 1e-6, 1e-9, stages=groups[0].strategy.degree("pp"))
    plan = plan_batch(lengths, groups, [cost], no_switches, packed=packed)
    check_plan(plan, lengths, groups, [cost])
    (group,) = plan.groups
    assert group.predicted_s <= 1.12 * group.lower_bound_s
    (coarse,) = plan_batch(lengths, groups, [GroupCost(1e-3, 1e-6, 1e-9)], no_switches, packed=packed).groups
    assert group.predicted_s <= seconds(coarse, cost, lengths) * (1 + 1e-9)


def test_predicted_as_the_cost_says():
    cost = GroupCost(1e-3, 1e-6, 1e-9, stages=2, virtual=2)
    lengths = [90, 80, 70, 60, 50]
    (group,) = plan_batch(lengths, one_group("dp2.pp2", budget=100), [cost], no_switches).groups
    times = [cost.replica_s([[lengths[i] for i in m.sequences] for m in micros]) for micros in group.replicas]
    assert group.predicted_s == pytest.approx(max(times))


@pytest.mark.parametrize(("stages", "merged"), [(1, ()), (4, ((0, 1),))])
def test_a_bubble_too_long_merges(stages, merged):
    """One short sequence alone in a pipeline takes four times what it adds to the group of the long one."""
    groups = (*one_group("pp4", limit=100, budget=100), *one_group("tp4", limit=1000, budget=1000))
    costs = [GroupCost(1e-5, 1e-6, 0.0, stages=stages), GroupCost(1e-5, 2e-6, 0.0)]
    assert plan_batch([50, 900], groups, costs, no_switches).merged == merged


# --------------------------------------------------------------------------------------------------- without stages
def test_plans_without_stages_are_what_they_were():
    """Hash of 120 plans, made before pipelines were known."""
    draw = random.Random(5)
    found = []
    for _ in range(60):
        strategy = draw.choice(["dp4", "dp2.tp2", "dp4+zero2", "dp2.cp2+zero3"])
        groups = one_group(strategy, limit=500, budget=draw.choice([500, 800, 2000]))
        cost = GroupCost(draw.choice([0.0, 1e-4, 1e-2]), 1e-6, draw.choice([0.0, 1e-8]))
        lengths = [draw.randint(1, 500) for _ in range(draw.choice([1, 3, 10, 80]))]
        for packed in (True, False):
            found.append(plan_batch(lengths, groups, [cost], no_switches, packed=packed).fingerprint())
    assert hashlib.sha256("".join(found).encode()).hexdigest()[:16] == "6a0f192ce8ee1797"
