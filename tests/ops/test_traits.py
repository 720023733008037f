"""What the table says of ops, seen by calling them."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
import torch

from fxpar.ops import traits
from fxpar.rules.table import TABLE

aten, own = torch.ops.aten, torch.ops.fxpar
X = torch.arange(1.0, 25.0).reshape(4, 1, 6)

# What an op of the table is called with behind X.
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: ([6, 4],),
    aten.reshape.default: ([6, 4],),
    aten._unsafe_view.default: ([6, 4],),
    aten.permute.default: ([2, 0, 1],),
    aten.transpose.int: (0, 2),
    aten.unsqueeze.default: (0,),
    aten.squeeze.dim: (1,),
    aten.squeeze.dims: ([1],),
    aten.expand.default: ([2, 4, 3, 6],),
    aten.repeat.default: ([2, 1, 1],),
    aten.flip.default: ([0, 2],),
    aten.roll.default: ([1], [0]),
    aten.slice.Tensor: (0, 1, 3),
    aten.select.int: (0, 2),
    aten.split.Tensor: (2,),
    aten.split_with_sizes.default: ([1, 3],),
    aten.constant_pad_nd.default: ([1, 1],),
    aten.slice_backward.default: ([9, 1, 6], 0, 2, 6, 1),
    aten.select_backward.default: ([5, 4, 1, 6], 0, 2),
}


def called(op: Any, x: torch.Tensor = X) -> list[torch.Tensor]:
    """Results of a call on x, or on [x, x]."""
    first = [x, x] if op in (aten.cat.default, aten.stack.default) else x
    found = op(x[:, 0] if op is aten.t.default else first, *ARGUMENTS.get(op, ()))
    return list(found) if isinstance(found, tuple | list) else [found]


def elements(values: list[torch.Tensor]) -> list[float]:
    return [number for value in values for number in value.flatten().tolist()]


@pytest.mark.parametrize("op", sorted(traits.MOVES, key=str), ids=str)
def test_what_moves_gives_elements_of_its_operand(op):
    given, got = X.flatten().tolist(), elements(called(op))
    assert set(got) <= {*given, 0.0}
    if op in traits.TAKES:
        assert set(got) <= set(given)
    if op in traits.KEEPS_ALL:
        assert set(got) == set(given)
    if op in traits.RELABELS:
        assert Counter(got) == Counter(given)


@pytest.mark.parametrize("op", sorted(traits.TAKES, key=str), ids=str)
def test_a_view_lies_in_the_memory_of_its_operand(op):
    shares = {value.untyped_storage().data_ptr() == X.untyped_storage().data_ptr() for value in called(op)}
    assert shares == {traits.is_view(op)}


ROWS, IDS, COUNTS = torch.zeros(2, 2, 3), torch.tensor([[0, 1], [1, 3]]), torch.tensor([1, 2, 0, 1])
OF_EXPERTS: dict[Any, tuple[Any, ...]] = {
    own.expert_mm.default: (ROWS, torch.zeros(4, 3, 5), IDS),
    own.expert_mm_backward.default: (torch.zeros(2, 2, 5), ROWS, IDS, 4),
    own.grouped_mm.default: (torch.zeros(4, 3), torch.zeros(4, 3, 5), COUNTS),
    own.grouped_mm_backward.default: (torch.zeros(4, 5), torch.zeros(4, 3), COUNTS),
}


@pytest.mark.parametrize("op", sorted(traits.KEEPS_ZERO, key=str), ids=str)
def test_zeros_stay_zeros(op):
    tensors = sum(str(a.type) == "Tensor" for a in op._schema.arguments)
    if op in ARGUMENTS or op in traits.RELABELS:
        found = called(op, torch.zeros_like(X))
    elif op is torch.ops.fxpar.dropout.default:
        found = [op(torch.zeros(3), torch.tensor(1), [torch.arange(3)], 0.5, 1)]
    elif op in OF_EXPERTS:
        found = [op(*OF_EXPERTS[op])]
    else:
        shapes = {aten.bmm.default: [(2, 3, 3)] * 2, aten.mv.default: [(3, 3), (3,)], aten.dot.default: [(3,)] * 2}
        values = [torch.zeros(shape) for shape in shapes.get(op, [(3, 3)] * tensors)]
        more = {aten.sum.dim_IntList: ([0],), aten.mul.Scalar: (2,), aten.div.Scalar: (2,)}
        found = [op(*values, *more.get(op, ()), *((0.0,) if op is aten.threshold_backward.default else ()))]
    assert all(torch.equal(value, torch.zeros_like(value)) for value in found)


def test_sizes_stand_where_the_table_says():
    for op, position in traits.SIZES.items():
        argument = op._schema.arguments[position]
        assert argument.name in ("size", "shape", "input_sizes")
        assert "List" in str(argument.type)


def test_lookups_have_their_operands_in_one_order():
    weight, ids = torch.randn(5, 3), torch.tensor([4, 0])
    found = own.embedding.default(weight, ids, torch.arange(1, 6))
    assert torch.equal(found, aten.embedding.default(weight, ids))
    for op in traits.EMBEDDINGS | traits.LABEL_LOSSES:
        table, numbers = (argument.name for argument in op._schema.arguments[:2])
        assert (table, numbers) in {("weight", "ids"), ("weight", "indices"), ("logits", "target"), ("self", "target")}


def test_attention_has_its_operands_where_the_table_says():
    for op, first in traits.ATTENTION.items():
        assert [argument.name for argument in op._schema.arguments[first : first + 3]] == ["q", "k", "v"]


def test_dtype_classes_are_of_known_ops_and_words():
    assert {traits.computes(op) for op in traits._COMPUTES} <= set(get_args(traits.Computes))
    assert traits.computes(aten.mm.default) == "low"
    assert traits.computes(aten.native_layer_norm.default) == "norm"
    assert all(traits.computes(op) == "moves" for op in traits.MOVES)


def test_random_ops_are_those_that_torch_tags():
    assert traits.is_random(aten.bernoulli.p)
    assert not any(traits.is_random(op) for op in TABLE)
