"""Storages on the meta device: views, copies, collectives, ranks."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.lowering import lower
from fxpar.ops import layout
from fxpar.remat import saved_bytes, trace_sized, trace_storages
from tests.captured import llama, odd

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def small() -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["local"] = TensorMeta((dim_symbol("T"), 6), torch.float32)
    return graph, x


def test_views_share_and_copies_do_not():
    graph, x = small()
    view = graph.call_function(aten.reshape.default, (x, [-1]))
    turned = graph.call_function(aten.t.default, (x,))
    copied = graph.call_function(aten.reshape.default, (turned, [-1]))
    pieces = graph.call_function(aten.split.Tensor, (copied, 12))
    piece = graph.call_function(operator.getitem, (pieces, 1))
    graph.output((piece,))
    found = trace_storages(graph, {dim_symbol("T"): 4})
    assert found.of[x] == found.of[view] == found.of[turned]
    assert found.of[copied] == found.of[pieces] == found.of[piece] != found.of[x]
    assert [found.nbytes[i] for i in (*found.of[x], *found.of[copied])] == [96, 96]
    assert found.borrowed == set(found.of[x])


def test_collectives_need_no_process_group():
    graph, x = small()
    row = graph.call_function(layout.lift, (x,))
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (row, 2, "@tp"))
    wait = graph.call_function(c10d.wait_tensor.default, (gathered,))
    scattered = graph.call_function(c10d.reduce_scatter_tensor.default, (wait, "sum", 2, "@tp"))
    reduced = graph.call_function(c10d.all_reduce.default, (x, "sum", "@tp"))
    inplace = graph.call_function(c10d.all_reduce_.default, (reduced, "sum", "@tp"))
    swapped = graph.call_function(c10d.all_to_all_single.default, (wait, [1, 1], [1, 1], "@tp"))
    graph.output(())
    found = trace_storages(graph, {dim_symbol("T"): 4})
    sizes = {n.name: found.nbytes[found.of[n][0]] for n in (gathered, scattered, reduced, swapped)}
    assert list(sizes.values()) == [192, 96, 96, 192]
    assert found.of[wait] == found.of[gathered]
    assert found.of[inplace] == found.of[reduced] != found.of[x]


def test_coordinates():
    """The last piece of an uneven cut is padded, and padding is a copy; so is a piece of columns."""
    graph, x = small()
    piece = graph.call_function(layout.take, (x, 4, 0, (), "#tp"))
    columns = graph.call_function(layout.take, (x, 2, 1, (), "#tp"))
    graph.output((piece, columns))
    dims = {dim_symbol("T"): 6}
    first, last = (trace_storages(graph, dims, {"tp": i}) for i in (0, 3))
    assert first.of[piece] == first.of[x]
    assert last.of[piece] != last.of[x]
    assert first.of[columns] != first.of[x]
    others = [{"tp": 0}, {"tp": 3}]
    assert trace_sized(graph.nodes, dims, {"tp": 0}, others).differ == ({"tp": 3},)
    even = {dim_symbol("T"): 8}  # pieces lie elsewhere in x, which nothing asks for
    assert not trace_sized(graph.nodes, even, {"tp": 0}, others).differ


def test_every_op_of_the_models_runs_on_the_meta_device():
    for captured in (llama(), odd("adapted"), odd("experts")):
        program = lower(captured.graph, "dp2.tp2+zero3")
        for part in program.parts.values():
            trace_storages(part.graph, {d.symbol: 24 for d in program.dims})


def test_saved_is_what_the_backward_reads():
    """Linear in the tokens but for row numbers; weights and the batch are not counted."""
    program = lower(llama().graph, "dp1")
    one, two, three = (
        saved_bytes(program.body.graph, trace_storages(program.body.graph, {d.symbol: size for d in program.dims}))
        for size in (16, 32, 48)
    )
    assert two - one == three - two > 0
    assert one - (two - one) < 2000


def test_storages_of_other_sizes_are_read_off_the_shapes():
    """As large as the graph traced there has them, with the same storages for the same values."""
    programs = [lower(one.graph, "dp2.tp2+zero3") for one in (llama(), odd("experts"))]
    for program in (*programs, lower(llama().graph, "cp2.tp2+sp+remat(selective)")):
        graph, (T, *rest) = program.body.graph, program.dims
        few, many = ({T.symbol: size} | {dim.symbol: 2 for dim in rest} for size in (64, 4096))
        found = trace_sized(graph.nodes, many, {}, ())
        there = trace_storages(graph, few)
        assert found.nbytes(few) == there.nbytes != found.storages.nbytes
        assert found.storages.of == there.of
        assert found.nbytes({**few, T.symbol: 1}) is None  # any view of one token is contiguous


def test_storages_that_shapes_do_not_tell_are_traced_anew():
    graph, x = small()
    kept = graph.call_function(aten.new_empty_strided.default, (x, [4], [8]))
    kept.meta["local"] = TensorMeta((4,), torch.float32)
    graph.output((kept,))
    found = trace_sized(graph.nodes, {dim_symbol("T"): 4}, {}, ())
    assert found.storages.nbytes == (96, 100)
    assert found.nbytes({dim_symbol("T"): 8}) is None
