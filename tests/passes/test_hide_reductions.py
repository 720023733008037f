"""hide_reductions: a reduced gradient is waited for when the next one is about to be reduced."""

from __future__ import annotations

import torch

from fxpar.ir import collectives as c
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.lowering import lower
from fxpar.lowering.verify import verify
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.hide_reductions import HideReductions
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.sink_waits import SinkWaits
from tests.captured import llama
from tests.passes.sketch import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def order(read_early: bool = False, late: bool = False) -> list[str]:
    """Two gradients that are made and reduced one after the other. `read_early`: the second is made of the first;
    `late`: the epilogue reads the first, and stands in front of the second.
    """
    s = Sketch("dp2")
    x = s.place("x", (4,), kind="batch")
    a = s.call(aten.exp.default, x, shape=(4,), partial="dp")
    first = s.call(c.all_reduce, a, "dp", "sum", shape=(4,), bucket="grads/a")
    results = [s.call(aten.neg.default, first, shape=(4,), phase="epilogue")] if late else [first]
    b = s.call(aten.exp.default, first if read_early else x, shape=(4,), partial="dp")
    second = s.call(c.all_reduce, b, "dp", "sum", shape=(4,), bucket="grads/b")
    graph = s.done(*results, second)
    for step in (GlobalToLocal(), LowerCollectives(), SinkWaits(), HideReductions()):
        step(graph)
    verify(graph, "hide_reductions")
    short = {c10d.all_reduce.default: "sum", c10d.wait_tensor.default: "wait", aten.exp.default: "make"}
    return [short[node.target] for node in graph.graph.nodes if node.target in short]


def test_a_gradient_is_waited_for_in_front_of_the_next_reduction():
    assert order() == ["make", "sum", "make", "wait", "sum", "wait"]


def test_what_is_read_sooner_is_waited_for_sooner():
    assert order(read_early=True) == ["make", "sum", "wait", "make", "sum", "wait"]


def test_what_the_epilogue_reads_in_between_stays():
    assert order(late=True) == ["make", "sum", "wait", "make", "sum", "wait"]


def test_one_reduction_at_most_is_on_its_way():
    program: ExecGraph = lower(llama(layers=4).graph, "dp2+zero2")
    under_way, most, computed = set(), 0, 0
    for node in program.body.graph.nodes:
        if collective_kind(node) == "reduce_scatter":
            under_way.add(node)
            most = max(most, len(under_way))
        elif node.target is c10d.wait_tensor.default:
            under_way -= set(node.all_input_nodes)
        computed += bool(under_way) and node.target is aten.mm.default
    assert (most, under_way) == (1, set())
    assert computed > 10  # products of the next gradients
