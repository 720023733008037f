"""`fxpar::cross_entropy` against `F.cross_entropy`, whole and over slices of the classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops import cross_entropy as module
from fxpar.ops.cross_entropy import cross_entropy_loss
from tests.repeat import examples

own = torch.ops.fxpar


def tokens(N: int, V: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, V, (N,))
    target[::3] = -100
    return (3 * torch.randn(N, V, dtype=dtype)).requires_grad_(), target


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_equal_eager(dtype, tolerance):
    logits, target = tokens(50, 17, dtype)
    loss = cross_entropy_loss(logits, target)
    want = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    weight = torch.randn(50, dtype=dtype)
    (grad,) = torch.autograd.grad(loss, logits, weight)
    (want_grad,) = torch.autograd.grad(want, logits, weight)
    torch.testing.assert_close(grad, want_grad, rtol=tolerance, atol=tolerance)
    ignored = target == -100
    assert (loss[ignored] == 0).all()
    assert (grad[ignored] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_fp32(dtype):
    logits, target = tokens(20, 33, dtype)
    loss = cross_entropy_loss(logits, target)
    exact = F.cross_entropy(logits.double(), target, reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    (want,) = torch.autograd.grad(exact.sum(), logits)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, want)  # one rounding, of the fp32 gradient


def test_ignore_index_may_be_a_class():
    logits, target = tokens(30, 5)
    target = target.clamp(min=0)
    loss = cross_entropy_loss(logits, target, ignore_index=2)
    want = F.cross_entropy(logits, target, reduction="none", ignore_index=2)
    torch.testing.assert_close(loss, want)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    (want_grad,) = torch.autograd.grad(want.sum(), logits)
    torch.testing.assert_close(grad, want_grad)


def test_a_target_outside_the_classes_is_nan_with_gradient_zero():
    logits, target = tokens(4, 5)
    target = torch.tensor([1, 5, -1, -100])
    loss = cross_entropy_loss(logits, target)
    assert loss.isnan().tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert (grad[1:] == 0).all()
    assert (grad[0] != 0).any()


class Slice:
    """What one rank holds: some columns, their classes, and padding."""

    def __init__(self, logits: Tensor, start: int, end: int, padding: int) -> None:
        ids = torch.arange(start + 1, end + 1)
        self.class_ids = torch.cat([ids, ids.new_zeros(padding)])
        # Padding holds what must not matter.
        trash = logits.new_tensor([torch.nan, torch.inf, -torch.inf, 7.0]).repeat(len(logits), padding)
        self.logits = torch.cat([logits.detach()[:, start:end], trash[:, :padding]], 1)
        self.columns = slice(start, end)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
@settings(max_examples=examples(25))
def test_slices_of_the_classes_combine(parts, N, dtype, seed):
    """Uneven slices with padding columns, some all padding or empty: loss and gradient are whole again."""
    torch.manual_seed(seed)
    V = sum(width for width, _ in parts)
    if V == 0:
        return
    logits, target = tokens(N, V, dtype)
    ends = torch.tensor([width for width, _ in parts]).cumsum(0).tolist()
    ranks = [Slice(logits, end - w, end, pad) for end, (w, pad) in zip(ends, parts, strict=True)]
    pairs = [own.cross_entropy(r.logits, target, r.class_ids) for r in ranks]
    lse = torch.stack([p[0] for p in pairs]).logsumexp(0)
    picked = torch.stack([p[1] for p in pairs]).sum(0)
    wide = logits.detach().to(lse.dtype).requires_grad_()
    want = F.cross_entropy(wide, target, reduction="none")
    valid = target >= 0
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close((lse - picked)[valid], want[valid], rtol=tolerance, atol=tolerance)
    assert (picked[~valid] == 0).all()
    dloss = torch.randn(N, dtype=lse.dtype) * valid
    (want_grad,) = torch.autograd.grad(want, wide, dloss)
    tolerance = 1e-2 if dtype == torch.bfloat16 else tolerance
    for rank in ranks:
        grad = own.cross_entropy_backward(dloss, -dloss, rank.logits, target, rank.class_ids, lse)
        width = rank.columns.stop - rank.columns.start
        assert grad.dtype == dtype
        assert (grad[:, width:] == 0).all()
        torch.testing.assert_close(
            grad[:, :width].to(lse.dtype), want_grad[:, rank.columns], rtol=tolerance, atol=tolerance
        )


def test_a_slice_of_padding_alone():
    logits, target = torch.full((3, 2), torch.nan), torch.tensor([0, 1, -100])
    class_ids = torch.zeros(2, dtype=torch.int64)
    lse, picked = own.cross_entropy(logits, target, class_ids)
    assert (lse == -torch.inf).all()
    assert (picked == 0).all()
    ones = torch.ones(3)
    assert (own.cross_entropy_backward(ones, ones, logits, target, class_ids, ones) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks_of_rows(monkeypatch, dtype):
    logits, target = tokens(50, 17, dtype)
    grads, losses = [], []
    for block in (1 << 18, 40, 1):  # all rows at once, two, one
        monkeypatch.setattr(module, "_CPU_BLOCK", block)
        losses.append(cross_entropy_loss(logits, target))
        grads.append(torch.autograd.grad(losses[-1].sum(), logits)[0])
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(grad, grads[0])


def test_columns_that_do_not_lie_together_in_memory():
    logits = torch.randn(9, 6, dtype=torch.float64).T  # [6, 9]
    target = torch.arange(6)
    loss = cross_entropy_loss(logits.requires_grad_(), target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="none"))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.is_contiguous()


def test_the_path_without_a_look_at_the_data(monkeypatch):
    """CUDA hides padding by value; the same code on CPU must give what the CPU path gives."""
    logits, target = tokens(8, 6)
    part = Slice(logits, 2, 5, 2)
    part.logits = part.logits.nan_to_num(9.0, 9.0, -9.0)
    args = (part.logits, target, part.class_ids)
    lse, picked = own.cross_entropy(*args)
    grad = own.cross_entropy_backward(lse, picked, *args, lse)
    monkeypatch.setattr(module, "_real_columns", lambda ids: (ids[0] - 1, ids.count_nonzero()))
    assert torch.equal(own.cross_entropy(*args)[0], lse)
    assert torch.equal(own.cross_entropy(*args)[1], picked)
    assert torch.equal(own.cross_entropy_backward(lse, picked, *args, lse), grad)


def test_bad_shapes_are_named():
    logits, target = tokens(4, 5)
    with pytest.raises(OpInputError, match="flatten batch and sequence"):
        cross_entropy_loss(logits[None], target[None])
    with pytest.raises(OpInputError, match=r"target \(3,\)"):
        own.cross_entropy(logits, target[:3], torch.arange(1, 6))
    with pytest.raises(OpInputError, match=r"class_ids \(4,\)"):
        own.cross_entropy(logits, target, torch.arange(1, 5))


@pytest.mark.gpu
def test_gpu_equals_cpu_without_synchronising():
    logits, target = tokens(64, 100, torch.bfloat16)
    part = Slice(logits, 20, 70, 3)
    args = (part.logits, target, part.class_ids)
    lse, picked = own.cross_entropy(*args)
    grad = own.cross_entropy_backward(lse, picked, *args, lse)
    on_gpu = [x.cuda() for x in args]
    lse_gpu, picked_gpu = lse.cuda(), picked.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = own.cross_entropy(*on_gpu)
        got_grad = own.cross_entropy_backward(lse_gpu, picked_gpu, *on_gpu, lse_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip((*got, got_grad), (lse, picked, grad), strict=True):
        torch.testing.assert_close(a.cpu(), b)
