"""A step as text."""

from __future__ import annotations

from fxpar.waves import MetaOp, TaskGraph, plan_waves
from fxpar.waves.chart import chart
from tests.waves.plain import nodes


def test_a_chart():
    graph = TaskGraph((MetaOp("a", 3, {2: 2.0}), MetaOp("b", 1, {1: 2.0})))
    lines = chart(plan_waves(graph, nodes(4), effort=0), columns=18).splitlines()
    assert sorted(lines[:-1]) == ["  2  B=b---............", "  3  ..................", "0-1  A=====a-----------"]
    assert lines[-1] == "A a, B b"


def test_what_is_received():
    graph = TaskGraph((MetaOp("a", 1, {1: 3.0}, 6e6), MetaOp("b", 1, {2: 3.0})), (("a", "b"),))
    lines = chart(plan_waves(graph, nodes(2, intra=1.5), effort=0), columns=10).splitlines()
    assert lines[0] == "0  A<<Bb-<<a-"
    assert lines[1] == "1  .<<Bb-...."


def test_gradients_that_are_added_up():
    graph = TaskGraph((MetaOp("a", 1, {2: 3.0}, state_bytes=8.0, gradient_bytes=2e9),))
    lines = chart(plan_waves(graph, nodes(2), effort=0), columns=13).splitlines()  # 3 ms, and 10 of adding
    assert lines[0] == "0-1  Aa-++++++++++"
