"""Experts: products of each token's rows with the weights of the experts that a router chose, and the sum of them.

A router gives each of N tokens K experts, `ids` [N, K], and K weights. A captured graph keeps rows in the order of
tokens, [N, K, D]: so a cut of the tokens is an ordinary slice, and all between two products (activation, gate, bias by
`fxpar::embedding` of the ids) is plain code.

    expert_mm      x [N, K, D], weight [E, D, F], ids [N, K] -> [N, K, F]: each row times the weight of its expert
    weighted_sum   rows [N, K, D], weights [N, K] -> [N, D]: over the slots of a token, in their order

The others are parts of these, for programs that sort rows by expert once, or send them to other ranks:

    route_rows   ids [N, K] -> order [N * K], counts [E]: the pairs n * K + k, by expert, and within one in order
    dispatch     tokens [N, D] or rows of tokens [N, K, D] -> rows by expert [M, D]: the pairs in this order
    place_rows   rows by expert [M, D] -> rows of tokens [N, K, D], the way back; zeros for pairs that are not in order
    grouped_mm   rows by expert [M, D] -> [M, F]: the first counts[0] rows times weight[0], and so on
    combine      rows by expert [M, D] -> tokens [N, D]: their weighted sum; without weights, their sum

An id below 0, or not below the number of experts, is none of the experts here: it counts nowhere, its rows come last,
and their products are zeros. So a rank may hold some of the experts, and an expert no row: its gradient is zeros. An
order may leave such pairs out (M < N * K, `fxpar.ops.copies.own_rows`): they are zeros for all that follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.once import refuse_second_derivative

_LIB = torch.library.Library("fxpar", "FRAGMENT")
for _schema in (
    "expert_mm(Tensor x, Tensor weight, Tensor ids) -> Tensor",
    "expert_mm_backward(Tensor grad, Tensor x, Tensor ids, int experts) -> Tensor",
    "weighted_sum(Tensor rows, Tensor weights) -> Tensor",
    "weighted_sum_backward(Tensor grad, Tensor rows, Tensor weights) -> (Tensor drows, Tensor dweights)",
    "route_rows(Tensor ids, int experts) -> (Tensor order, Tensor counts)",
    "dispatch(Tensor tokens, Tensor order, Tensor ids) -> Tensor",
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    "grouped_mm_backward(Tensor grad, Tensor rows, Tensor counts) -> Tensor",
    "place_rows(Tensor rows, Tensor order, Tensor ids) -> Tensor",
    "combine(Tensor rows, Tensor? weights, Tensor order, Tensor ids) -> Tensor",
    "combine_backward(Tensor grad, Tensor rows, Tensor weights, Tensor order) -> (Tensor drows, Tensor dweights)",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
own = torch.ops.fxpar


# ------------------------------------------------------------------------------------ the parts, rows by expert
def _route_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    return torch.sort(flat, stable=True)[1], torch.bincount(flat, minlength=experts + 1)[:experts]


def _dispatch(tokens: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    if tokens.dim() == 2:
        return tokens.index_select(0, order if ids.shape[1] == 1 else order // ids.shape[1])
    if tokens.stride(1) == 0:  # tokens that are only repeated for their slots are not copied before
        return _dispatch(tokens[:, 0], order, ids)
    return tokens.reshape(-1, tokens.shape[-1]).index_select(0, order)


def _place_rows(rows: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    make = rows.new_empty if len(order) == ids.numel() else rows.new_zeros
    return make(ids.numel(), rows.shape[1]).index_copy_(0, order, rows).view(*ids.shape, rows.shape[1])


def _combine(rows: Tensor, weights: Tensor | None, order: Tensor, ids: Tensor) -> Tensor:
    if rows.device.type == "cpu" and (weights is not None or ids.shape[1] <= 4):  # of more ATen sums groups of four
        return _added_up(rows, weights, order, ids)
    placed = _place_rows(rows, order, ids)
    return placed.sum(1) if weights is None else _weighted_sum(placed, weights)


def _added_up(rows: Tensor, weights: Tensor | None, order: Tensor, ids: Tensor) -> Tensor:
    """On a CPU `index_add_` goes from row to row, so rows in the order of tokens and slots give the bits of a sum slot
    after slot; none is made for pairs that are not in order.
    """
    pairs, place = torch.sort(order)
    terms = rows.index_select(0, place).to(_wide(rows, rows if weights is None else weights))
    if weights is not None:
        terms.mul_(weights.reshape(-1, 1).index_select(0, pairs))
    total = terms.new_zeros(ids.shape[0], rows.shape[1])
    return total.index_add_(0, pairs // ids.shape[1], terms).to(rows.dtype)


def _combine_backward(grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    wide = _wide(rows, weights)
    spread, by_row = _dispatch(grad, order, weights), weights.reshape(-1, 1).index_select(0, order)
    dweights = (spread.to(wide) * rows).sum(1, keepdim=True).to(weights.dtype)
    drows = spread.mul_(by_row) if spread.dtype == by_row.dtype else spread * by_row
    return drows.to(rows.dtype), _place_rows(dweights, order, weights).squeeze(2)


def _wide(rows: Tensor, weights: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Slot after slot, so that no third tensor of all rows is made."""
    total = rows.new_zeros(rows.shape[0], rows.shape[2], dtype=_wide(rows, weights))
    for slot in range(rows.shape[1]):
        total += rows[:, slot].to(total.dtype) * weights[:, slot, None]
    return total.to(rows.dtype)


