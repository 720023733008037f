"""insert_reshards, cleanup, global_to_local: the passes that make a graph local."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxpar.errors import VerifyError
from fxpar.ir import collectives as c
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.ir.markers import vary
from fxpar.ir.pass_base import GraphPass, tensor_operands
from fxpar.lowering.verify import verify_placements
from fxpar.passes.cleanup import Cleanup
from fxpar.passes.global_to_local import GlobalToLocal
from fxpar.passes.insert_reshards import InsertReshards
from tests.captured import llama
from tests.passes.sketch import Sketch, before, names, text

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------- insert_reshards
def test_reshard_is_inserted_where_an_operand_lies_otherwise():
    s = Sketch("tp2")
    h, r = s.place("h", (8, 4), ["tp", ""]), s.place("r", (8, 4))
    y = s.call(aten.add.Tensor, h, r, shape=(8, 4), dist_in=(s.dist(["", ""]), s.dist(["", ""])))
    graph = s.done(y)
    InsertReshards()(graph)
    assert text(graph.graph) == "\n".join(
        ["%reshard : f64[8, 4] = reshard(%h)", "%add_tensor : f64[8, 4] = aten.add.Tensor(%reshard, %r)"]
    )


def test_users_that_agree_share_one_reshard():
    s = Sketch("tp2")
    h = s.place("h", (8, 4), ["tp", ""])
    whole = s.dist(["", ""])
    a = s.call(aten.exp.default, h, shape=(8, 4), dist_in=(whole,))
    b = s.call(aten.neg.default, h, shape=(8, 4), dist_in=(whole,))
    graph = s.done(a, b)
    InsertReshards()(graph)
    assert names(graph.graph) == ["reshard", "aten.exp", "aten.neg"]
    assert a.args == b.args


def test_a_piece_is_cut_from_a_placement_that_is_there():
    """Whole first, then a shard of it: the shard is a slice of the gathered tensor, not a second gather."""
    s = Sketch("tp2.cp2")
    h = s.place("h", (8, 4), ["tp", ""])
    a = s.call(aten.exp.default, h, shape=(8, 4), dist_in=(s.dist(["", ""]),))
    b = s.call(aten.neg.default, h, shape=(8, 4), dims=["cp", ""], dist_in=(s.dist(["cp", ""]),))
    graph = s.done(a, b)
    InsertReshards()(graph)
    second = b.args[0]
    assert second.target is c.reshard
    assert second.args[0] is a.args[0], "cut from the gathered one"


def test_results_are_resharded_too():
    s = Sketch("tp2")
    h = s.place("h", (8,), ["tp"])
    graph = s.done(h)
    (output,) = graph.graph.find_nodes(op="output")
    output.meta["dist_in"] = (s.dist([""]),)
    InsertReshards()(graph)
    assert names(graph.graph) == ["reshard"]
    assert graph.results[0].meta["dist"] == s.dist([""])


def test_operands_used_twice_count_twice():
    s = Sketch("tp2")
    h = s.place("h", (8,), ["tp"])
    y = s.call(aten.mul.Tensor, h, h, shape=(8,), dims=["tp"], dist_in=(s.dist(["tp"]), s.dist(["tp"])))
    assert tensor_operands(y) == [h, h]
    graph = s.done(y)
    InsertReshards()(graph)
    assert names(graph.graph) == ["aten.mul.Tensor"]


@pytest.mark.parametrize("strategy", ["tp2", "tp2+sp", "cp2", "cp2.tp2+sp"])
def test_after_insert_reshards_every_operand_lies_as_wanted(strategy):
    graph = before(llama().graph, strategy, "zero_shard")
    verify_placements(graph, "insert_reshards", resharded=True)
    for node in graph.graph.nodes:
        if "dist_in" in node.meta:
            assert [o.meta["dist"] for o in tensor_operands(node)] == list(node.meta["dist_in"])


def test_inserting_twice_changes_nothing():
    graph = before(llama().graph, "tp2+sp", "zero_shard")
    once = text(graph.graph)
    InsertReshards()(graph)
    assert text(graph.graph) == once


# ------------------------------------------------------------------------------------------------------ cleanup
def test_equal_collectives_become_one():
    s = Sketch("tp2")
    h = s.place("h", (8,), ["tp"])
    a = s.call(c.all_gather, h, "tp", 0, (), shape=(8,))
    b = s.call(c.all_gather, h, "tp", 0, (), shape=(8,))
    a2 = s.call(c.shard, a, "tp", 0, (), shape=(8,), dims=["tp"])
    b2 = s.call(c.shard, b, "tp", 0, (), shape=(8,), dims=["tp"])
    y = s.call(aten.add.Tensor, a2, b2, shape=(8,), dims=["tp"])
    graph = s.done(y)
    Cleanup()(graph)
    assert text(graph.graph) == "\n".join(
        [
            "%all_gather : f64[8] = all_gather(%h, tp, 0, [])",
            "%shard : f64[8@tp] = shard(%all_gather, tp, 0, [])",
            "%add_tensor : f64[8@tp] = aten.add.Tensor(%shard, %shard)",
        ]
    )


@pytest.mark.parametrize(
    "other",
    [{"bucket": "layers.0/backward"}, {"phase": "prologue"}],
    ids=["another bucket", "another phase"],
)
def test_gathers_of_another_bucket_or_phase_stay(other):
    """ZeRO-3 gathers a parameter again in the backward on purpose."""
    s = Sketch("dp2")
    h = s.place("h", (8,), ["dp"])
    a = s.call(c.all_gather, h, "dp", 0, (), shape=(8,), bucket="layers.0/forward")
    b = s.call(c.all_gather, h, "dp", 0, (), shape=(8,), **{"bucket": "layers.0/forward", **other})
    graph = s.done(s.call(aten.add.Tensor, a, b, shape=(8,)))
    Cleanup()(graph)
    assert names(graph.graph) == ["all_gather", "all_gather", "aten.add.Tensor"]


def test_dead_nodes_and_markers_go():
    s = Sketch("tp2")
    h = s.place("h", (8,))
    unused = s.call(aten.exp.default, h, shape=(8,))
    s.call(aten.neg.default, unused, shape=(8,))
    y = s.call(vary, h, shape=(8,), partial="tp")
    graph = s.done(y)
    Cleanup()(graph)
    assert names(graph.graph) == []
    assert graph.results == (h,)
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "output"]


# ---------------------------------------------------------------------------------------------- global_to_local
T = dim_symbol("T")


def symbolic(node: fx.Node, expression: object) -> fx.Node:
    node.meta = {"sym": expression, "fqn": ""}
    return node


def test_sizes_become_local():
    """The docstring's example: a token dim cut by cp comes in sharded, 64 columns are cut by tp."""
    s = Sketch("cp2.tp2")
    ids = s.place("ids", (1, T), ["", "cp"], kind="batch", dtype=torch.int64)
    x = s.place("x", (1, T, 64), ["", "cp", "tp"], kind="batch")
    n = symbolic(s.graph.call_function(aten.sym_size.int, (ids, 1)), T)
    y = s.call(aten.view.default, x, [n, 64], shape=(T, 64), dims=["cp", "tp"])
    graph = s.done(y)
    GlobalToLocal()(graph)
    assert [line.split(" = ")[1] for line in text(graph.graph).splitlines()] == [
        "aten.sym_size.int(%ids, 1)",
        "mul(%sym_size_int, 2)",
        "floordiv(%mul, 2)",
        "aten.reshape(%x, [%floordiv, 32])",
    ]
    assert y.meta["local"] == TensorMeta((T / 2, 32), torch.float64)
    assert x.meta["local"] == TensorMeta((1, T / 2, 32), torch.float64)


