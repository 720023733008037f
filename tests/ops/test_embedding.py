"""`fxpar::embedding` against `F.embedding`, whole and over slices of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar.ops  # noqa: F401  registers the ops
from fxpar.errors import OpInputError
from tests.repeat import examples

own = torch.ops.fxpar


def rows_of(V: int) -> torch.Tensor:
    return torch.arange(1, V + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_table_equals_eager(dtype):
    weight = torch.randn(11, 4, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, 11, (3, 8))
    out = own.embedding(weight, ids, rows_of(11))
    want = F.embedding(ids, weight)
    assert torch.equal(out, want)
    g = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, weight, g)
    (want_grad,) = torch.autograd.grad(want, weight, g)
    assert torch.equal(grad, want_grad)


def test_padding_idx_gets_no_gradient():
    ids = torch.tensor([[0, 2, 2, 5]])
    grad = torch.randn(1, 4, 3)
    for padding_idx in (-1, 0, 2):
        want = torch.ops.aten.embedding_dense_backward(grad, ids, 6, padding_idx, False)
        assert torch.equal(own.embedding_backward(grad, ids, rows_of(6), padding_idx), want)
    assert (own.embedding_backward(grad, ids, rows_of(6), 2)[2] == 0).all()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=4),
    st.lists(st.integers(0, 6), max_size=3),
    st.booleans(),
    st.integers(-1, 5),
    st.integers(0, 1000),
)
@settings(max_examples=examples(40))
def test_slices_of_the_rows_sum_to_the_whole(parts, shape, scattered, padding_idx, seed):
    """Uneven slices, padded, some empty; also rows that are not neighbours, as strided shards have."""
    torch.manual_seed(seed)
    V = sum(width for width, _ in parts)
    if V == 0:
        return
    weight = torch.randn(V, 3, dtype=torch.float64)
    ids = torch.randint(0, V, shape)
    order = torch.randperm(V) if scattered else torch.arange(V)
    grad = torch.randn(*shape, 3, dtype=torch.float64)
    want_grad = torch.ops.aten.embedding_dense_backward(grad, ids, V, padding_idx, False)
    total, start = torch.zeros(*shape, 3, dtype=torch.float64), 0
    for width, padding in parts:
        own_rows = order[start : start + width].sort().values
        start += width
        row_ids = torch.cat([own_rows + 1, own_rows.new_zeros(padding)])
        local = torch.cat([weight[own_rows], torch.full((padding, 3), torch.nan)])
        total = total + own.embedding(local, ids, row_ids)
        local_grad = own.embedding_backward(grad, ids, row_ids, padding_idx)
        torch.testing.assert_close(local_grad[:width], want_grad[own_rows], rtol=1e-12, atol=1e-12)
        assert (local_grad[width:] == 0).all()
    assert torch.equal(total, F.embedding(ids, weight))


@pytest.mark.parametrize("row_ids", [[1, 2, 3], [3, 4, 5], [1, 2, 0], [2, 4, 5]])
def test_ids_without_a_row_give_zeros(row_ids):
    ids = torch.tensor([-1, 0, 1, 2, 3, 4, 100])
    weight = torch.randn(3, 2, requires_grad=True)
    out = own.embedding(weight, ids, torch.tensor(row_ids))
    for i, token in enumerate(ids.tolist()):
        want = weight[row_ids.index(token + 1)] if token + 1 in row_ids and token >= 0 else torch.zeros(2)
        assert torch.equal(out[i], want)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    present = [[1.0 if r > 0 else 0.0] * 2 for r in row_ids]
    assert grad.tolist() == present


def test_the_search_and_the_shortcut_agree():
    """On CPU neighbouring rows skip the search that CUDA always does."""
    from fxpar.ops.embedding import _locate

    ids = torch.randint(0, 20, (4, 9))
    shortcut, here = _locate(ids, torch.arange(6, 13))
    found, here_too = _locate(ids, torch.tensor([6, 7, 8, 9, 10, 11, 12, 0]))  # padding: searches
    assert here is not None
    assert here_too is not None
    assert torch.equal(here, here_too)
    assert torch.equal(shortcut[here], found[here])


def test_a_gradient_that_is_expanded():
    weight = torch.randn(5, 3, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 4]])
    (grad,) = torch.autograd.grad(own.embedding(weight, ids, rows_of(5)).sum(), weight)
    assert grad[:, 0].tolist() == [1, 2, 0, 0, 1]


def test_bad_shapes_are_named():
    with pytest.raises(OpInputError, match=r"weight \(5, 3\) and row_ids \(4,\)"):
        own.embedding(torch.randn(5, 3), torch.tensor([0]), rows_of(4))


@pytest.mark.parametrize("device", ["cpu", "meta"])  # what runs, and what a capture runs
def test_ids_of_another_kind_are_an_error_whatever_rows_a_rank_has(device):
    weight, ids = torch.randn(5, 3, device=device), torch.tensor([0, 1], device=device)
    for rows in (rows_of(5), torch.tensor([3, 4, 5, 0, 0])):
        own.embedding(weight, ids.int(), rows.to(device))
        for wrong in (torch.float64, torch.bool, torch.int16):
            with pytest.raises(OpInputError, match=f"ids are {wrong}"):
                own.embedding(weight, ids.to(wrong), rows.to(device))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [100, 5000])  # ATen has one kernel for few ids and one for many
def test_gpu_equals_cpu_without_synchronising(count):
    ids = torch.randint(0, 50, (2, count))
    row_ids = torch.cat([torch.arange(11, 31), torch.zeros(4, dtype=torch.int64)])
    weight, grad = torch.randn(24, 8), torch.randn(2, count, 8)
    want = own.embedding(weight, ids, row_ids)
    want_grad = own.embedding_backward(grad, ids, row_ids, 15)
    weight, grad, ids, row_ids = weight.cuda(), grad.cuda(), ids.cuda(), row_ids.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = own.embedding(weight, ids, row_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.cpu(), want)
    got = own.embedding_backward(grad, ids, row_ids, 15)
    torch.testing.assert_close(got.cpu(), want_grad, rtol=1e-4, atol=1e-4)
