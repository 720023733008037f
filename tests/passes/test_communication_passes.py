"""lower_collectives and the passes behind it: how collectives are made, started and waited for."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from fxpar.errors import VerifyError
from fxpar.ir import collectives as c
from fxpar.ir.dist_config import AxisShard
from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pass_base import sort_topologically
from fxpar.ir.strategy import Strategy
from fxpar.lowering import default_passes, lower
from fxpar.lowering.verify import verify
from fxpar.ops import layout
from fxpar.passes.bucket_collectives import BucketCollectives
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.lower_collectives import LowerCollectives
from fxpar.passes.reuse_buffers import ReuseBuffers
from fxpar.passes.sink_waits import SinkWaits
from tests.captured import llama
from tests.passes.sketch import F64, Sketch, before, names, text
from tests.repeat import thinned

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
GRADIENT = {"phase": "epilogue"}


def lowered(graph: AnnotatedGraph) -> AnnotatedGraph:
    GlobalToLocal()(graph)
    LowerCollectives()(graph)
    verify(graph, "lower_collectives")
    return graph


# -------------------------------------------------------------------------------------------- lower_collectives
def one(
    target: Any, args: tuple, source: tuple, result: tuple, shape: tuple = (8, 6), partial: str = ""
) -> AnnotatedGraph:
    s = Sketch("dp2.tp2")
    x = s.place("x", shape, source)
    if partial:
        x = s.call(aten.exp.default, x, shape=shape, dims=source, partial=partial)
    return lowered(s.done(s.call(target, x, *args, shape=shape, dims=result)))


LOWERED = [
    (c.all_reduce, ("tp", "sum"), ["", ""], ["", ""], "tp", ["all_reduce(%exp_default, sum, @tp)", "wait_tensor"]),
    (
        c.all_gather,
        ("tp", 0, ()),
        ["tp", ""],
        ["", ""],
        "",
        ["lift(%x)", "all_gather_into_tensor(%lift, 2, @tp)", "wait_tensor", "unpack(%wait_tensor_default, 0, [], -1)"],
    ),
    (
        c.reduce_scatter,
        ("tp", "sum", 0, ()),
        ["", ""],
        ["tp", ""],
        "tp",
        ["pack(%exp_default, 2, 0, [])", "reduce_scatter_tensor(%pack, sum, 2, @tp)", "wait_tensor", "lower"],
    ),
    (
        c.all_to_all,
        ("tp", 0, (), 1, (1, 1, 1)),
        ["tp", ""],
        ["", "tp"],
        "",
        ["pack(%x, 2, 1, [1, 1, 1])", "all_to_all_single(%pack, [1, 1], [1, 1], @tp)", "wait_tensor", "unpack"],
    ),
    (c.shard, ("tp", 1, ()), ["", ""], ["", "tp"], "", ["take(%x, 2, 1, [], #tp)"]),
    (c.partial, ("tp",), ["", ""], ["", ""], "", ["keep_on_first(%x, #tp)"]),
]


@pytest.mark.parametrize(
    ("target", "args", "source", "result", "partial", "expected"), LOWERED, ids=[case[0].__name__ for case in LOWERED]
)
def test_each_collective(target, args, source, result, partial, expected):
    graph = one(target, args, source, result, partial=partial)
    lines = [line.split(" = ")[-1].replace("_c10d_functional.", "") for line in text(graph.graph).splitlines()]
    lines = [line for line in lines if not line.startswith("aten.exp")]
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_gather_of_an_uneven_dim_drops_the_padding():
    graph = one(c.all_gather, ("tp", 0, ()), ["tp", ""], ["", ""], shape=(7, 6))
    (unpack,) = graph.graph.find_nodes(op="call_function", target=layout.unpack)
    assert unpack.args[3] == 7
    assert unpack.meta["local"].shape == (7, 6)


def test_joint_axes_are_one_group():
    graph = one(c.all_gather, ("dp.tp", 0, ()), ["", ""], ["", ""])
    (node,) = graph.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert node.args[1:] == (4, "@dp.tp")
    assert node.meta["comm"][0] == "dp.tp"


def test_logsumexp_gathers_the_terms():
    graph = one(c.all_reduce, ("tp", "logsumexp"), ["", ""], ["", ""])
    assert names(graph.graph) == [
        "lift",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.wait_tensor",
        "aten.logsumexp",
    ]


@pytest.mark.parametrize("strategy", ["tp2", "tp2+sp", "cp2", "dp2.tp2+sp+zero3", "dp2.cp2+zero2"])
def test_lowered_graphs_say_what_they_send(strategy):
    """Every collective has a wait, a group token, and what one rank puts in; nothing abstract is left."""
    graph = before(llama().graph, strategy, "bucket_collectives")
    verify(graph, "lower_collectives")
    found = [n for n in graph.graph.nodes if collective_kind(n)]
    assert found
    for node in found:
        axis, sent = node.meta["comm"]
        assert node.args[-1] == f"@{axis}"
        assert sent.shape is not None
        assert [u.target for u in node.users] == [c10d.wait_tensor.default]
    assert not [n for n in graph.graph.nodes if n.target in c.COLLECTIVES]


# ------------------------------------------------------------------------------------------- bucket_collectives
def gradients(count: int, size: int, tag: str | None = None, phase: str = "epilogue") -> AnnotatedGraph:
    """`count` gradients of [size, 4], each all-reduced over dp and then negated."""
    s = Sketch("dp2.tp2")
    results = []
    for i in range(count):
        g = s.call(aten.exp.default, s.place(f"g{i}", (size, 4)), shape=(size, 4), partial="dp")
        meta = {"phase": phase} | ({"bucket": tag} if tag else {})
        r = s.call(c.all_reduce, g, "dp", "sum", shape=(size, 4), **meta)
        results.append(s.call(aten.neg.default, r, shape=(size, 4), phase=phase))
    return lowered(s.done(*results))


def collectives(graph: AnnotatedGraph) -> list[tuple[str, int]]:
    return [(k, n.meta.get("fused", 1)) for n in graph.graph.nodes if (k := collective_kind(n))]


def test_gradients_share_a_bucket():
    graph = gradients(3, 8)
    BucketCollectives()(graph)
    verify(graph, "bucket_collectives")
    assert collectives(graph) == [("all_reduce", 3)]
    assert names(graph.graph).count("aten.neg") == 3
    (node,) = [n for n in graph.graph.nodes if collective_kind(n)]
    assert node.meta["comm"][1].shape == (96,)
    assert node.args[0].target is layout.fuse


@pytest.mark.parametrize(
    ("bucket_mb", "expected"), [(1.0, [1] * 5), (2.0, [2, 2, 1]), (3.1, [3, 2]), (0.1, [1] * 5), (9, [5])]
)
def test_buckets_hold_at_most_so_much(bucket_mb, expected):
    """Tensors of 1 MiB; one that is larger than a bucket goes alone."""
    graph = gradients(5, 2**15)
    BucketCollectives(bucket_mb)(graph)
    assert [n for _, n in collectives(graph)] == expected


def test_activations_are_left_alone_unless_asked():
    for body, expected in ((False, [1, 1]), (True, [2])):
        graph = gradients(2, 8, phase="body")
        BucketCollectives(body=body)(graph)
        assert [n for _, n in collectives(graph)] == expected


def test_buckets_of_the_body_go_by_tag():
    s = Sketch("dp2")
    results = []
    for i, tag in enumerate(["layers.0", "layers.1", "layers.0", "layers.1"]):
        w = s.place(f"w{i}", (8,), ["dp"])
        results.append(s.call(c.all_gather, w, "dp", 0, (), shape=(8,), bucket=tag))
    graph = lowered(s.done(*results))
    BucketCollectives()(graph)
    verify(graph, "bucket_collectives")
    assert collectives(graph) == [("all_gather", 2), ("all_gather", 2)]


def test_what_differs_is_not_fused():
    """Axis, reduction, dtype, phase."""
    s = Sketch("dp2.tp2")
    results = []
    calls = [
        (("dp", "sum"), F64, "epilogue"),
        (("tp", "sum"), F64, "epilogue"),
        (("dp", "avg"), F64, "epilogue"),
        (("dp", "sum"), torch.float32, "epilogue"),
        (("dp", "sum"), F64, "prologue"),
    ]
    for i, (args, dtype, phase) in enumerate(calls):
        g = s.place(f"g{i}", (8,), dtype=dtype)
        results.append(s.call(c.all_reduce, g, *args, shape=(8,), dtype=dtype, phase=phase))
    graph = lowered(s.done(*results))
    BucketCollectives()(graph)
    assert [n for _, n in collectives(graph)] == [1] * 5


def test_chains_in_different_orders_are_not_tied_in_a_knot():
    """a over dp then tp, b over tp then dp: fusing both pairs would make a cycle."""
    s = Sketch("dp2.tp2")
    a, b = s.place("a", (8,)), s.place("b", (8,))
    a1 = s.call(c.all_reduce, a, "dp", "sum", shape=(8,), **GRADIENT)
    a2 = s.call(c.all_reduce, a1, "tp", "sum", shape=(8,), **GRADIENT)
    b1 = s.call(c.all_reduce, b, "tp", "sum", shape=(8,), **GRADIENT)
    b2 = s.call(c.all_reduce, b1, "dp", "sum", shape=(8,), **GRADIENT)
    graph = lowered(s.done(a2, b2))
    BucketCollectives()(graph)
    verify(graph, "bucket_collectives")
    assert len(collectives(graph)) == 4


def test_fused_collectives_start_when_all_members_can():
    """A member computed late moves the bucket's reduction behind it, a gather to the first member."""
    s = Sketch("dp2")
    first, late = s.place("first", (8,)), s.place("late", (8,))
    r1 = s.call(c.all_reduce, first, "dp", "sum", shape=(8,), **GRADIENT)
    use = s.call(aten.neg.default, r1, shape=(8,), **GRADIENT)
    made = s.call(aten.exp.default, late, shape=(8,))
    r2 = s.call(c.all_reduce, made, "dp", "sum", shape=(8,), **GRADIENT)
    graph = lowered(s.done(use, r2))
    BucketCollectives()(graph)
    verify(graph, "bucket_collectives")
    order = names(graph.graph)
    assert order.index("aten.exp") < order.index("_c10d_functional.all_reduce") < order.index("aten.neg")


