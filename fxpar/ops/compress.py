"""Rows of similar tokens reach their expert as one: LSH-MoE (Nie et al., arXiv 2411.08446, section 3).

    codes = hash_rows(x, ...)                            equal codes: rows that point the same way
    cluster, sizes, ids_of = cluster_rows(codes, ids, ...)
    means = cluster_mean(x, cluster, sizes)              what the experts see, with ids_of in place of ids
    y = cluster_restore(experts(means, ids_of), x, means, cluster, sizes)

A row of the result is what its expert makes of the mean of its cluster, and the row's own distance to that mean
(equation 5 there). With g the gradients of a cluster's rows, gbar their mean and J the expert's Jacobian at the mean, a
row's gradient is J^T gbar + g - gbar: the way back carries one row per cluster too.

How many clusters there are is a budget, of the sizes alone (`most_clusters`); which, is of the rows. Codes of several
hashes nest: a cluster is what agrees in the first hashes, and the largest are refined by their next hash, as long as
the budget lasts. Where it covers all rows each row is a cluster, and nothing is lost. Where rows agree in all hashes
there may be less clusters than the budget allows: the last ones are then of no expert (their id is -1), and zero.

With `places` the experts are in as many runs, and those of the run `rank` are near: their rows are clusters of one row
each, as far as the budget lasts that the share of the far rows leaves.

`pack_rows` writes a row in a byte per number and four of a scale (float8_e4m3fn, Micikevicius et al., arXiv
2209.05433), `unpack_rows` reads it.

Shapes: x [..., D] and ids [...] as in `fxpar.ops.experts`, [N, K, D] and [N, K] for K experts of N tokens, are M rows;
means are [C, 1, D] and ids_of [C, 1] then: a dim of size 1 for each but the first.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.attention_cpu import compute_dtype
from fxpar.ops.dropout import uniform_numbers
from fxpar.ops.once import refuse_second_derivative

MOST_CODES = 2**62  # experts times codes: both stand in one int64

_LIB = torch.library.Library("fxpar", "FRAGMENT")
for _schema in (
    "hash_rows(Tensor x, int hashes, int columns, int seed) -> Tensor",
    "cluster_rows(Tensor codes, Tensor ids, int experts, int buckets, int hashes, float rate, int least, "
    "int rank=0, int places=1) -> (Tensor cluster, Tensor sizes, Tensor ids_of)",
    "cluster_mean(Tensor x, Tensor cluster, Tensor sizes) -> Tensor",
    "cluster_mean_backward(Tensor dmeans, Tensor cluster, Tensor sizes) -> Tensor",
    "cluster_restore(Tensor made, Tensor x, Tensor means, Tensor cluster, Tensor sizes, float share=1.0) -> Tensor",
    "cluster_restore_backward(Tensor grad, Tensor cluster, Tensor sizes) -> Tensor",
    "pack_rows(Tensor rows) -> Tensor",
    "unpack_rows(Tensor packed, ScalarType dtype) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
own = torch.ops.fxpar


def most_clusters(rows: Any, rate: float, least: int, places: int = 1) -> Any:
    """The budget for so many rows: the share `rate`, rounded down, and at least `least` while there are as many rows.
    With `places` it is a share of the far rows, if routes are balanced, and all of the near ones.

    `rows` may be a SymInt.
    """
    share = budget_share(rate, places)
    return torch.sym_max(rows * share.numerator // share.denominator, torch.sym_min(rows, least))


def budget_share(rate: float, places: int) -> Fraction:
    """The share of rows that are clusters, where one of `places` has rows of its own."""
    share = Fraction(rate).limit_denominator(10**9)
    return share if places == 1 else share + (1 - share) / places


@functools.lru_cache(64)
def _planes(width: int, columns: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The random matrix [width, columns], the same for each seed on every machine."""
    return uniform_numbers(width * columns, seed).view(width, columns).to(device, dtype)


