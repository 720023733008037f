"""What a call is known by: calls with equal keys have equal views."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxpar.ir.dist_config import OuterShard, Shard
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.rules.option import Option
from fxpar.rules.view import Sizes, call_key, make_view

aten = torch.ops.aten
T, END = dim_symbol("T"), 2**63 - 1


def call(target, shapes, rest=(), **kwargs):
    """One call on new operands of these shapes."""
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for operand, shape in zip(operands, shapes, strict=True):
        operand.meta["tensor"] = TensorMeta(shape, torch.float32)
    size = graph.placeholder("size")
    size.meta["sym"] = T
    node = graph.call_function(target, (*operands, *(size if one is T else one for one in rest)), kwargs)
    node.meta["tensor"] = TensorMeta((4, 4), torch.float32)
    return node


SAME = call(aten.sum.dim_IntList, [(4, T)], ([1], True))
OTHERS = {
    "shape": call(aten.sum.dim_IntList, [(8, T)], ([1], True)),
    "argument": call(aten.sum.dim_IntList, [(4, T)], ([0], True)),
    "keyword": call(aten.sum.dim_IntList, [(4, T)], ([1], True), dtype=torch.float64),
    "size": call(aten.sum.dim_IntList, [(4, T)], ([T], True)),
}


def view(node):
    return make_view(node, Sizes([T], 4))[0]


def test_repeated_calls_have_one_key():
    again = call(aten.sum.dim_IntList, [(4, T)], ([1], True))
    assert call_key(again) == call_key(SAME)
    assert hash(call_key(again)) == hash(call_key(SAME))
    assert view(again) == view(SAME)


@pytest.mark.parametrize("what", OTHERS)
def test_other_calls_have_others(what):
    assert call_key(OTHERS[what]) != call_key(SAME)
    assert view(OTHERS[what]) != view(SAME)


@pytest.mark.parametrize(
    ("bounds", "cut", "local"),
    [
        ((4, 12), Shard(0, (1, 2, 1)), (2, 6)),
        ((-12, END), Shard(0, (1, 3)), (2, 8)),
        ((4, 12), OuterShard(0, 2), (2, 6)),
        ((4, 12), Shard(1), (4, 12)),
        ((None, 12), Shard(0, (3, 1)), (None, 6)),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_bounds_of_a_slice_of_what_is_cut_already(bounds, cut, local, backward):
    """Of four rows of 16, over an axis of two (over two of four for a strided cut)."""
    degree = 4 if isinstance(cut, OuterShard) else 2
    sizes = ([16, 4],) * backward
    node = call((aten.slice_backward.default if backward else aten.slice.Tensor), [(16, 4)], (*sizes, 0, *bounds))
    node.meta["tensor"] = TensorMeta((16, 4), torch.float32)
    found, _ = make_view(node, Sizes([T], 4), [({node: Option((cut,), (cut,))}, degree)])
    assert found.args[-2:] == local
