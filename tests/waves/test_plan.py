"""Plans of waves: checked by plain code, against the sheet's figures, against all plans of tiny graphs; bad input."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import FitsNoDevicesError
from fxpar.waves import CASES, MetaOp, TaskGraph, plan_waves
from tests.repeat import examples, thinned
from tests.waves.plain import check_plan, least_ms, metaop, nodes, without_transfers


@st.composite
def graphs(draw, most: int = 6, layers: int = 6) -> TaskGraph:
    """MetaOps that share weights now and then, with speeds that are not concave, and edges from left to right."""
    count = draw(st.integers(1, most))
    found = []
    for i in range(count):
        widths = draw(st.sets(st.integers(1, 6), min_size=1, max_size=4) | st.just({1, 2, 4}))
        base = draw(st.floats(0.5, 20))
        times = {n: base * draw(st.floats(0.6, 1.2)) / n + draw(st.sampled_from((0.0, 0.5))) for n in sorted(widths)}
        size = draw(st.sampled_from((0.0, 1e7, 1e9)))
        depth = draw(st.integers(1, layers))
        shared = f"shared {depth}" if draw(st.booleans()) else ""
        found.append(MetaOp(f"m{i}", depth, times, size, 1e9, 2e9, shared))
    pairs = [(f"m{i}", f"m{j}") for j in range(count) for i in range(j)]
    return TaskGraph(tuple(found), tuple(one for one in pairs if draw(st.integers(0, 3)) == 0))


@given(graphs(), st.integers(1, 12), st.sampled_from((1, 3, 4)), st.sampled_from((math.inf, 20e9)))
@settings(max_examples=examples(60), deadline=None)
def test_plans_of_any_graph(graph, count, per_node, memory):
    try:
        plan = plan_waves(graph, nodes(count, per_node), count, memory_bytes=memory, effort=300)
    except FitsNoDevicesError:
        assert memory < math.inf or any(min(one.layer_ms) > count for one in graph.metaops)
        return
    check_plan(plan, memory)
    assert plan.ms <= plan.spindle_ms * (1 + 1e-12)  # sums in another order


@given(graphs(most=3, layers=2), st.integers(2, 4))
@settings(max_examples=examples(40), deadline=None)
def test_the_bound_and_the_best_plan_of_tiny_graphs(graph, count):
    graph = without_transfers(graph)
    if any(min(one.layer_ms) > count for one in graph.metaops):
        return
    plan = plan_waves(graph, nodes(count), effort=3000)
    best = least_ms(graph, count)
    assert plan.bound_ms <= best * (1 + 1e-9)
    assert best <= plan.ms * (1 + 1e-9)
    assert plan.ms <= 1.25 * best


def test_never_longer_than_one_after_the_other():
    """Side by side a and b leave a device idle; all that was looked at besides takes 8.4."""
    ops = (MetaOp("a", 3, {1: 3, 2: 1.65}), MetaOp("b", 1, {1: 4, 2: 2}), MetaOp("c", 2, {1: 1, 2: 0.55}))
    plan = plan_waves(TaskGraph(ops, (("a", "c"), ("b", "c"))), nodes(2))
    check_plan(plan)
    assert plan.ms == pytest.approx(8.05)


# C* of the table of the open planner's figures, and its waves with extension, by tasks and devices.
TABLE = {
    ("clip-4", 8): (91.9, 97.6),
    ("clip-4", 16): (52.1, 59.9),
    ("clip-4", 32): (32.6, 37.8),
    ("clip-4", 64): (23.1, 29.3),
    ("clip-7", 8): (247.2, 253.2),
    ("clip-7", 16): (129.5, 137.1),
    ("clip-7", 32): (71.1, 77.5),
    ("clip-7", 64): (42.2, 47.4),
    ("clip-10", 8): (322.5, 334.5),
    ("clip-10", 16): (167.2, 180.1),
    ("clip-10", 32): (90.1, 100.8),
    ("clip-10", 64): (51.8, 60.5),
}


@pytest.mark.parametrize(("name", "count"), thinned(TABLE, [("clip-4", 64), ("clip-7", 16), ("clip-10", 32)]))
def test_the_table_of_clip_models(name, count):
    """Without transfers, as there: the bound to what is printed, the plan within 10 %, and no longer than the waves."""
    bound, waves = TABLE[name, count]
    plan = plan_waves(without_transfers(CASES[name]), nodes(count), effort=20_000)
    check_plan(plan)
    assert plan.bound_ms == pytest.approx(bound, abs=0.0501)
    assert plan.ms <= min(waves, plan.spindle_ms) + 0.05
    assert plan.gap <= 0.10


def test_equal_arguments_give_equal_plans():
    graph = TaskGraph((metaop("a", 5), metaop("b", 7, work=3, output_bytes=1e8)), (("a", "b"),))
    assert plan_waves(graph, nodes(6), effort=500) == plan_waves(graph, nodes(6), effort=500)


def test_two_equal_metaops_share_the_devices():
    plan = plan_waves(TaskGraph((metaop("a", 6), metaop("b", 6))), nodes(8))
    assert plan.ms == pytest.approx(6 * (0.4 + 8 / 4))
    assert plan.gap == pytest.approx(0, abs=1e-6)
    assert [len(one) for one in plan.waves] == [2]


def test_memory_decides_who_stands_where():
    """Each device holds two of the four MetaOps' weights, so nobody may spread out."""
    towers = tuple(metaop(name, 4, state_bytes=1e9, widest=4) for name in "abcd")
    plan = plan_waves(TaskGraph(towers), nodes(4), memory_bytes=4.5e9, effort=500)
    check_plan(plan, 4.5e9)
    assert plan_waves(TaskGraph(towers), nodes(4)).ms <= plan.ms