# ----------------------------------------------------------------------------------------------- which rows go together
def _hash(x: Tensor, hashes: int, columns: int, seed: int) -> Tensor:
    """The code [...] int64 of each row of x [..., D]. A hash is the axis of the largest of `columns` coordinates, and
    its sign (cross-polytope, Andoni et al., arXiv 1509.02897); coordinates are products with random vectors, those of
    all hashes from one matrix product. The first hash is the highest digit of the code, of 2 * columns values.
    """
    repeated = x.dim() > 2 and x.stride(-2) == 0  # tokens, for each of their experts
    tokens = x.select(-2, 0) if repeated else x
    planes = _planes(x.shape[-1], hashes * columns, seed, x.dtype, x.device)
    turned = (tokens @ planes).unflatten(-1, (hashes, columns))
    axis = turned.abs().argmax(-1, keepdim=True)
    digits = (2 * axis + (turned.gather(-1, axis) < 0)).squeeze(-1)
    codes = digits[..., 0]
    for i in range(1, hashes):
        codes = codes * (2 * columns) + digits[..., i]
    return codes.unsqueeze(-1).expand(x.shape[:-1]).contiguous() if repeated else codes.contiguous()


def _cluster(
    codes: Tensor,
    ids: Tensor,
    experts: int,
    buckets: int,
    hashes: int,
    rate: float,
    least: int,
    rank: int = 0,
    places: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the cluster of each row, like ids; rows per cluster [C]; the expert of each cluster), all int64. Rows of one
    cluster have one expert; clusters are numbered in the order of experts. There are `buckets` values per hash.
    """
    _check_budget(codes, ids, experts, buckets, hashes, rate, least)
    if places > 1 and (experts % places or least <= 2 * experts):
        raise OpInputError("cluster_rows", f"{places} places for {experts} experts, and {least} clusters, do not fit")
    M = ids.numel()
    C, flat = most_clusters(M, rate, least, places), ids.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    if C >= M:
        return torch.arange(M, device=ids.device).view(ids.shape), torch.ones_like(flat), _of_rank(flat, ids, experts)
    key, place = (flat * buckets**hashes + codes.reshape(-1)).sort(stable=True)
    parts = _parts(key, buckets, hashes)
    if places == 1:
        begins = _first(parts, C)
    else:
        far, share = key // buckets**hashes // (experts // places) != rank, budget_share(rate, 1)
        budget = (far.sum() * share.numerator // share.denominator).clamp(experts, C - experts // places)
        begins = _far_first(parts.where((parts > 0) | far, 1), far, C, budget)
    run = begins.cumsum(0) - 1
    ids_of = torch.full((C,), experts, device=ids.device).scatter_(0, run, key // buckets**hashes)
    cluster = torch.empty_like(run).scatter_(0, place, run)
    return cluster.view(ids.shape), _count(run, C), _of_rank(ids_of, ids, experts)


def _parts(key: Tensor, buckets: int, hashes: int) -> Tensor:
    """Of each of the sorted rows, how large a cluster it would part; 0 where it cannot begin one.

    A row may begin one where a digit changes; there it parts a cluster of the digits before. Those that part the
    largest ones come first. What a cluster is refined to is never larger than itself, so it is parted first.
    """
    parts = torch.zeros_like(key)
    known = torch.zeros_like(key, dtype=torch.bool)
    size: Any = len(key) + 1  # an expert's first row always begins one
    for level in range(hashes + 1):
        digits = key // buckets ** (hashes - level)
        changes = torch.ones_like(known)
        torch.ne(digits[1:], digits[:-1], out=changes[1:])
        parts = torch.where(changes & ~known, size, parts)
        run = changes.cumsum(0) - 1
        size, known = _count(run, len(key))[run], changes
    return parts


def _first(parts: Tensor, C: int) -> Tensor:
    """Which rows begin a cluster: C of them at most, those that part the largest."""
    first = parts.argsort(descending=True, stable=True)[:C]
    return torch.zeros_like(parts, dtype=torch.bool).scatter_(0, first, parts[first] > 0)


def _far_first(parts: Tensor, far: Tensor, C: int, budget: Tensor) -> Tensor:
    """As `_first`, with a budget of their own for far rows, and what these leave for the near ones."""
    place = parts.argsort(descending=True, stable=True)
    away, can = far[place], parts[place] > 0
    taken = away & can & (away.cumsum(0) <= budget)
    taken |= ~away & can & ((~away).cumsum(0) <= C - taken.sum())
    return torch.zeros_like(far).scatter_(0, place, taken)


def _count(run: Tensor, count: int) -> Tensor:
    return run.new_zeros(count).scatter_add_(0, run, torch.ones_like(run))


def _of_rank(ids_of: Tensor, ids: Tensor, experts: int) -> Tensor:
    """With a dim of size 1 for each of ids but the first; -1 for no expert."""
    return ids_of.masked_fill(ids_of == experts, -1).view(-1, *(1,) * (ids.dim() - 1))


# ------------------------------------------------------------------------------------------------------ means, and back
def _sum(x: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    """The sums [C, 1, D] of the rows [N, K, D] of each cluster, in fp32 or wider and in a fixed order."""
    wide, shape = compute_dtype(x.dtype), (sizes.shape[0], *(1,) * (x.dim() - 2), x.shape[-1])
    if x.device.type != "cpu":
        rows = x.reshape(-1, x.shape[-1])[cluster.reshape(-1).argsort(stable=True)]
        return torch.segment_reduce(rows.to(wide), "sum", lengths=sizes, unsafe=True).view(shape)
    out = torch.zeros(shape[0], shape[-1], dtype=wide)
    slots = zip(x.unbind(-2), cluster.unbind(-1), strict=True) if x.dim() > 2 else [(x, cluster)]
    for rows, where in slots:  # tokens that are repeated for their experts are not copied
        out.index_add_(0, where.reshape(-1), rows.reshape(-1, shape[-1]).to(wide))
    return out.view(shape)


def _per_row(means: Tensor, cluster: Tensor) -> Tensor:
    """[C, 1, D] -> [N, K, D]: that of each row's cluster."""
    return means.view(means.shape[0], -1).index_select(0, cluster.reshape(-1)).view(*cluster.shape, means.shape[-1])


