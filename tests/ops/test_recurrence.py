"""`fxpar::recurrence` and `fxpar::causal_conv` against loops over the tokens, each document alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar import ops
from fxpar.errors import OpInputError

own = torch.ops.fxpar
assert ops  # importing it registers torch.ops.fxpar


def made(T: int, Hk: int, H: int, K: int, V: int, rows: int, B: int = 2) -> tuple[Tensor, ...]:
    """q, k, v, decay, beta; keys of length one, as the delta rule has them."""
    g = torch.Generator().manual_seed(T + K)
    x = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = x(B, T, Hk, K), F.normalize(x(B, T, Hk, K), dim=-1)
    return tuple(
        each.requires_grad_() for each in (q, k, x(B, T, H, V), -F.softplus(x(B, T, H, rows)), x(B, T, H).sigmoid())
    )


def token_by_token(operands: tuple[Tensor, ...], delta: bool) -> Tensor:
    """The page of `fxpar.ops.recurrence`, of one document."""
    q, k, v, decay, beta = operands
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    found = []
    for t in range(v.shape[1]):
        state = decay[:, t, :, :, None].exp() * state
        read = (state * k[:, t, :, :, None]).sum(2) if delta else 0.0
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - read))[:, :, None]
        found.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(found, 1)


def same(out: Tensor, wanted: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Values and all gradients."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    for one, other in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


SIZES = {
    "one token": (1, 1, 1, 3, 2, 1),
    "one chunk": (20, 2, 4, 4, 3, 1),
    "chunks that do not divide": (150, 1, 2, 4, 3, 1),
    "a decay per row": (37, 2, 2, 4, 3, 4),
    "channels": (33, 1, 6, 4, 1, 4),
}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_recurrence_is_a_loop_over_tokens(sizes: str, delta: bool) -> None:
    operands = made(*SIZES[sizes])
    same(own.recurrence(*operands, None, delta), token_by_token(operands, delta), operands)


@pytest.mark.parametrize("rows", [1, 4])
def test_documents_begin_anew(rows: int) -> None:
    """One that ends with a chunk, one of a token, one over several chunks."""
    lengths = [64, 1, 70, 5]
    operands = made(140, 1, 2, 4, 3, rows, B=1)
    ids = torch.tensor([3, 1, 2, 3]).repeat_interleave(torch.tensor(lengths))[None]
    parts = zip(*(x.split(lengths, 1) for x in operands), strict=True)
    alone = torch.cat([token_by_token(part, True) for part in parts], 1)
    same(own.recurrence(*operands, ids, True), alone, operands)


def test_strong_decays_leave_no_gaps() -> None:
    """Sums of decays are as large as hundreds, differences of them small."""
    q, k, v, decay, beta = made(90, 1, 2, 4, 3, 1)
    operands = (q, k, v, (decay * 40).detach().requires_grad_(), beta)
    same(own.recurrence(*operands, None, True), token_by_token(operands, True), operands)


def test_low_precision_computes_in_fp32() -> None:
    low = tuple(x.detach().bfloat16() for x in made(40, 1, 2, 4, 3, 1))
    wide = own.recurrence(*(x.double() for x in low), None, True)
    out = own.recurrence(*low, None, True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wide, rtol=2**-8, atol=1e-4)


def of_document(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1])


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_causal_convolution_is_one_with_zeros_in_front(width: int, with_bias: bool) -> None:
    """Over documents that are shorter and longer than the filter."""
    lengths = [7, 1, 12, 2]
    x = torch.randn(2, 5, sum(lengths), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_bias else None
    leaves = (x, weight) if bias is None else (x, weight, bias)
    same(own.causal_conv(x, weight, bias, None), of_document(x, weight, bias), leaves)
    ids = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    alone = torch.cat([of_document(part, weight, bias) for part in x.split(lengths, 2)], 2)
    same(own.causal_conv(x, weight, bias, ids), alone, leaves)


def test_bad_inputs_are_named() -> None:
    q, k, v, decay, beta = made(5, 2, 4, 3, 2, 1)
    for args, words in [
        ((q[0], k, v, decay, beta, None), "4 dims"),
        ((q, k, v[:, :, :3], decay, beta, None), "H a multiple of Hk"),
        ((q, k, v, decay.expand(-1, -1, -1, 2), beta, None), "1 or K"),
        ((q, k, v, decay, beta, torch.zeros(1, 4)), "document_ids"),
    ]:
        with pytest.raises(OpInputError, match=words):
            own.recurrence(*args, False)
    with pytest.raises(OpInputError, match=r"\[C, W\]"):
        own.causal_conv(torch.zeros(1, 3, 5), torch.zeros(4, 2), None, None)