def test_whole_sizes_stay():
    s = Sketch("tp2")
    x = s.place("x", (6, 8), ["", "tp"])
    total = s.call(aten.sum.dim_IntList, x, [1], True, shape=(6, 1), partial="tp")
    y = s.call(aten.expand.default, total, [6, 4], shape=(6, 4))
    graph = s.done(y)
    GlobalToLocal()(graph)
    assert y.args[1] == [6, 4]


@pytest.mark.parametrize(
    ("target", "args", "shape", "dims", "expected"),
    [
        (aten.view.default, ([4, -1],), (4, 24), ["", "tp"], [4, -1]),
        (aten.expand.default, ([12, 8, 1],), (12, 8, 1), ["tp", "", ""], [6, 8, 1]),
        (aten.view.default, ([12, 8],), (12, 8), ["tp cp", ""], [2, 8]),
        (aten.view.default, ([11, 9],), (11, 9), ["tp", "cp"], [6, 3]),
    ],
)
def test_sizes_of(target, args, shape, dims, expected):
    s = Sketch("tp2.cp3")
    x = s.place("x", shape, dims)
    y = s.call(target, x, *args, shape=shape, dims=dims)
    graph = s.done(y)
    GlobalToLocal()(graph)
    assert list(y.args[1]) == expected


def test_each_divided_size_is_made_once():
    s = Sketch("cp2")
    ids = s.place("ids", (T,), [""], kind="batch", dtype=torch.int64)
    x = s.place("x", (T, 4), ["cp", ""])
    n = symbolic(s.graph.call_function(aten.sym_size.int, (ids, 0)), T)
    a = s.call(aten.view.default, x, [n, 4], shape=(T, 4), dims=["cp", ""])
    b = s.call(aten.view.default, a, [n, 2, 2], shape=(T, 2, 2), dims=["cp", "", ""])
    graph = s.done(b)
    GlobalToLocal()(graph)
    assert names(graph.graph).count("floordiv") == 1


@pytest.mark.parametrize("strategy", ["tp2", "tp3", "cp2.tp2+sp", "dp2.cp2+zero3"])
def test_every_value_knows_its_local_shape(strategy):
    graph = before(llama().graph, strategy, "lower_collectives")
    for node in graph.graph.nodes:
        dist, meta = node.meta.get("dist"), node.meta.get("tensor")
        if isinstance(dist, DistConfig) and meta is not None:
            assert node.meta["local"].shape == dist.local_shape(meta.shape)
            assert node.meta["local"].dtype == meta.dtype


# -------------------------------------------------------------------------------------------------- all of them
def test_ladder_is_made_of_passes():
    from fxpar.lowering import default_passes

    ladder = default_passes()
    assert all(isinstance(step, GraphPass) for step in ladder)
    assert len({step.name for step in ladder}) == len(ladder)
    assert {step.tier for step in ladder} == {"exact", "numeric", "lossy"}
    assert [step.name for step in ladder if step.tier == "lossy"] == ["limit_experts", "compress_dispatch"]


def test_a_collective_that_is_run_says_so():
    with pytest.raises(VerifyError, match="collective 'all_gather' is still in a graph that is being run"):
        c.all_gather(torch.zeros(2), "tp", 0, ())