def _over(sums: Tensor, sizes: Tensor) -> Tensor:
    return sums / sizes.clamp(min=1).to(sums.dtype).view(-1, *(1,) * (sums.dim() - 1))


def _mean(x: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    """The mean [C, 1, D] of the rows of each cluster; zero for one without rows."""
    _check_rows("cluster_mean", x, cluster)
    return _over(_sum(x, cluster, sizes), sizes).to(x.dtype)


def _mean_backward(dmeans: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    return _per_row(_over(dmeans, sizes), cluster)


def _restore(made: Tensor, x: Tensor, means: Tensor, cluster: Tensor, sizes: Tensor, share: float = 1.0) -> Tensor:
    """`made` [C, 1, D] for each row of x [N, K, D], and `share` of how far the row is from the mean of its cluster. A
    rank whose result is one of several terms of a sum takes a part of the distance.
    """
    _check_rows("cluster_restore", x, cluster)
    if made.shape != means.shape or made.shape[-1] != x.shape[-1]:
        raise OpInputError(
            "cluster_restore",
            f"made {tuple(made.shape)} and means {tuple(means.shape)} are not [C, ..., {x.shape[-1]}]",
        )
    apart = x.sub(_per_row(means, cluster))
    return (apart if share == 1.0 else apart.mul_(share)).add_(_per_row(made, cluster))


def _restore_backward(grad: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    """The gradient of `made`; that of the rows is `share` of `grad` itself, and of the means of minus this."""
    return _sum(grad, cluster, sizes).to(grad.dtype)


# ------------------------------------------------------------------------------------------------------- rows in bytes
_FP8, _SCALE_BYTES = torch.float8_e4m3fn, 4


def _pack(rows: Tensor) -> Tensor:
    """[..., D] -> uint8 [..., D + 4]. The largest number of a row is the largest of the format; zeros stay zeros."""
    if not rows.numel():  # a rank whose experts nobody chose
        return rows.new_empty(*rows.shape[:-1], rows.shape[-1] + _SCALE_BYTES, dtype=torch.uint8)
    scale = rows.abs().amax(-1, keepdim=True).float() / torch.finfo(_FP8).max
    small = (rows.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).to(_FP8)
    return torch.cat([small.view(torch.uint8), scale.view(torch.uint8)], -1)


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., D + 4] -> [..., D]."""
    small, scale = packed[..., :-_SCALE_BYTES], packed[..., -_SCALE_BYTES:]
    scale = scale.clone(memory_format=torch.contiguous_format)  # of one row it may begin at any byte
    return (small.view(_FP8).float() * scale.view(torch.float32)).to(dtype)


# ---------------------------------------------------------------------------------------------------- what does not fit
def _check_budget(codes: Tensor, ids: Tensor, experts: int, buckets: int, hashes: int, rate: float, least: int) -> None:
    if codes.shape != ids.shape:
        raise OpInputError("cluster_rows", f"codes {tuple(codes.shape)} are not one for each of ids {tuple(ids.shape)}")
    if not 0 < rate <= 1 or least <= experts:
        raise OpInputError("cluster_rows", f"{rate} of the rows, and {least} for {experts} experts, is not a budget")
    if (experts + 1) * buckets**hashes > MOST_CODES:
        why = f"{buckets} values of each of {hashes} hashes and {experts} experts are more than 2**62 codes"
        raise OpInputError("cluster_rows", why)


def _check_rows(op: str, x: Tensor, cluster: Tensor) -> None:
    if x.dim() < 2 or cluster.shape != x.shape[:-1]:
        raise OpInputError(op, f"cluster {tuple(cluster.shape)} is not one for each row of x {tuple(x.shape)}")


# ------------------------------------------------------------------------------------------------ shapes, and gradients
def _cluster_fake(
    codes: Tensor,
    ids: Tensor,
    experts: int,
    buckets: int,
    hashes: int,
    rate: float,
    least: int,
    rank: int = 0,
    places: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    C = most_clusters(ids.numel(), rate, least, places)
    cluster, ids_of = torch.empty_like(ids, dtype=torch.int64), ids.new_empty(C, *(1,) * (ids.dim() - 1)).long()
    return cluster, ids_of.new_empty(C), ids_of


def _of_clusters(x: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty(sizes.shape[0], *(1,) * (x.dim() - 2), x.shape[-1])


def _setup_mean(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _mean_grad(ctx: Any, dmeans: Tensor) -> tuple[Tensor, None, None]:
    return own.cluster_mean_backward.default(dmeans, *ctx.saved_tensors), None, None


def _setup_restore(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[3:5])
    ctx.share = inputs[5]


def _restore_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    dmade = own.cluster_restore_backward.default(grad, *ctx.saved_tensors)
    return dmade, grad * ctx.share, dmade * -ctx.share, None, None, None


for _name, _kernel, _fake in (
    ("hash_rows", _hash, lambda x, *_: x.new_empty(x.shape[:-1], dtype=torch.int64)),
    ("cluster_rows", _cluster, _cluster_fake),
    ("cluster_mean", _mean, _of_clusters),
    ("cluster_mean_backward", _mean_backward, lambda d, cluster, _: d.new_empty(*cluster.shape, d.shape[-1])),
    ("cluster_restore", _restore, lambda made, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ("cluster_restore_backward", _restore_backward, _of_clusters),
    ("pack_rows", _pack, lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] + _SCALE_BYTES, dtype=torch.uint8)),
    ("unpack_rows", _unpack, lambda x, dtype: x.new_empty(*x.shape[:-1], x.shape[-1] - _SCALE_BYTES, dtype=dtype)),
):
    for _device in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _device)
    torch.library.register_fake(f"fxpar::{_name}", _fake, lib=_LIB)
for _name, _grad, _context in (
    ("cluster_mean", _mean_grad, _setup_mean),
    ("cluster_restore", _restore_grad, _setup_restore),
):
    torch.library.register_autograd(f"fxpar::{_name}", _grad, setup_context=_context, lib=_LIB)
    refuse_second_derivative(_LIB, f"fxpar::{_name}_backward", "compressed rows", "Leave lsh out of the strategy.")
