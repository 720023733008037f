"""A step of placed pieces: forward and backward, what is sent, memory."""

from __future__ import annotations

import pytest

from fxpar.waves import MetaOp, TaskGraph
from fxpar.waves.order import Problem
from fxpar.waves.place import Placed
from fxpar.waves.step import step_of
from tests.waves.plain import nodes

LINKS = 100.0, 10.0  # GB/s within a node and between them


def spans(step):
    return {
        (run.piece, "backward" if run.backward else "forward"): (run.start_ms, run.begin_ms, run.end_ms)
        for run in step.runs
    }


def test_a_chain_goes_forward_and_back():
    graph = TaskGraph(
        (MetaOp("a", 2, {1: 3.0, 2: 1.5}, 1e8, 5.0, 8.0), MetaOp("b", 1, {2: 3.0}, 0, 7.0, 4.0)), (("a", "b"),)
    )
    placed = [Placed(0, 0, 2, (0,), ()), Placed(1, 0, 1, (0, 1), (0,))]
    step = step_of(Problem(graph, nodes(2, 2, *LINKS)), placed)
    found = spans(step)
    assert found[0, "forward"] == pytest.approx((0, 0, 2))
    assert found[1, "forward"] == pytest.approx((2, 2.5, 3.5))  # half of 100 MB to device 1
    assert found[1, "backward"] == pytest.approx((3.5, 3.5, 5.5))
    assert found[0, "backward"] == pytest.approx((5.5, 6, 10))  # its gradient comes back
    assert step.ms == pytest.approx(10)
    assert step.received_ms == pytest.approx((1.0, 0.5))
    assert step.peak_bytes == pytest.approx((2 * 5 + 7 + 2 * 8 + 2, 7 + 2))


def test_a_node_further_away_takes_longer():
    graph = TaskGraph((MetaOp("a", 2, {1: 3.0}, 1e8),))
    placed = [Placed(0, 0, 1, (0,), ()), Placed(0, 1, 2, (1,), (0,))]
    near, far = (step_of(Problem(graph, nodes(2, per, *LINKS)), placed).ms for per in (2, 1))
    assert (near, far) == pytest.approx((6 + 2, 6 + 20))


def test_a_sender_of_many_takes_as_long_as_all_of_it():
    graph = TaskGraph((MetaOp("a", 2, {1: 3.0, 4: 2.4}, 1e8),))
    placed = [Placed(0, 0, 1, (0,), ()), Placed(0, 1, 2, (0, 1, 2, 3), (0,))]
    step = step_of(Problem(graph, nodes(4, 4, *LINKS)), placed)
    assert spans(step)[1, "forward"] == pytest.approx((1, 1.75, 2.55))


def test_a_task_that_is_done_begins_its_backward():
    """Two tasks one after the other on one device: early backward needs no more time and holds one task's activations
    only.
    """
    graph = TaskGraph(tuple(MetaOp(name, 1, {1: 3.0}, 0, 1.0, 10.0) for name in "ab"))
    step = step_of(Problem(graph, nodes(1)), [Placed(0, 0, 1, (0,), ()), Placed(1, 0, 1, (0,), ())])
    assert step.ms == 6
    assert step.peak_bytes == (1 + 1 + 10,)
    assert [(run.piece, run.backward) for run in step.runs] == [(0, False), (0, True), (1, False), (1, True)]


def test_shared_weights_are_held_once():
    graph = TaskGraph(tuple(MetaOp(name, 2, {1: 3.0}, 0, 5.0, 0, "w") for name in "ab"))
    step = step_of(Problem(graph, nodes(2)), [Placed(0, 0, 2, (0,), ()), Placed(1, 0, 2, (0,), ())])
    assert step.peak_bytes == (10, 0)
