"""Calls on tensors without data, against torch's own."""

from __future__ import annotations

import torch

from fxpar.remat.meta_values import MetaValues, meta_tensors

aten = torch.ops.aten


def test_views_share_a_storage_and_copies_have_their_own():
    values = MetaValues()
    x = values.placed((4, 6), torch.float32)
    view = values.call(aten.t.default, (x,), {})
    copy = values.call(aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
    assert (view.shape, view.strides, view.storage) == ((6, 4), (1, 6), x.storage)
    assert (copy.strides, copy.storage) == ((4, 1), 1)
    assert values.nbytes == [96, 96]


def test_the_same_call_on_other_storages_is_told_apart():
    """x + x, and x + y; a second time each, from what is known."""
    values = MetaValues()
    x, y = values.placed((2, 3), torch.float32), values.placed((2, 3), torch.float32)
    for _ in range(2):
        made = [values.call(aten.add_.Tensor, operands, {}) for operands in ((x, x), (x, y), (y, x))]
        assert [one.storage for one in made] == [0, 0, 1]
    assert values.nbytes == [24, 24]


def test_several_results_have_storages_of_their_own():
    values = MetaValues()
    x = values.placed((5, 8), torch.bfloat16)
    for first in (1, 4):
        both = values.call(aten.max.dim, (x, 1), {})
        assert [(one.shape, one.dtype, one.storage) for one in meta_tensors(both)] == [
            ((5,), torch.bfloat16, first),
            ((5,), torch.int64, first + 1),
        ]
        assert values.call(lambda pair: pair[1], (both,), {}).storage == first + 1
        values.placed((1,), torch.float32)
    pieces = values.call(aten.split.Tensor, (x, 4), {})
    assert [(one.shape, one.offset, one.storage) for one in pieces] == [((4, 8), 0, 0), ((1, 8), 32, 0)]


def test_equal_operands_of_other_types_are_other_calls():
    """1, 1.0 and True."""
    values = MetaValues()
    x = values.placed((3,), torch.int64)
    made = [values.call(aten.mul.Scalar, (x, factor), {}).dtype for factor in (1, 1.0, True)]
    assert made == [torch.int64, torch.float32, torch.int64]


def storage_bytes(one):
    return one.untyped_storage().nbytes()


def test_operands_that_lie_otherwise_are_other_calls():
    """At another offset, with other strides, of another type, in another storage; equal ones are one object."""
    values = MetaValues()
    x, y = (values.placed((4, 4), dtype) for dtype in (torch.float32, torch.int32))
    top, low = (values.call(aten.slice.Tensor, (x, 0, i, i + 2), {}) for i in (0, 2))
    turned, half = values.call(aten.t.default, (x,), {}), values.placed((2, 4), torch.float32)
    assert [values.call(aten.select.int, (one, 0, 1), {}).offset for one in (top, low)] == [4, 12]
    assert [values.call(aten.clone.default, (one,), {}).strides for one in (x, turned)] == [(4, 1), (1, 4)]
    assert [values.call(aten.mul.Tensor, (one, one), {}).dtype for one in (x, y)] == [torch.float32, torch.int32]
    assert [values.call(storage_bytes, (one,), {}) for one in (top, half)] == [64, 32]
    assert len({hash(one.look) for one in (x, y, top, low, turned, half)}) == 6
    assert values.call(aten.t.default, (turned,), {}).look is x.look


def test_operands_without_a_hash():
    values = MetaValues()
    x = values.placed((3, 4), torch.float32)
    assert values.call(lambda one, where: one[where], (x, slice(1, 3)), {}).offset == 4
