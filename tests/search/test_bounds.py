"""No plan of the batch planner is faster than a bound; the planner knows nothing of the bounds."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fxpar.batching import LengthGroup, plan_batch
from fxpar.cost.group_cost import GroupCost, TeamsCost
from fxpar.ir.strategy import Strategy
from fxpar.search.bounds import Intervals, least_mini_batch, least_seconds

EDGES = (16, 64, 200)
STRATEGIES = ["dp4", "dp2.tp2+sp", "tp4+sp", "dp2.pp2", "pp4", "dp4+zero3", "dp2.pp2+interleaved_1f1b", "pp4+zb_h1"]
batches = st.lists(st.lists(st.integers(1, EDGES[-1]), min_size=1, max_size=30), min_size=1, max_size=3)
seconds = st.floats(0.0, 1.0)


@st.composite
def costs(draw):
    strategy = Strategy.parse(draw(st.sampled_from(STRATEGIES)))
    numbers = draw(seconds), draw(seconds) / 100, draw(seconds) / 10_000
    shared_by = draw(st.sampled_from([1.0, 1.5, 4.0]))
    pipeline = strategy.pipeline
    return strategy, GroupCost(*numbers, strategy.pipeline_size, pipeline.virtual, pipeline.schedule, shared_by)


def planned_s(batch, chosen, most):
    """Seconds of a mini-batch whose groups (limit, (strategy, cost)) run as planned, without borders."""
    groups = [LengthGroup(limit, one[0], most) for limit, one in chosen]
    plan = plan_batch(batch, groups, [one[1] for _, one in chosen], lambda *_: 0.0)
    return plan.predicted_s


@example(one=(Strategy.parse("dp2.pp2"), GroupCost(2.2e-311, 0.0, 1e-4, stages=2)), lengths=[[9]], budget=200)
@given(costs(), batches, st.sampled_from([200, 300, 1000]))
def test_a_group_takes_at_least_its_bound(one, lengths, budget):
    strategy, cost = one
    found = Intervals(EDGES, tuple(map(tuple, lengths)))
    least = least_seconds(cost, strategy, [budget] * 3, found)
    for number, batch in enumerate(lengths):
        for i, j in itertools.combinations_with_replacement(range(3), 2):
            low = 0 if i == 0 else EDGES[i - 1]
            inside = [n for n in batch if low < n <= EDGES[j]]
            took = planned_s(inside, [(EDGES[-1], one)], budget) if inside else 0.0
            assert least[number, i, j] <= took * (1 + 1e-9) + 1e-12


@given(st.lists(costs(), min_size=2, max_size=3), batches, st.integers(1, 3))
def test_no_set_takes_less_than_the_bound(several, lengths, most):
    found = Intervals(EDGES, tuple(map(tuple, lengths)))
    fastest = np.stack([least_seconds(cost, s, [300] * 3, found) for s, cost in several]).min(axis=0)
    bound = least_mini_batch(fastest, most)
    for count in range(1, most + 1):
        for limits in itertools.combinations(EDGES[:-1], count - 1):
            for chosen in itertools.product(several, repeat=count):
                groups = list(zip((*limits, EDGES[-1]), chosen, strict=True))
                took = [planned_s(batch, groups, 300) for batch in lengths]
                assert bound <= np.mean(took) * (1 + 1e-9) + 1e-12


@given(
    st.sampled_from(["cp2 | dp1 | dp1", "cp2 | dp2", "tp2 > tp2 | dp4", "rows2 | dp2", "dp2+zero3 | cp2"]),
    st.lists(st.tuples(seconds, seconds, seconds), min_size=3, max_size=3),
    st.sampled_from([1.0, 2.0]),
    batches,
)
def test_teams_take_at_least_their_bound(formation, numbers, shared_by, lengths):
    strategy, budget = Strategy.parse(formation), 2 * EDGES[-1]
    cost = TeamsCost(
        tuple(
            GroupCost(a, b / 100, c / 10_000, team.pipeline_size, shared_by=shared_by)
            for team, (a, b, c) in zip(strategy.teams, numbers, strict=False)
        )
    )
    found = Intervals(EDGES, tuple(map(tuple, lengths)))
    least = least_seconds(cost, strategy, [budget] * 3, found)
    for number, batch in enumerate(lengths):
        took = planned_s(batch, [(EDGES[-1], (strategy, cost))], budget)
        assert least[number, 0, 2] <= took * (1 + 1e-9) + 1e-12


def test_what_does_not_fit_takes_forever():
    found = Intervals(EDGES, ((10, 100),))
    cost = GroupCost(0.0, 1.0, 0.0)
    least = least_seconds(cost, Strategy.parse("dp2"), [64, 64, None], found)[0]
    assert least[0, 0] == 10.0
    assert np.isinf(least[:, 2]).all()
    assert np.isinf(least[1, 0])


def test_a_pipeline_is_filled_with_a_micro_batch():
    """No number of micro-batches takes less: 1.6 s of work in 16 of 0.2 s, or fewer that are longer."""
    strategy, cost = Strategy.parse("pp4"), GroupCost(0.1, 0.01, 0.0, 4)
    found = Intervals(EDGES, ((10,) * 16,))
    [[least]] = least_seconds(cost, strategy, [200] * 3, found)[:, 0, :1]
    took = [m * (0.1 + 1.6 / m) + 3 * (0.1 + 1.6 / m) for m in range(1, 17)]
    planned = planned_s([10] * 16, [(200, (strategy, cost))], 200)
    assert 0.99 * planned <= least <= min(took) <= planned


def test_the_bound_is_met_where_nothing_is_lost():
    """Equal sequences that divide over the replicas, one strategy: two of 50 tokens on each, in one micro-batch."""
    strategy, cost = Strategy.parse("dp4"), GroupCost(0.5, 0.01, 0.0)
    found = Intervals(EDGES, ((50,) * 8,))
    least = least_seconds(cost, strategy, [100] * 3, found)
    assert least[0, 0, 2] == 2 * 50 * 0.01 + 0.5
    assert planned_s([50] * 8, [(200, (strategy, cost))], 200) == 2 * 50 * 0.01 + 0.5