def _weighted_sum_backward(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    wide = _wide(rows, weights)
    for slot in range(rows.shape[1]):
        drows[:, slot] = grad * weights[:, slot, None]
        dweights[:, slot] = (grad.to(wide) * rows[:, slot]).sum(1)
    return drows, dweights


def _spans(counts: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, row after its last) of each expert that has rows."""
    found, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes them: it copies matrices by 16 bytes, and knows no float64."""
    return all(x.is_cuda and x.dtype != torch.float64 and x.numel() and _is_aligned(x) for x in operands)


def _is_aligned(x: Tensor) -> bool:
    inner, outer = sorted(x.stride()[-2:])
    step = 16 // x.itemsize
    return inner == 1 and x.data_ptr() % 16 == 0 and not any(n % step for n in (outer, *x.stride()[:-2]))


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """In a loop, where there is no kernel for it."""
    _check("grouped_mm", rows, weight, 2)
    if _has_kernel(rows, weight) and not weight.shape[2] * weight.itemsize % 16:
        ends = counts.cumsum(0)
        out = F.grouped_mm(rows, weight, offs=ends.int())
        return out.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1])[:, None], 0.0)
    out, end = rows.new_empty(rows.shape[0], weight.shape[2]), 0
    for expert, start, end in _spans(counts):
        torch.mm(rows[start:end], weight[expert], out=out[start:end])
    out[end:] = 0.0
    return out


