"""Gradients that several devices add up: how long it takes, and from when on."""

from __future__ import annotations

import pytest

from fxpar.waves import MetaOp, TaskGraph
from fxpar.waves.order import Problem
from fxpar.waves.place import Placed
from fxpar.waves.reduce import all_reduce_ms
from fxpar.waves.step import step_of
from tests.waves.plain import nodes

LINKS = 100.0, 10.0  # GB/s within a node and between them
MB = 1e6


@pytest.mark.parametrize(
    ("holders", "ms"),
    [
        ((3,), 0.0),
        ((0, 1), 1.0),  # each sends half of it, twice
        ((0, 1, 2, 3), 1.5),
        ((0, 4), 2.5),  # over the links of four devices
        ((0, 1, 4, 5), 1.0 + 2.5),
        ((0, 1, 4), 1.0 + 2.5),
    ],
)
def test_rings_within_nodes_and_between_them(holders, ms):
    problem = Problem(TaskGraph((MetaOp("a", 1, {1: 3.0}),)), nodes(8, 4, *LINKS))
    assert all_reduce_ms(problem, holders, 100 * MB) == pytest.approx(ms)


def test_layers_are_added_up_as_the_backward_leaves_them():
    """Four layers of 0.5 ms a reduction behind a backward of 2 ms a layer: only the last one is seen."""
    graph = TaskGraph((MetaOp("a", 4, {2: 3.0}, state_bytes=1.0, gradient_bytes=50 * MB),))
    step = step_of(Problem(graph, nodes(2, 2, *LINKS)), [Placed(0, 0, 4, (0, 1), ())])
    (one,) = step.reductions
    assert (one.first, one.last, one.devices) == (0, 4, (0, 1))
    assert (one.start_ms, one.end_ms) == pytest.approx((4 + 2, 12 + 0.5))
    assert (step.ms, step.exposed_ms) == pytest.approx((12.5, 0.5))


def test_links_that_are_slower_than_the_backward_carry_one_layer_after_the_other():
    graph = TaskGraph((MetaOp("a", 4, {2: 3.0}, state_bytes=1.0, gradient_bytes=500 * MB),))
    step = step_of(Problem(graph, nodes(2, 2, *LINKS)), [Placed(0, 0, 4, (0, 1), ())])
    assert step.ms == pytest.approx(4 + 2 + 4 * 5)


def test_shared_weights_wait_for_the_last_task_that_gives_a_gradient():
    """b has the weights of a on other devices, and is done later; c keeps devices 0 and 1 busy beside the reduction."""
    shared = {"state_bytes": 8 * 100 * MB, "weights": "w"}
    ops = (MetaOp("a", 1, {1: 3.0}, **shared), MetaOp("b", 1, {1: 6.0}, **shared), MetaOp("c", 1, {1: 12.0}))
    placed = [Placed(0, 0, 1, (0,), ()), Placed(1, 0, 1, (1,), ()), Placed(2, 0, 1, (2,), ())]
    step = step_of(Problem(TaskGraph(ops), nodes(3, 4, *LINKS)), placed)
    (one,) = step.reductions
    assert one.devices == (0, 1)
    assert (one.start_ms, one.end_ms) == pytest.approx((6, 7))
    assert (step.ms, step.exposed_ms) == (12, 0)


def test_reductions_on_the_same_links_follow_each_other():
    ops = tuple(MetaOp(name, 1, {2: 3.0}, state_bytes=1.0, gradient_bytes=300 * MB) for name in "ab")
    step = step_of(Problem(TaskGraph(ops), nodes(2, 2, *LINKS)), [Placed(m, 0, 1, (0, 1), ()) for m in (0, 1)])
    first, second = step.reductions
    assert (first.end_ms, second.end_ms) == pytest.approx((first.start_ms + 3, first.end_ms + 3))
    assert step.ms == pytest.approx(second.end_ms)


def test_a_node_sends_one_sum_at_a_time_to_others():
    """On other devices of the same two nodes; within a node they would not wait for each other."""
    ops = tuple(MetaOp(name, 1, {2: 3.0}, state_bytes=1.0, gradient_bytes=400 * MB) for name in "ab")

    def reductions(*where: tuple[int, int]):
        placed = [Placed(m, 0, 1, devices, ()) for m, devices in enumerate(where)]
        return step_of(Problem(TaskGraph(ops), nodes(4, 2, *LINKS)), placed).reductions

    first, second = reductions((0, 2), (1, 3))
    assert (first.end_ms - first.start_ms, second.start_ms) == pytest.approx((20, first.end_ms))
    first, second = reductions((0, 1), (2, 3))
    assert first.start_ms == second.start_ms