def test_a_reader_on_other_devices_is_in_a_later_wave():
    towers = (metaop("a", 2, widest=1, state_bytes=6.0), metaop("b", 2, widest=1, state_bytes=6.0))
    plan = plan_waves(TaskGraph(towers, (("a", "b"),)), nodes(2), memory_bytes=12.5, effort=10)
    check_plan(plan, 12.5)
    assert [piece.devices for piece in plan.pieces] == [(0,), (1,)]
    assert plan.waves == ((0,), (1,))


def test_those_that_share_weights_stand_together():
    """Two tasks on one encoder use the same devices, so nobody else holds its weights."""
    towers = [metaop(f"{task}.{kind}", 4, state_bytes=1e9, weights=kind, widest=2) for task in "xy" for kind in "ab"]
    edges = (("x.a", "y.a"), ("x.b", "y.b"))  # one task after the other
    plan = plan_waves(TaskGraph(tuple(towers), edges), nodes(4, 2), effort=200)
    check_plan(plan)
    where = {plan.graph.metaops[piece.metaop].name: set(piece.devices) for piece in plan.pieces}
    assert where["x.a"] == where["y.a"]
    assert where["x.b"] == where["y.b"]
    assert max(plan.step.peak_bytes) == 4e9


def test_what_fits_nowhere():
    with pytest.raises(FitsNoDevicesError, match="'a' fits on no devices: it runs on 4 or 8 devices, and there are 2"):
        plan_waves(TaskGraph((MetaOp("a", 1, {4: 1.0, 8: 0.6}),)), nodes(2))
    with pytest.raises(FitsNoDevicesError, match=r"one layer takes 4.66 GiB of a device that has 0.93"):
        plan_waves(TaskGraph((metaop("a", 1, state_bytes=5e9),)), nodes(2), memory_bytes=1e9)
    with pytest.raises(FitsNoDevicesError, match="'a' fits on no devices: no order was found"):
        plan_waves(TaskGraph((metaop("a", 9, state_bytes=1e9),)), nodes(2), memory_bytes=2e9, effort=100)


def test_what_is_said_to_do_does():
    graph = TaskGraph((metaop("a", 9, state_bytes=1e9), metaop("b", 3)))
    with pytest.raises(FitsNoDevicesError, match=r"takes 0.93 GiB of a device that has 0.93, of which 0.47 are taken"):
        plan_waves(graph, nodes(2), memory_bytes=1e9, held_bytes=5e8)
    with pytest.raises(FitsNoDevicesError) as found:
        plan_waves(graph, nodes(2), memory_bytes=2e9, held_bytes=5e8, effort=100)
    gib = float(re.search(r"([\d.]+) GiB for each device would do", str(found.value))[1])
    plan = plan_waves(graph, nodes(2), memory_bytes=gib * 2**30, held_bytes=5e8, effort=100)
    assert 5e8 < max(plan.step.peak_bytes) <= gib * 2**30
    assert plan_waves(graph, nodes(2), held_bytes=5e8, effort=100).step.reductions
