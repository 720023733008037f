"""prefetch_gathers: the parameters of a block are gathered while the one before computes."""

from __future__ import annotations

import torch

from fxpar.ir import collectives as c
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.lowering import lower
from fxpar.lowering.verify import verify
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.prefetch_gathers import PrefetchGathers
from fxpar.passes.sink_waits import SinkWaits
from tests.captured import llama
from tests.passes.sketch import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def used_one_by_one(second: str) -> list[str]:
    """Two parameters that are gathered and used one after the other, the `second` made of a param or of the batch."""
    s = Sketch("dp2")
    a, b = s.place("a", (4,), ["dp"]), s.place("b", (4,), ["dp"], kind="param" if second == "param" else "batch")
    x = s.place("x", (4,), kind="batch")
    for param in (a, b):
        gathered = s.call(c.all_gather, param, "dp", 0, (), shape=(4,), bucket=param.name)
        x = s.call(aten.mul.Tensor, x, gathered, shape=(4,))
    graph = s.done(x)
    for step in (GlobalToLocal(), LowerCollectives(), SinkWaits(), PrefetchGathers()):
        step(graph)
    verify(graph, "prefetch_gathers")
    short = {c10d.all_gather_into_tensor.default: "gather", c10d.wait_tensor.default: "wait", aten.mul.Tensor: "use"}
    return [short[node.target] for node in graph.graph.nodes if node.target in short]


def test_a_gather_starts_where_the_one_before_is_waited_for():
    assert used_one_by_one("param") == ["gather", "gather", "wait", "use", "wait", "use"]


def test_what_is_no_parameter_is_not_gathered_early():
    assert used_one_by_one("batch") == ["gather", "wait", "use", "gather", "wait", "use"]


def test_two_gathers_at_most_are_on_their_way():
    """Of a block and the next one; what the backward gathers, behind the loss."""
    program: ExecGraph = lower(llama(layers=4).graph, "dp2+zero3")
    started, most, backward = 0, 0, False
    for node in program.body.graph.nodes:
        backward |= node.target is torch.ops.fxpar.cross_entropy.default
        if node.target is c10d.all_gather_into_tensor.default:
            assert backward == node.meta["bucket"].endswith("/backward")
            started += 1
        started -= node.target is c10d.wait_tensor.default and collective_kind(node.args[0]) == "all_gather"
        most = max(most, started)
    assert (started, most) == (0, 2)