@pytest.mark.parametrize(
    "strategy",
    thinned(
        ["dp2", "dp2.tp2+sp", "dp2+zero1", "dp2+zero2", "dp2.tp2+zero3", "dp2.cp2+zero3"],
        ["dp2.tp2+sp", "dp2+zero2", "dp2.cp2+zero3"],
    ),
)
def test_buckets_change_no_bit(strategy):
    """With tiny buckets, none, and the default the results are the same numbers."""
    captured = llama(layers=1)

    def gradients_of(bucket_mb: float) -> dict[str, torch.Tensor]:
        from fxpar.checking import assign, run_world

        ladder = [BucketCollectives(bucket_mb) if s.name == "bucket_collectives" else s for s in default_passes()]
        program = lower(captured.graph, strategy, passes=ladder)
        plan = assign(Strategy.parse(strategy), 3)
        return run_world(program, captured.params, captured.buffers, captured.batches, plan, 1.0)[1]["grads"]

    whole, small, none = gradients_of(256.0), gradients_of(0.02), gradients_of(0.0)
    assert all(torch.equal(whole[name], small[name]) and torch.equal(whole[name], none[name]) for name in whole)


# ------------------------------------------------------------------------------------- reuse_buffers, sink_waits
def reduced(target: Any, *args: Any, again: bool = False) -> AnnotatedGraph:
    s = Sketch("tp2")
    a, b = s.place("a", (4, 6), ["", "tp"]), s.place("b", (6, 4), ["tp", ""])
    y = s.call(target, a, *([b] if target is aten.mm.default else []), *args, shape=(4, 4), partial="tp")
    r = s.call(c.all_reduce, y, "tp", "sum", shape=(4, 4))
    return lowered(s.done(r, *([y] if again else [])))


