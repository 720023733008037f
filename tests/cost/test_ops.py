"""Counts of single ops against torch's own counter, and by the formulas of attention where that has none."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxpar.cost.ops import SizesAt, flops, in_backward, is_kernel, touched_bytes
from fxpar.errors import CostModelError, OpContractError
from fxpar.ir.graph import TensorMeta
from fxpar.ops import recurrence
from fxpar.ops.traits import DECLARED, OpTraits

aten, own = torch.ops.aten, torch.ops.fxpar
NOTHING = SizesAt({})


def node_of(target: Any, *args: Any) -> fx.Node:
    """A call on these values (tensors become placeholders), with the shape of its result."""
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        place = graph.placeholder(f"x{len(graph.nodes)}")
        place.meta["tensor"] = meta_of(value)
        return place

    operands = tuple(map(operand, args))
    node = graph.call_function(target, operands)
    node.meta["tensor"] = meta_of(target(*args))
    return node


def meta_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorMeta(tuple(value.shape), value.dtype)
    return None if value is None else tuple(map(meta_of, value))


def t(*shape: int) -> Tensor:
    return torch.randn(*shape)


STRIDE = ([1], [0], [1])
CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, t(5, 7), t(7, 3)),
    "bmm": (aten.bmm.default, t(2, 5, 7), t(2, 7, 3)),
    "addmm": (aten.addmm.default, t(3), t(5, 7), t(7, 3)),
    "baddbmm": (aten.baddbmm.default, t(2, 5, 3), t(2, 5, 7), t(2, 7, 3)),
    "convolution": (aten.convolution.default, t(2, 4, 9), t(6, 4, 3), None, *STRIDE, False, [0], 1),
    "in groups": (aten.convolution.default, t(2, 4, 9), t(6, 2, 3), None, *STRIDE, False, [0], 2),
    "transposed": (aten.convolution.default, t(2, 4, 9), t(4, 6, 3), None, *STRIDE, True, [0], 1),
    **{
        f"backward {mask}": (
            aten.convolution_backward.default,
            *(t(2, 6, 7), t(2, 4, 9), t(6, 4, 3)),
            *(None, *STRIDE, False, [0], 1, mask),
        )
        for mask in ([True, True, False], [False, True, False], [True, False, False])
    },
    "no product": (aten.mul.Tensor, t(5, 7), t(5, 7)),
}


@pytest.mark.parametrize(
    ("target", "meta", "expected"),
    [
        (aten.mm.default, {"backward": False}, False),
        (aten.mm.default, {"backward": True}, True),
        (aten.mm.default, {"backward": True, "again": True}, False),  # recomputed
        (own.attention.default, {"backward": True}, False),  # by a region that its model checkpoints
        (own.attention_backward.default, {"backward": False}, True),  # in a chunk that has both
        (own.recurrence_backward.default, {}, True),
    ],
)
def test_of_which_half_a_call_is(target, meta, expected):
    node = fx.Graph().call_function(target)
    node.meta.update(meta)
    assert in_backward(node) is expected


@pytest.mark.parametrize("name", CALLS)
def test_products_as_torch_counts_them(name):
    target, *args = CALLS[name]
    with FlopCounterMode(display=False) as counter:
        target(*args)
    assert flops(node_of(target, *args), NOTHING) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("causal", "window", "pairs"), [(False, 0, 6 * 8), (True, 0, 6 * 8 / 2), (True, 3, 6 * 3), (False, 3, 6 * 6)]
)
def test_attention(causal, window, pairs):
    """Pairs of a query and a key, times two products of 2 operations for each of 4 dims, in 2 x 3 heads."""
    graph = fx.Graph()
    places = [graph.placeholder(name) for name in ("grad", "q", "k", "v")]
    for place, length in zip(places, (6, 6, 8, 8), strict=True):
        place.meta["tensor"] = TensorMeta((2, 3, length, 4), torch.float32)
    rest = (causal, window, 1.0, False)
    forward = graph.call_function(own.attention.default, (*places[1:], None, None, *rest))
    backward = graph.call_function(
        own.attention_backward.default, (places[0], *places[1:], None, None, None, None, *rest)
    )
    assert flops(forward, NOTHING) == 2 * 3 * 2 * 2 * 4 * Fraction(pairs)
    assert flops(backward, NOTHING) == flops(forward, NOTHING) * Fraction(5, 2)


def test_a_recurrence_as_torch_counts_its_kernel():
    """At a whole number of chunks; what the delta rule adds has a solution of triangles, which torch does not count."""
    T, H, K, V = 2 * recurrence.CHUNK, 4, 8, 6
    operands = (torch.randn(2, T, 2, K), torch.randn(2, T, 2, K), torch.randn(2, T, H, V))
    decays = -torch.rand(2, T, H, 1), torch.rand(2, T, H)
    found = {}
    for delta in (False, True):
        with FlopCounterMode(display=False) as counter:
            recurrence.forward(*operands, *decays, None, delta)
        solution = recurrence.CHUNK * V * T * H * 2 if delta else 0
        found[delta] = flops(node_of(own.recurrence.default, *operands, *decays, None, delta), NOTHING)
        assert found[delta] == counter.get_total_flops() + solution
    dout = torch.randn(2, T, H, V)
    backward = node_of(own.recurrence_backward.default, dout, *operands, *decays, None, False)
    assert flops(backward, NOTHING) == 4 * found[False]


def test_bytes_and_dynamic_sizes():
    token = sympy.Symbol("T")
    node = node_of(aten.mul.Tensor, t(5, 7), t(5, 7))
    for each in (node, *node.all_input_nodes):
        each.meta["tensor"] = TensorMeta((token, 7), torch.bfloat16)
    assert touched_bytes(node, SizesAt({token: 100})) == 3 * 100 * 7 * 2
    node.meta["local"] = TensorMeta((token / 4, 7), torch.bfloat16)  # what this rank has of it counts
    assert touched_bytes(node, SizesAt({token: 100})) == 2 * 100 * 7 * 2 + 25 * 7 * 2


def test_a_lookup_reads_its_rows_only():
    node = node_of(aten.index_select.default, t(1000, 8), 0, torch.tensor([1, 2]))
    assert touched_bytes(node, NOTHING) == 2 * (2 * 8 * 4)


def test_what_runs_on_the_device():
    assert is_kernel(node_of(aten.mul.Tensor, t(2), t(2)))
    assert not is_kernel(node_of(aten.view.default, t(4), [2, 2]))
    assert not is_kernel(node_of(aten.reshape.default, t(4), [2, 2]))
    assert not is_kernel(next(iter(node_of(aten.mul.Tensor, t(2), t(2)).graph.nodes)))


def test_a_product_that_adds_to_an_accumulator():
    """As `accumulate_gradients` writes it."""
    for name, in_place in (("addmm", aten.addmm_.default), ("baddbmm", aten.baddbmm_.default)):
        target, *args = CALLS[name]
        args[0] = target(*args)
        assert flops(node_of(in_place, *args), NOTHING) == flops(node_of(target, *args), NOTHING) > 0
    assert flops(node_of(aten.addmv.default, t(5), t(5, 7), t(7)), NOTHING) == 2 * 5 * 7


@pytest.mark.parametrize("op", [own.embedding.default, aten.embedding.default], ids=str)
def test_a_lookup_reads_the_rows_that_it_returns(op):
    table, ids = t(1000, 8), torch.tensor([1, 2])
    numbers = (torch.arange(1000),) if op is own.embedding.default else ()
    assert touched_bytes(node_of(op, table, ids, *numbers), NOTHING) == 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (lambda operands, results: "x", OpContractError, "its flops= returned 'x', no number"),
        (lambda operands, results: None, OpContractError, "its flops= returned None, no number"),
        (lambda operands, results: 1 / 0, OpContractError, "its flops= raised ZeroDivisionError"),
        (lambda operands: 1, OpContractError, "its flops= raised TypeError"),
        (lambda operands, results: float("nan"), CostModelError, "operations of aten.bernoulli.p = nan must be finite"),
        (lambda operands, results: float("inf"), CostModelError, "= inf must be finite"),
        (lambda operands, results: -1, CostModelError, "= -1.0 must be"),
    ],
)
def test_operations_that_a_package_cannot_declare(count, error, message, monkeypatch):
    monkeypatch.setitem(DECLARED, aten.bernoulli.p, OpTraits(flops=count))
    with pytest.raises(error, match=message):
        flops(node_of(aten.bernoulli.p, torch.rand(3), 0.5), NOTHING)


@pytest.mark.parametrize("parts", [False, True])
def test_products_of_experts_cost_what_their_rows_do(parts):
    """And the gradient of the weights as much, however many experts there are."""
    x, w, ids = t(6, 2, 5), t(4, 5, 3), torch.randint(4, (6, 2))
    rows, counts, grad = x.view(12, 5), torch.tensor([3, 0, 9, 0]), t(12, 3)
    if parts:
        calls = (own.grouped_mm.default, rows, w, counts), (own.grouped_mm_backward.default, grad, rows, counts)
    else:
        calls = (own.expert_mm.default, x, w, ids), (own.expert_mm_backward.default, grad.view(6, 2, 3), x, ids, 4)
    assert [flops(node_of(*call), NOTHING) for call in calls] == [2 * 12 * 5 * 3] * 2
