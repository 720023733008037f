"""hoist_collectives: a collective starts behind the last product that its operand is made with."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpar.ir import collectives as c
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.ir.node_meta import is_backward
from fxpar.lowering import lower
from fxpar.lowering.verify import verify
from fxpar.ops.traits import is_attention
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.hoist_collectives import HoistCollectives
from fxpar.passes.lower_collectives import LowerCollectives
from tests.captured import llama
from tests.passes.sketch import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def order(fqn: str = "", backward: bool = False, waits: bool = False) -> list[str]:
    """A product, another one, and the sum of an exponential of the first one: what it is `fqn`, and of the backward."""
    s = Sketch("tp2")
    x = s.place("x", (4, 4), kind="batch")
    one = s.call(aten.mm.default, x, x, shape=(4, 4), fqn="layers.0.a")
    if waits:
        one = s.call(c.all_reduce, one, "tp", "sum", shape=(4, 4), fqn="layers.0.a")
    other = s.call(aten.mm.default, x, x, shape=(4, 4), fqn="layers.0.b")
    made = s.call(aten.exp.default, one, shape=(4, 4), fqn=fqn, backward=backward)
    total = s.call(c.all_reduce, made, "tp", "sum", shape=(4, 4), fqn=fqn, backward=backward)
    graph = s.done(other, total)
    for step in (GlobalToLocal(), LowerCollectives(), HoistCollectives()):
        step(graph)
    verify(graph, "hoist_collectives")
    short = {c10d.all_reduce.default: "sum", aten.mm.default: "mm", aten.exp.default: "exp"}
    return [short[node.target] for node in graph.graph.nodes if node.target in short]


def test_a_collective_starts_behind_the_product_that_it_needs():
    assert order("layers.0.c") == ["mm", "exp", "sum", "mm"]


@pytest.mark.parametrize("given", [{"fqn": "layers.1.a"}, {"fqn": "layers.0.c", "backward": True}])
def test_it_stays_in_its_block_and_in_the_backward(given: dict):
    assert order(**given) == ["mm", "mm", "exp", "sum"]


def test_what_waits_for_another_collective_stays():
    assert order("layers.0.c", waits=True) == ["mm", "sum", "mm", "exp", "sum"]


def test_what_two_collectives_need_comes_before_the_first() -> None:
    """As the cosines of queries and keys."""
    s = Sketch("tp2")
    x = s.place("x", (4, 4), kind="batch")
    products = [s.call(aten.mm.default, x, x, shape=(4, 4), fqn="layers.0.a") for _ in range(2)]
    shared = s.call(aten.cos.default, x, shape=(4, 4), fqn="layers.0.a")
    turned = [s.call(aten.mul.Tensor, one, shared, shape=(4, 4), fqn="layers.0.a") for one in products]
    totals = [s.call(c.all_reduce, one, "tp", "sum", shape=(4, 4), fqn="layers.0.a") for one in turned]
    graph = s.done(*totals)
    for step in (GlobalToLocal(), LowerCollectives(), HoistCollectives()):
        step(graph)
    verify(graph, "hoist_collectives")
    short = {c10d.all_reduce.default: "sum", aten.mm.default: "mm", aten.cos.default: "cos", aten.mul.Tensor: "mul"}
    found = [short[node.target] for node in graph.graph.nodes if node.target in short]
    assert found == ["mm", "cos", "mul", "sum", "mm", "mul", "sum"]


def test_queries_travel_while_keys_are_projected():
    program: ExecGraph = lower(llama(layers=1).graph, "cp2")
    kinds = []
    for node in program.body.graph.nodes:
        if is_backward(node):
            break
        if "attention" in node.meta["fqn"] if node.op == "call_function" else False:
            kinds += ["send"] * (collective_kind(node) == "all_to_all") + ["project"] * (node.target is aten.mm.default)
            kinds += ["wait"] * (node.target is c10d.wait_tensor.default) + ["attend"] * is_attention(node.target)
    assert [kind for kind, _ in itertools.groupby(kinds)][:6] == ["project", "send"] * 3
    assert kinds[6:10] == ["wait", "wait", "wait", "attend"]