def test_a_product_is_reduced_in_place():
    graph = reduced(aten.mm.default)
    ReuseBuffers()(graph)
    assert "_c10d_functional.all_reduce_" in names(graph.graph)
    verify(graph, "reuse_buffers")


def test_what_is_needed_again_is_not_overwritten():
    graph = reduced(aten.mm.default, again=True)
    ReuseBuffers()(graph)
    assert "_c10d_functional.all_reduce" in names(graph.graph)


@pytest.mark.parametrize(
    ("target", "args"), [(aten.t.default, ()), (aten.view.default, ([4, 4],)), (aten.slice.Tensor, (1,))]
)
def test_views_are_not_overwritten(target, args):
    """A view of a parameter must not be reduced in place."""
    graph = reduced(target, *args)
    ReuseBuffers()(graph)
    assert "_c10d_functional.all_reduce_" not in names(graph.graph)


def test_inputs_survive_a_step():
    """Whatever is reduced in place, parameters, buffers and batches of a rank are what they were."""
    from fxpar.runtime import bind
    from fxpar.torch_api.threaded import run_threads
    from fxpar.transport import ProcessGroups

    captured = llama(layers=1)
    program = lower(captured.graph, "dp2.tp2+sp")

    def work(rank: int) -> bool:
        local = {
            i.fqn: s.dist.take(captured.params[i.fqn], rank)
            for i, s in zip(program.inputs, program.stored_inputs, strict=True)
            if i.kind == "param"
        }
        batch = {key: value[:, :4].contiguous() for key, value in captured.batches[0].items()}
        batch = {
            i.fqn: s.dist.take(batch[i.fqn], rank)
            for i, s in zip(program.inputs, program.stored_inputs, strict=True)
            if i.kind == "batch"
        }
        held = {**local, **batch, **captured.buffers}
        copies = {name: value.clone() for name, value in held.items()}
        bound = bind(program, rank, ProcessGroups().names(program.strategy.mesh, program.axes()))
        bound.prepare(local, captured.buffers)
        for _ in range(2):
            bound.run(batch, 0.5)
        bound.finish()
        return all(torch.equal(held[name], copies[name]) for name in held)

    assert all(run_threads(4, work))


