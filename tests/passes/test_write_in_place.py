"""write_in_place: what is written over, what never is, and that no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxpar.checking import assign, run_world
from fxpar.ir import collectives as c
from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, lower
from fxpar.ops.traits import IN_PLACE
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.write_in_place import WriteInPlace, functional
from fxpar.runtime.micro import MicroRun
from fxpar.runtime.stage import BoundStage
from tests.captured import gpt, llama
from tests.passes.sketch import Sketch, names
from tests.repeat import examples, thinned

aten = torch.ops.aten
SHAPE = (3, 4)


def sketch() -> tuple[Sketch, fx.Node, fx.Node]:
    """An input, and a product of it: fresh memory."""
    s = Sketch("dp1")
    x = s.place("x", SHAPE, kind="batch")
    return s, x, s.call(aten.mul.Scalar, x, 2.0, shape=SHAPE)


def after(graph: AnnotatedGraph) -> list[str]:
    WriteInPlace()(graph)
    return names(graph.graph)


def run(graph: fx.Graph, *values: torch.Tensor) -> Any:
    with torch.no_grad():
        return compile_graph(graph)(*values)


# ------------------------------------------------------------------------------------------------- written over
@pytest.mark.parametrize(
    ("target", "args", "found"),
    [
        (aten.neg.default, (), "aten.neg_"),
        (aten.silu.default, (), "aten.silu_"),
        (aten.add.Tensor, (1.5,), "aten.add_.Tensor"),
        (aten.pow.Tensor_Scalar, (3,), "aten.pow_.Scalar"),
    ],
)
def test_an_operand_that_dies_is_written_over(target, args, found):
    s, _, y = sketch()
    graph = s.done(s.call(target, y, *args, shape=SHAPE))
    assert after(graph) == ["aten.mul.Scalar", found]
    value = torch.randn(SHAPE, dtype=torch.float64)
    assert torch.equal(run(graph.graph, value)[0], target(value * 2.0, *args))


def test_either_operand_of_a_sum():
    s, x, y = sketch()
    graph = s.done(s.call(aten.add.Tensor, x, y, shape=SHAPE))
    assert after(graph) == ["aten.mul.Scalar", "aten.add_.Tensor"]
    assert graph.results[0].args == (y, x)


def test_not_the_second_operand_of_a_difference():
    s, x, y = sketch()
    assert after(s.done(s.call(aten.sub.Tensor, x, y, shape=SHAPE)))[1] == "aten.sub.Tensor"


def test_a_gradient_is_written_over_by_the_op_that_reads_it():
    s, x, y = sketch()
    graph = s.done(s.call(aten.silu_backward.default, y, x, shape=SHAPE))
    assert after(graph)[1] == "aten.silu_backward.grad_input"
    value = torch.randn(SHAPE, dtype=torch.float64)
    assert torch.equal(run(graph.graph, value)[0], aten.silu_backward(value * 2.0, value))


def test_through_a_view_of_all_of_it():
    s, _, y = sketch()
    turned = s.call(aten.t.default, y, shape=SHAPE[::-1])
    graph = s.done(s.call(aten.exp.default, turned, shape=SHAPE[::-1]))
    assert after(graph)[-1] == "aten.exp_"


@pytest.mark.parametrize("squeezed", [(aten.squeeze.dims, [0]), (aten.squeeze.default,)], ids=["dims", "all"])
def test_through_a_squeeze(squeezed):
    s, _, y = sketch()
    wide = s.call(aten.unsqueeze.default, y, 0, shape=(1, *SHAPE))
    narrow = s.call(squeezed[0], wide, *squeezed[1:], shape=SHAPE)
    assert after(s.done(s.call(aten.exp.default, narrow, shape=SHAPE)))[-1] == "aten.exp_"


def test_each_result_of_an_op_has_memory_of_its_own():
    import operator

    s, x, _ = sketch()
    both = s.call(aten.var_mean.correction, x, [1], shape=(3,))
    both.meta["tensor"] = (both.meta["tensor"],) * 2
    first, second = (s.call(operator.getitem, both, i, shape=(3,)) for i in range(2))
    root = s.call(aten.sqrt.default, first, shape=(3,))
    graph = s.done(s.call(aten.add.Tensor, root, second, shape=(3,)))
    assert "aten.sqrt_" in after(graph)


# ------------------------------------------------------------------------------------------- never written over
def keeps(graph: AnnotatedGraph, target: str) -> None:
    assert target in after(graph), names(graph.graph)


def test_an_input():
    s, x, _ = sketch()
    keeps(s.done(s.call(aten.neg.default, x, shape=SHAPE)), "aten.neg")


def test_what_is_read_later():
    s, _, y = sketch()
    z = s.call(aten.neg.default, y, shape=SHAPE)
    keeps(s.done(s.call(aten.matmul.default, z, s.call(aten.t.default, y, shape=(4, 3)), shape=(3, 3))), "aten.neg")


def test_what_is_a_result():
    s, _, y = sketch()
    keeps(s.done(s.call(aten.neg.default, y, shape=SHAPE), y), "aten.neg")


def test_what_has_a_view_that_is_read_later():
    s, _, y = sketch()
    row = s.call(aten.select.int, y, 0, 0, shape=(4,))
    z = s.call(aten.exp.default, y, shape=SHAPE)
    keeps(s.done(z, s.call(aten.abs.default, row, shape=(4,))), "aten.exp")


def test_a_part_of_something_larger():
    """It would keep the rest of the memory alive."""
    s, _, y = sketch()
    half = s.call(aten.slice.Tensor, y, 1, 0, 2, shape=(3, 2))
    keeps(s.done(s.call(aten.exp.default, half, shape=(3, 2))), "aten.exp")


def test_an_operand_that_is_spread_over_the_result():
    s, x, _ = sketch()
    column = s.call(aten.sum.dim_IntList, x, [1], True, shape=(3, 1))
    keeps(s.done(s.call(aten.mul.Tensor, x, column, shape=SHAPE)), "aten.mul.Tensor")


def test_an_expanded_value():
    s, x, _ = sketch()
    column = s.call(aten.sum.dim_IntList, x, [1], True, shape=(3, 1))
    wide = s.call(aten.expand.default, column, SHAPE, shape=SHAPE)
    keeps(s.done(s.call(aten.exp.default, wide, shape=SHAPE)), "aten.exp")


def test_a_value_that_is_added_to_its_own_transpose():
    s = Sketch("dp1")
    y = s.call(aten.mul.Scalar, s.place("x", (3, 3)), 2.0, shape=(3, 3))
    keeps(s.done(s.call(aten.add.Tensor, y, s.call(aten.t.default, y, shape=(3, 3)), shape=(3, 3))), "aten.add.Tensor")


def test_another_dtype():
    s = Sketch("dp1")
    y = s.call(aten.mul.Scalar, s.place("x", SHAPE, dtype=torch.int64), 2, shape=SHAPE, dtype=torch.int64)
    keeps(s.done(s.call(aten.mul.Tensor, y, 0.5, shape=SHAPE)), "aten.mul.Tensor")


def returned(x: torch.Tensor) -> torch.Tensor:
    return x


def test_what_a_plain_function_may_have_passed_on():
    s, x, _ = sketch()
    y = s.call(returned, x, shape=SHAPE)
    graph = s.done(s.call(aten.neg.default, y, shape=SHAPE), x)
    keeps(graph, "aten.neg")


def test_what_an_op_of_somebody_elses_may_have_passed_on():
    """Torch forbids it, and does not check it."""
    library = torch.library.Library("somebody", "DEF")
    library.define("passed_on(Tensor x) -> Tensor")
    library.impl("passed_on", returned, "CPU")
    s, x, _ = sketch()
    y = s.call(torch.ops.somebody.passed_on.default, x, shape=SHAPE)
    keeps(s.done(s.call(aten.neg.default, y, shape=SHAPE)), "aten.neg")


def test_what_the_forward_made_by_the_backward():
    s, _, y = sketch()
    z = s.call(aten.exp.default, y, shape=SHAPE)
    loss = s.call(aten.sum.default, z, shape=())
    grad = s.call(aten.neg.default, z, shape=SHAPE, backward=True)
    keeps(s.done(loss, grad, kinds=[("loss", "loss"), ("grad", "x")]), "aten.neg")


def test_what_the_body_made_by_the_epilogue():
    s, _, y = sketch()
    keeps(s.done(s.call(aten.neg.default, y, shape=SHAPE, phase="epilogue")), "aten.neg")


def test_anything_in_the_epilogue():
    """A loss may be taken out of it without the gradients; what writes could not be left out."""
    s, x, _ = sketch()
    y = s.call(aten.exp.default, x, shape=SHAPE, phase="epilogue")
    keeps(s.done(s.call(aten.neg.default, y, shape=SHAPE, phase="epilogue")), "aten.neg")


@pytest.mark.parametrize("waited", [True, False])
def test_what_is_on_its_way(waited: bool):
    """A collective reads its operand until it is waited for."""
    s = Sketch("tp2")
    y = s.call(aten.mul.Scalar, s.place("x", SHAPE), 2.0, shape=SHAPE, partial="tp")
    r = s.call(c.all_reduce, y, "tp", "sum", shape=SHAPE)
    z = s.call(aten.neg.default, y, shape=SHAPE)
    graph = s.done(z, s.call(aten.abs.default, r, shape=SHAPE))
    GlobalToLocal()(graph)
    LowerCollectives()(graph)
    if not waited:
        (wait,) = graph.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
        min(wait.users).prepend(wait)
    keeps(graph, "aten.neg_" if waited else "aten.neg")


# ------------------------------------------------------------------------------------------------- whole models
def without_pass(**options: Any) -> list:
    return [step for step in default_passes(**options) if not isinstance(step, WriteInPlace)]


BITS = [
    *((llama, text) for text in ("dp1", "dp2+zero3", "cp2", "dp2.tp2+sp+zero3+remat")),
    *((gpt, text) for text in ("dp1", "tp2+sp")),
]


@pytest.mark.parametrize(("model", "strategy"), thinned(BITS, [BITS[i] for i in (2, 3, 5)]))
def test_no_bit_changes(model, strategy):
    captured = model()
    parsed = Strategy.parse(strategy)
    plan = assign(parsed, len(captured.batches))
    found = []
    for ladder in (default_passes(), without_pass()):
        program = lower(captured.graph, parsed, passes=ladder)
        found.append(run_world(program, captured.params, captured.buffers, captured.batches, plan, 1.0))
    for mine, plain in zip(*found, strict=True):
        assert torch.equal(mine["loss"], plain["loss"])
        assert all(torch.equal(mine["grads"][name], plain["grads"][name]) for name in plain["grads"])


@pytest.mark.parametrize("halves", [False, True])
def test_no_bit_of_a_stage_changes(halves: bool):
    """Two micro-batches are under way at once, and the backward may run in two halves, in another order."""
    captured = llama()
    found = []
    for ladder in (default_passes(for_store=True), without_pass(for_store=True)):
        program = lower(captured.graph, "pp2+cut(layers.0.ffn)", passes=ladder)
        first, second = (BoundStage(stage, 0, {}) for stage in program.stages)
        for stage in (first, second):
            stage.prepare(captured.params, captured.buffers)
        numbers = range(len(captured.batches))
        for i in numbers:
            sent = first.forward(i, captured.batches[i], {}, MicroRun(dict, 1.0))
            second.forward(i, captured.batches[i], sent, MicroRun(dict, 1.0))
        if halves:
            grads = [second.backward(i, {}, "input_part") for i in numbers]
            for i in numbers:
                first.backward(i, grads[i], "input_part")
            for i in reversed(numbers):
                second.backward(i, {}, "weight_part")
                first.backward(i, {}, "weight_part")
        else:
            for i in numbers:
                first.backward(i, second.backward(i, {}))
        found.append({**first.reduce(), **second.reduce()})
    mine, plain = found
    assert mine.keys() == plain.keys()
    assert all(torch.equal(mine[key], plain[key]) for key in plain)


def test_functional_gives_back_the_functional_graph():
    captured = llama()
    graphs = [lower(captured.graph, "tp2", passes=ladder).body.graph for ladder in (default_passes(), without_pass())]
    for graph in graphs:
        functional(graph)
    assert [n.target for n in graphs[0].nodes] == [n.target for n in graphs[1].nodes]
    assert [n.kwargs.keys() for n in graphs[0].nodes] == [n.kwargs.keys() for n in graphs[1].nodes]


def test_functional_leaves_accumulators():
    graph = fx.Graph()
    total, part = graph.placeholder("total"), graph.placeholder("part")
    view = graph.call_function(aten.t.default, (total,))
    graph.output((graph.call_function(aten.add_.Tensor, (view, part)),))
    functional(graph)
    assert [n.target for n in graph.nodes][3] is aten.add_.Tensor


class Random(nn.Module):
    """Elementwise ops, views and sums of earlier values, chosen by numbers."""

    def __init__(self, choices: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.choices = choices

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x, x * 2.0]
        for op, i, j in self.choices:
            values.append(_OPS[op % len(_OPS)](values[i % len(values)], values[j % len(values)]))
        return values[-2:]


_OPS = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: -a,
    lambda a, b: a.t(),
    lambda a, b: a.reshape(-1).reshape(3, 3),
    lambda a, b: a[:1].expand(3, 3),
    lambda a, b: torch.sigmoid(a),
    lambda a, b: a.sum(1, keepdim=True) + b,
    lambda a, b: a.split(2)[1].expand(3, 3),
    lambda a, b: torch.ops.aten.silu_backward(a, b),
)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=14))
def test_random_programs_keep_every_bit(choices):
    from torch.fx.experimental.proxy_tensor import make_fx

    from fxpar.ir.graph import Output, TensorMeta

    x = torch.randn(3, 3, dtype=torch.float64)
    traced = make_fx(Random(choices))(x).graph
    for node in traced.nodes:
        found = node.meta.get("val")
        if isinstance(found, torch.Tensor):
            node.meta["tensor"] = TensorMeta(tuple(found.shape), found.dtype)
    expected = run(traced, x)
    graph = AnnotatedGraph(traced, (), (Output("grad", "a"), Output("grad", "b")), (), Strategy.parse("dp1"))
    WriteInPlace()(graph)
    kept = x.clone()
    assert all(torch.equal(a, b) for a, b in zip(run(traced, x), expected, strict=True))
    assert torch.equal(x, kept)


def test_the_table_pairs_ops_of_one_signature():
    for plain, in_place in IN_PLACE.items():
        mine, other = plain._schema, in_place._schema
        assert [(a.name, str(a.type)) for a in mine.arguments] == [(a.name, str(a.type)) for a in other.arguments]
        assert other.arguments[0].alias_info.is_write
