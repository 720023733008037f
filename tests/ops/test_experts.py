"""Products of experts against a plain loop over tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar.ops  # noqa: F401  registers the ops
from fxpar.errors import OpInputError, UnsupportedOpError
from fxpar.ops.copies import own_rows

own = torch.ops.fxpar
N, D, F = 7, 5, 3


def ids_of(routing: str, slots: int, experts: int) -> Tensor:
    """[N, K]: distinct experts for each token, all tokens alike, or with some that are no expert here."""
    g = torch.Generator().manual_seed(slots)
    ids = torch.stack([torch.randperm(experts, generator=g)[:slots] for _ in range(N)])
    if routing == "alike":
        return ids[:1].expand(N, slots).contiguous()
    return (
        ids.masked_fill(torch.rand(N, slots, generator=g) < 0.4, -1 if slots % 2 else experts + 1)
        if routing == "absent"
        else ids
    )


def values(slots: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, w, p = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((N, D), (experts, D, F), (N, slots)))
    return x.requires_grad_(), w.requires_grad_(), p.requires_grad_()


def by_loop(x: Tensor, w: Tensor, p: Tensor, ids: Tensor) -> Tensor:
    rows = []
    for n in range(N):
        terms = [p[n, k] * (x[n] @ w[e]) for k, e in enumerate(ids[n].tolist()) if 0 <= e < w.shape[0]]
        rows.append(torch.stack(terms).sum(0) if terms else x.new_zeros(F))
    return torch.stack(rows)


def by_token(x: Tensor, w: Tensor, p: Tensor, ids: Tensor) -> Tensor:
    rows = own.expert_mm(x[:, None].expand(-1, ids.shape[1], -1), w, ids)
    return own.weighted_sum(rows, p)


def by_parts(x: Tensor, w: Tensor, p: Tensor, ids: Tensor, route: Any = own.route_rows) -> Tensor:
    order, counts = route(ids, w.shape[0])
    rows = own.grouped_mm(own.dispatch(x, order, ids), w, counts)
    return own.combine(rows, p, order, ids)


def by_own_parts(x: Tensor, w: Tensor, p: Tensor, ids: Tensor) -> Tensor:
    return by_parts(x, w, p, ids, own_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [by_token, by_parts])
@pytest.mark.parametrize("routing", ["spread", "alike", "absent"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize(("width", "inner"), [(64, 32), (8, 24), (5, 3), (12, 20)])
def test_kernels_of_a_gpu(way, routing, dtype, tolerance, width, inner):
    """Also where a row's bytes do not fit the kernel's alignment, and where experts have no row."""
    g = torch.Generator().manual_seed(1)
    shapes = (N, width), (4, width, inner), (N, 2)
    made = [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]
    ids = ids_of(routing, 2, 4)
    found = []
    for device, wide in (("cpu", torch.float64), ("cuda", dtype)):
        given = [x.to(device, wide).requires_grad_() for x in made]
        out = way(*given, ids.to(device))
        grad = torch.linspace(-1, 1, out.numel(), device=device, dtype=wide).view_as(out)
        found.append([out.detach(), *torch.autograd.grad(out, given, grad)])
    for want, have in zip(*found, strict=True):
        assert have.dtype == dtype
        difference = (have.cpu().double() - want).norm()
        assert difference <= tolerance * want.norm()


@pytest.mark.parametrize("way", [by_token, by_parts, by_own_parts])
@pytest.mark.parametrize("routing", ["spread", "alike", "absent"])
@pytest.mark.parametrize(("slots", "experts"), [(1, 1), (1, 4), (2, 4), (3, 16), (8, 8)])
def test_a_loop_over_tokens_gives_the_same(way, routing, slots, experts):
    given = values(slots, experts)
    ids = ids_of(routing, slots, experts)
    want = by_loop(*given, ids)
    got = way(*given, ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    seed = torch.randn_like(want)
    expected = torch.autograd.grad(want, given, seed, allow_unused=True)
    for grad, other, value in zip(torch.autograd.grad(got, given, seed), expected, given, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(value) if other is None else other, rtol=0, atol=1e-12)


def test_rows_of_an_expert_stay_in_order_and_others_come_last():
    order, counts = own.route_rows(torch.tensor([[2, 0], [0, 5], [-1, 2]], dtype=torch.int32), 3)
    assert order.tolist() == [1, 2, 0, 5, 3, 4]
    assert counts.tolist() == [2, 0, 2]
    order, counts = own_rows(torch.tensor([[2, 0], [0, 5], [-1, 2]]), 3)
    assert (order.tolist(), counts.tolist()) == ([1, 2, 0, 5], [2, 0, 2])


def test_no_tokens():
    x, ids = torch.zeros(0, 2, D, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64)
    w = torch.randn(3, D, F, requires_grad=True)
    dx, dw = torch.autograd.grad(own.expert_mm(x, w, ids).sum(), (x, w))
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(w))


def test_captures_with_symbolic_tokens_and_is_differentiated_once():
    def step(x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = own.expert_mm(x[:, None].expand(-1, 2, -1), w, ids)
        return out, *torch.autograd.grad(out.square().sum(), (x, w))

    def make(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, 4, (tokens, 2), generator=g)
        return torch.randn(tokens, D, generator=g), torch.randn(4, D, F, generator=g), ids

    graph = make_fx(step, tracing_mode="symbolic")(*make(6))
    for got, want in zip(graph(*make(11)), step(*make(11)), strict=True):
        torch.testing.assert_close(got, want)
    x, w, ids = make(6)
    out = own.expert_mm(x.requires_grad_()[:, None].expand(-1, 2, -1), w.requires_grad_(), ids)
    (dw,) = torch.autograd.grad(out.square().sum(), (w,), create_graph=True)
    with pytest.raises(UnsupportedOpError, match="second derivative"):
        dw.sum().backward()


@pytest.mark.parametrize(
    ("x", "w", "ids", "why"),
    [
        (torch.zeros(4, 2, 3), torch.zeros(2, 5, 3), torch.zeros(4, 2, dtype=torch.int64), "are not rows"),
        (torch.zeros(4, 2, 5), torch.zeros(2, 5, 3).double(), torch.zeros(4, 2, dtype=torch.int64), "one dtype"),
        (torch.zeros(4, 2, 5), torch.zeros(2, 5, 3), torch.zeros(4, 3, dtype=torch.int64), "one for each row"),
        (torch.zeros(4, 2, 5), torch.zeros(2, 5, 3), torch.zeros(4, 2), "torch.int64 or torch.int32"),
        (torch.zeros(4, 0, 5), torch.zeros(2, 5, 3), torch.zeros(4, 0, dtype=torch.int64), "choose no expert"),
    ],
)
def test_bad_operands(x, w, ids, why):
    with pytest.raises(OpInputError, match=why):
        own.expert_mm(x, w, ids)


@pytest.mark.parametrize(("slots", "weighted"), [(4, True), (4, False), (8, True)])
def test_sums_of_rows_that_are_here_have_the_bits_of_sums_over_all_slots(slots, weighted):
    ids = ids_of("absent", slots, 8)
    order, _ = own_rows(ids, 8)
    g = torch.Generator().manual_seed(2)
    rows, p = torch.randn(len(order), 33, generator=g), torch.randn(N, slots, generator=g)
    placed = own.place_rows(rows, order, ids)
    want = own.weighted_sum(placed, p) if weighted else placed.sum(1)
    assert torch.equal(own.combine(rows, p if weighted else None, order, ids), want)
