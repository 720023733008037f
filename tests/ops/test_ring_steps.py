"""Steps of a ring against plain attention of each document alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.batching.ring_order import ring_order
from fxpar.errors import OpInputError
from fxpar.ops.ring_pairs import Run, pairs
from tests.repeat import examples

own = torch.ops.fxpar
E, EV = 4, 6


def alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Each document by itself with torch's attention, [B, H, T, Ev]."""
    pieces = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True) for one in pieces], 2)


def in_ring(
    inputs: tuple[Tensor, ...],
    degree: int,
    ids: Tensor | None,
    positions: Tensor | None,
    rule: tuple,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of all ranks, side by side: what they hand on is handed on here."""
    q, k, v, dout = ([x.contiguous() for x in one.chunk(degree, 2)] for one in inputs)
    kv = [torch.cat([a, b], 3).transpose(1, 2).contiguous() for a, b in zip(k, v, strict=True)]
    found = []
    for r in range(degree):
        out = lse = None
        for s in range(degree):
            place = (ids, positions, r, s, degree, *rule)
            joining = sinks if s == degree - 1 else None
            out, lse = own.attention_block(q[r], kv[(r - s) % degree], out, lse, *place, joining)
        found.append((out, lse))
    dq = [torch.zeros_like(one) for one in q]
    dkv = [torch.zeros_like(one) for one in kv]
    for r, s in itertools.product(range(degree), repeat=2):
        place = (ids, positions, r, s, degree, *rule)
        terms = own.attention_block_backward(dout[r], q[r], kv[(r - s) % degree], *found[r], *place)
        dq[r] += terms[0]
        dkv[(r - s) % degree] += terms[1]
    dk, dv = torch.cat(dkv, 1).transpose(1, 2).split([E, EV], 3)
    return torch.cat([out for out, _ in found], 2), torch.cat(dq, 2), dk, dv


def expected(inputs: tuple[Tensor, ...], lengths: list[int], causal: bool) -> tuple[Tensor, ...]:
    *qkv, dout = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = alone(*leaves, lengths, causal)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def made(batch: int, heads: int, kv_heads: int, tokens: int, seed: int) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(heads, E), (kv_heads, E), (kv_heads, EV), (heads, EV)]
    return tuple(torch.randn(batch, h, tokens, e, dtype=torch.float64, generator=rng) for h, e in shapes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, bool, int]:
    """Documents of a row, the last one padding; degree; heads of keys and queries; causal; a seed."""
    degree = draw(st.integers(2, 8))
    lengths = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=7))
    missing = -sum(lengths) % degree
    kv_heads = draw(st.integers(1, 8))
    group = draw(st.integers(1, 3))
    return (
        [*lengths, *[missing] * bool(missing)],
        degree,
        kv_heads,
        group,
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=examples(60))
@given(cases(), st.booleans())
def test_each_document_sees_itself(case: tuple, shuffled: bool) -> None:
    """Whatever the lengths: documents on all ranks, ranks without a token of one, tokens of a row in any order."""
    lengths, degree, kv_heads, group, causal, seed = case
    tokens = sum(lengths)
    inputs = made(1, kv_heads * group, kv_heads, tokens, seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    order = torch.arange(tokens)
    if shuffled:  # pieces of 1 to 9 tokens in another order
        rng = torch.Generator().manual_seed(seed)
        cuts = torch.randint(1, 10, (tokens,), generator=rng).cumsum(0)
        parts = torch.tensor_split(order, cuts[cuts < tokens])
        order = torch.cat([parts[i] for i in torch.randperm(len(parts), generator=rng)])
    back = order.argsort()
    rule = (causal, 0, E**-0.5, 0.0)
    turned = tuple(x[:, :, order] for x in inputs)
    found = in_ring(turned, degree, ids[:, order], positions[:, order] if shuffled else None, rule)
    for one, other in zip(found, expected(inputs, lengths, causal), strict=True):
        torch.testing.assert_close(one[:, :, back], other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 7, 40])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_windows_and_soft_caps(causal: bool, window: int, softcap: float) -> None:
    """As `fxpar::attention` has them over the whole row."""
    lengths = [17, 1, 30]
    inputs = made(2, 4, 2, 48, 3)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    rule = (causal, window, 0.3, softcap)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, _ = own.attention(*leaves, ids, None, *rule)
    wanted = (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
    for one, other in zip(in_ring(inputs, 4, ids, None, rule), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_sinks_join_once() -> None:
    inputs, sinks = made(2, 4, 2, 48, 3), torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)[None, :, None]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([17, 1, 30]))[None]
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, _ = own.attention(*leaves, ids, None, True, 5, 0.3, 0.0, sinks)
    wanted = (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
    found = in_ring(inputs, 4, ids, None, (True, 5, 0.3, 0.0), sinks)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_documents(causal: bool) -> None:
    inputs = made(2, 4, 1, 24, 5)
    found = in_ring(inputs, 3, None, None, (causal, 0, E**-0.5, 0.0))
    for one, other in zip(found, expected(inputs, [24], causal), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_neighbours_are_one_pair() -> None:
    """Of a long document in zigzag a rank makes one call per step, whichever of the two it is behind."""
    chunks = [(Run(0, 8 * r, 0, 8), Run(0, 8 * (7 - r), 8, 16)) for r in range(4)]
    behind = list(pairs(chunks[2], chunks[0], True, 0, same=False))
    before = list(pairs(chunks[0], chunks[2], True, 0, same=False))
    assert [(p.queries, p.keys) for p in behind] == [((0, 16), (0, 8))]
    assert [(p.queries, p.keys) for p in before] == [((8, 16), (0, 16))]


def test_low_precision_rounds_once() -> None:
    """Between steps results stay in fp32, so that many steps lose no more than one."""
    inputs = made(1, 2, 1, 64, 7)
    low = tuple(x.to(torch.bfloat16) for x in inputs)
    exact = expected(tuple(x.double() for x in low), [64], True)[0]
    found = in_ring(low, 8, None, None, (True, 0, E**-0.5, 0.0))[0]
    one, _ = own.attention(*low[:3], None, None, True, 0, E**-0.5, 0.0)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.5 * (one - exact).abs().max()


@pytest.mark.parametrize(("lengths", "degree"), [([1], 2), ([5000], 8), ([2999, 1, 2000], 3), ([700] * 3, 5)])
def test_rows_as_the_runtime_orders_them(lengths: list[int], degree: int) -> None:
    """Long documents in zigzag, short ones whole, padding wherever there is room."""
    missing = -sum(lengths) % degree
    lengths = [*lengths, missing] if missing else lengths
    inputs = made(1, 2, 1, sum(lengths), 11)
    order = torch.tensor(ring_order(lengths, degree))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None, order]
    positions = torch.cat([torch.arange(n) for n in lengths])[None, order]
    found = in_ring(tuple(x[:, :, order] for x in inputs), degree, ids, positions, (True, 0, E**-0.5, 0.0))
    for one, other in zip(found, expected(inputs, lengths, True), strict=True):
        torch.testing.assert_close(one[:, :, order.argsort()], other, rtol=0, atol=1e-10)


def test_marks_of_another_row() -> None:
    q, kv = torch.zeros(1, 1, 4, E), torch.zeros(1, 4, 1, 2 * E)
    with pytest.raises(OpInputError, match=r"document_ids \(1, 4\) are not those of 8 tokens"):
        own.attention_block(q, kv, None, None, torch.zeros(1, 4, dtype=torch.int64), None, 0, 0, 2, True, 0, 1.0, 0.0)


def test_marks_are_read_again_when_they_change() -> None:
    inputs, rule = made(1, 1, 1, 8, 2), (True, 0, E**-0.5, 0.0)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    in_ring(inputs, 2, ids, None, rule)
    ids[0, 3:] = 1
    found = in_ring(inputs, 2, ids, None, rule)
    for one, other in zip(found, expected(inputs, [3, 5], True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