def test_waits_sink_to_the_first_user():
    s = Sketch("tp2")
    x, a = s.place("x", (4,)), s.place("a", (4,))
    r = s.call(c.all_reduce, x, "tp", "sum", shape=(4,))
    m = s.call(aten.exp.default, a, shape=(4,))
    y = s.call(aten.add.Tensor, r, m, shape=(4,))
    graph = lowered(s.done(y))
    assert names(graph.graph) == [
        "_c10d_functional.all_reduce",
        "_c10d_functional.wait_tensor",
        "aten.exp",
        "aten.add.Tensor",
    ]
    SinkWaits()(graph)
    verify(graph, "sink_waits")
    assert names(graph.graph) == [
        "_c10d_functional.all_reduce",
        "aten.exp",
        "_c10d_functional.wait_tensor",
        "aten.add.Tensor",
    ]


@pytest.mark.parametrize("strategy", ["tp2+sp", "cp2", "dp2+zero3"])
def test_no_wait_stands_earlier_than_it_must(strategy):
    graph: ExecGraph = lower(llama().graph, strategy)
    for part in graph.parts.values():
        order = list(part.graph.nodes)
        for wait in part.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
            following = order[order.index(wait) + 1]
            others = {c10d.wait_tensor.default, operator.getitem}
            while following.target in others:
                following = order[order.index(following) + 1]
            assert following in wait.users or following.op == "output" or following.target in (layout.unfuse,)


# ------------------------------------------------------------------------------------------------------- sorting
def test_sort_keeps_the_order_where_it_can():
    s = Sketch("tp2")
    x = s.place("x", (4,))
    a = s.call(aten.exp.default, x, shape=(4,))
    b = s.call(aten.neg.default, x, shape=(4,))
    d = s.call(aten.add.Tensor, a, b, shape=(4,))
    graph = s.done(d)
    d.append(a)  # a now stands behind its user
    sort_topologically(graph.graph)
    assert [n.name for n in graph.graph.nodes] == ["x", "neg_default", "exp_default", "add_tensor", "output"]
    graph.graph.lint()


def test_sort_reports_a_cycle():
    s = Sketch("tp2")
    x = s.place("x", (4,))
    a = s.call(aten.exp.default, x, shape=(4,))
    b = s.call(aten.neg.default, a, shape=(4,))
    graph = s.done(b)
    a.args = (b,)
    with pytest.raises(VerifyError, match="the graph has a cycle"):
        sort_topologically(graph.graph)


def test_bucketed_sections_are_kept():
    """Two gathers of different dims and sections in one bucket come out as themselves."""
    s = Sketch("dp2")
    a, b = s.place("a", (8, 3), ["dp", ""]), s.place("b", (2, 6), ["", "dp"])
    b.meta["dist"] = type(b.meta["dist"])(b.meta["dist"].mesh, ((), (AxisShard("dp", (1, 1, 1)),)), (), F64)
    ga = s.call(c.all_gather, a, "dp", 0, (), shape=(8, 3), bucket="w")
    gb = s.call(c.all_gather, b, "dp", 1, (1, 1, 1), shape=(2, 6), bucket="w")
    graph = lowered(s.done(ga, gb))
    BucketCollectives()(graph)
    assert collectives(graph) == [("all_gather", 2)]
    unpacks = graph.graph.find_nodes(op="call_function", target=layout.unpack)
    assert [node.args[1:3] for node in unpacks] == [(0, ()), (1, (1, 1, 1))]