def _grouped_mm_backward(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """dweight [E, D, F] of grad [M, F] and rows [M, D]."""
    if _has_kernel(grad, rows):
        out = F.grouped_mm(rows.t(), grad, offs=counts.cumsum(0).int())
        return out.masked_fill_((counts == 0)[:, None, None], 0.0)
    spans = _spans(counts)
    make = rows.new_empty if len(spans) == len(counts) else rows.new_zeros
    out = make(counts.shape[0], rows.shape[1], grad.shape[1])
    for expert, start, end in spans:
        torch.mm(rows[start:end].t(), grad[start:end], out=out[expert])
    return out


def _check(op: str, x: Tensor, weight: Tensor, rank: int) -> None:
    if weight.dim() != 3 or x.dim() != rank or _differ(x.shape[-1], weight.shape[1]) or x.dtype != weight.dtype:
        given = f"{tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype}"
        raise OpInputError(op, f"{given} are not rows [..., D] and [E, D, F] of one dtype")


def _check_ids(op: str, x: Tensor, ids: Tensor) -> None:
    if ids.dim() != x.dim() - 1 or any(_differ(a, b) for a, b in zip(ids.shape, x.shape, strict=False)):
        raise OpInputError(op, f"ids {tuple(ids.shape)} are not one for each row of {tuple(x.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise OpInputError(op, f"ids are {ids.dtype}; give torch.int64 or torch.int32")
    if isinstance(ids.shape[-1], int) and ids.shape[-1] < 1:
        raise OpInputError(op, f"ids {tuple(ids.shape)} choose no expert for a token; give [N, K] with K of 1 at least")


def _differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ. Comparing a symbolic one would guard the graph."""
    return isinstance(a, int) and isinstance(b, int) and a != b


# ------------------------------------------------------------------------------------ rows in the order of tokens
def _expert_mm(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    _check("expert_mm", x, weight, 3)
    _check_ids("expert_mm", x, ids)
    order, counts = _route_rows(ids, weight.shape[0])
    return _place_rows(_grouped_mm(_dispatch(x, order, ids), weight, counts), order, ids)


def _expert_mm_backward(grad: Tensor, x: Tensor, ids: Tensor, experts: int) -> Tensor:
    """dweight [E, D, F] of grad [N, K, F] and x [N, K, D]."""
    order, counts = _route_rows(ids, experts)
    return _grouped_mm_backward(_dispatch(grad, order, ids), _dispatch(x, order, ids), counts)


# ------------------------------------------------------------------------------------ shapes, and gradients
def _expert_mm_fake(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    _check("expert_mm", x, weight, 3)
    _check_ids("expert_mm", x, ids)
    return x.new_empty(*x.shape[:-1], weight.shape[2])


def _weighted_sum_fake(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.dim() != 3 or weights.dim() != 2 or any(map(_differ, rows.shape, weights.shape)):
        given = f"rows {tuple(rows.shape)} and weights {tuple(weights.shape)}"
        raise OpInputError("weighted_sum", f"{given} are not [N, K, D] and [N, K]")
    return rows.new_empty(rows.shape[0], rows.shape[2])


def _route_rows_fake(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.numel(), dtype=torch.int64), ids.new_empty(experts, dtype=torch.int64)


def _grouped_mm_fake(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    _check("grouped_mm", rows, weight, 2)
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _expert_mm_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ids = ctx.saved_tensors
    dx = own.expert_mm.default(grad, weight.transpose(1, 2), ids) if ctx.needs_input_grad[0] else None
    wanted = ctx.needs_input_grad[1]
    return dx, own.expert_mm_backward.default(grad, x, ids, weight.shape[0]) if wanted else None, None


def _weighted_sum_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return own.weighted_sum_backward.default(grad, *ctx.saved_tensors)


def _grouped_mm_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, counts = ctx.saved_tensors
    dweight = own.grouped_mm_backward.default(grad, rows, counts)
    return own.grouped_mm.default(grad, weight.transpose(1, 2), counts), dweight, None


def _dispatch_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    back = own.place_rows.default(grad, *ctx.saved_tensors)
    return back if ctx.tokens else back.sum(1), None, None


def _combine_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    rows, weights, order, ids = ctx.saved_tensors
    if weights is None:
        return own.dispatch.default(grad, order, ids), None, None, None
    return *own.combine_backward.default(grad, rows, weights, order), None, None


def _place_rows_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own.dispatch.default(grad, *ctx.saved_tensors), None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.tokens = inputs[0].dim() == 3


for _name, _kernel, _fake in (
    ("expert_mm", _expert_mm, _expert_mm_fake),
    ("expert_mm_backward", _expert_mm_backward, lambda g, x, ids, E: x.new_empty(E, x.shape[-1], g.shape[-1])),
    ("weighted_sum", _weighted_sum, _weighted_sum_fake),
    (
        "weighted_sum_backward",
        _weighted_sum_backward,
        lambda g, rows, weights: (torch.empty_like(rows), torch.empty_like(weights)),
    ),
    ("route_rows", _route_rows, _route_rows_fake),
    ("dispatch", _dispatch, lambda tokens, order, ids: tokens.new_empty(order.shape[0], tokens.shape[-1])),
    ("grouped_mm", _grouped_mm, _grouped_mm_fake),
    (
        "grouped_mm_backward",
        _grouped_mm_backward,
        lambda g, x, counts: x.new_empty(len(counts), *x.shape[1:], g.shape[1]),
    ),
    ("place_rows", _place_rows, lambda rows, order, ids: rows.new_empty(*ids.shape, rows.shape[1])),
    (
        "combine_backward",
        _combine_backward,
        lambda grad, rows, weights, order: (torch.empty_like(rows), torch.empty_like(weights)),
    ),
    ("combine", _combine, lambda rows, w, order, ids: rows.new_empty(ids.shape[0], rows.shape[1])),
):
    for _device in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _device)
    torch.library.register_fake(f"fxpar::{_name}", _fake, lib=_LIB)
for _name, _grad, _context in (
    ("expert_mm", _expert_mm_grad, _save),
    ("weighted_sum", _weighted_sum_grad, _save),
    ("dispatch", _dispatch_grad, _save_order),
    ("place_rows", _place_rows_grad, _save_order),
    ("grouped_mm", _grouped_mm_grad, _save),
    ("combine", _combine_grad, _save),
):
    torch.library.register_autograd(f"fxpar::{_name}", _grad, setup_context=_context, lib=_LIB)
for _name in ("expert_mm_backward", "weighted_sum_backward", "grouped_mm_backward", "combine_backward"):
    refuse_second_derivative(_LIB, f"fxpar::{_name}", "experts' products", "Write the experts out, each on all tokens.")
