"""Tokens on their way to the ranks that have their experts, and back: local tensors, and one exchange of rows.

R ranks have E / R experts each, rank r those from r * E / R on. Of a token one *copy* goes to each rank that has one of
its K experts, so a token with three experts on a rank goes there once. How many copies there are is known at run time:

    copies      ids [N, K] -> tokens [U]: the token of each copy, by rank; sent [R]: copies to each rank
    exchange    rows [U, ...] -> [V, ...]: `sent` of them to each rank, `received` from each
    own_ids     ids [V, K] -> the same with -1 for experts of other ranks
    own_rows    such ids -> order [M], counts [E]: as `fxpar::route_rows`, of the pairs alone that have an expert here
    sum_copies  rows [U, ...] -> [N, ...]: the sum over a token's copies, in the order of ranks

Before all that, `within_capacity` may leave pairs of a token and an expert out that are too many for the expert.

In the mean over all routes a token has `mean_copies` of them; at most it has min(K, R).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def mean_copies(slots: int, experts: int, ranks: int) -> Fraction:
    """Ranks that have one of a token's `slots` different experts, in the mean over all choices of them."""
    others = experts - experts // ranks
    return ranks * (1 - Fraction(math.comb(others, slots), math.comb(experts, slots)))


def copies(ids: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """ids [N, K] -> (tokens [U], sent [R]), both int64. An id that is none of the experts goes nowhere."""
    to = torch.where((ids >= 0) & (ids < experts), ids // (experts // ranks), ranks)
    hit = torch.zeros(ids.shape[0], ranks + 1, dtype=torch.bool, device=ids.device).scatter_(1, to.long(), True)
    hit = hit[:, :ranks]
    return hit.t().nonzero()[:, 1], hit.sum(0)


def exchange(rows: Tensor, sent: Tensor, received: Tensor, group: str) -> Tensor:
    """Rows from each rank in turn, not waited for."""
    given, got = torch.stack([sent, received]).tolist()
    return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), got, given, group)


def own_ids(ids: Tensor, experts: int, index: int, numbered: bool) -> Tensor:
    """With -1 for experts of other ranks than `index`, which has `experts`; `numbered`: its own count from 0."""
    own = ids - index * experts
    here = (own >= 0) & (own < experts)
    return torch.where(here, own if numbered else ids, -1)


def within_capacity(ids: Tensor, experts: int, capacity: float) -> tuple[Tensor, Tensor]:
    """ids [N, K] -> the same with -1 for all but the first ceil(capacity * N * K / experts) of each expert, in the
    order of tokens and their slots; and how many there were of each, int64 [experts].
    """
    order, counts = torch.ops.fxpar.route_rows.default(ids, experts)
    by_expert = ids.reshape(-1).index_select(0, order)
    first = (counts.cumsum(0) - counts).index_select(0, by_expert.clamp(0, experts - 1))
    place = torch.arange(ids.numel(), device=ids.device) - first
    kept = torch.where(place < math.ceil(capacity * ids.numel() / experts), by_expert, -1)
    return torch.empty_like(by_expert).index_copy_(0, order, kept).view(ids.shape), counts


def own_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """ids [V, K], numbered from 0 -> (order [M], counts [experts]), both int64. Waits for the counts."""
    order, counts = torch.ops.fxpar.route_rows.default(ids, experts)
    return order[: int(counts.sum())], counts


def sum_copies(rows: Tensor, tokens: Tensor, sent: Tensor, ids: Tensor) -> Tensor:
    """rows [U, ...] -> [N, ...] for ids [N, K]. Terms of less than 32 bits are added up in float32."""
    dtype = torch.float32 if rows.dtype.is_floating_point and rows.dtype.itemsize < 4 else rows.dtype
    out = torch.zeros(ids.shape[0], *rows.shape[1:], dtype=dtype, device=rows.device)
    parts = sent.tolist()
    for of_rank, terms in zip(tokens.split(parts), rows.split(parts), strict=True):
        out.index_add_(0, of_rank, terms.to(dtype))  # no token twice, so that the order is fixed on every device
    return out.to(rows.dtype)
