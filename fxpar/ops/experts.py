"""`fxpar::expert_mm`: each token's rows times the weights of the experts that the router chose; and the same in parts.

A router gives each of N tokens K experts: `ids` [N, K], integers. The logical graph keeps rows in the order of tokens,
x [N, K, D]: so a cut of the tokens is an ordinary slice, and all between two products (activation, gate, bias by
`fxpar::embedding` of the ids, the weighted sum over K) is plain code. `expert_mm` sorts rows by expert inside.

The other ops are its parts, for programs that sort once for several products, or send rows to other ranks:

    route_rows   ids [N, K] -> order [N * K], counts [E]: the pairs n * K + k, by expert, and within one in order
    dispatch     tokens [N, D] -> rows [N * K, D]: row i is token order[i] // K. With K = 1, tokens are rows themselves
    grouped_mm   rows [M, D] by expert -> [M, F]: the first counts[0] rows times weight[0], and so on
    combine      rows [N * K, D] -> tokens [N, D]: the weighted sum over k, in the order of k

An id below 0, or not below the number of experts, is none of the experts here: it counts nowhere, its rows come last,
and their products are zeros. So a rank may hold some of the experts, and an expert no row: its gradient is zeros.
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
    "route_rows(Tensor ids, int experts) -> (Tensor order, Tensor counts)",
    "dispatch(Tensor tokens, Tensor order, int slots) -> Tensor",
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    "grouped_mm_backward(Tensor grad, Tensor rows, Tensor counts) -> Tensor",
    "combine(Tensor rows, Tensor? weights, Tensor order, int slots) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
own = torch.ops.fxpar


# ------------------------------------------------------------------------------------ the parts, rows by expert
def _route_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    return torch.sort(flat, stable=True)[1], torch.bincount(flat, minlength=experts + 1)[:experts]


def _dispatch(tokens: Tensor, order: Tensor, slots: int) -> Tensor:
    return tokens.index_select(0, order if slots == 1 else order // slots)


def _put(rows: Tensor, order: Tensor) -> Tensor:
    """[M, ...] by expert -> in the order of tokens: place order[i] has row i."""
    return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)


def _combine(rows: Tensor, weights: Tensor | None, order: Tensor, slots: int) -> Tensor:
    placed = _put(rows, order)
    if weights is None and slots == 1:
        return placed
    placed = placed.view(-1, slots, rows.shape[1])
    return (placed if weights is None else placed * weights[..., None]).sum(1)


def _spans(counts: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, row after its last) of each expert that has rows."""
    found, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """In a loop, where there is no kernel for it: on the CPU, and in float64."""
    _check("grouped_mm", rows, weight)
    if rows.is_cuda and rows.dtype != torch.float64:
        ends = counts.cumsum(0)
        out = F.grouped_mm(rows, weight, offs=ends.int())
        return out.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1])[:, None], 0.0)
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert, start, end in _spans(counts):
        torch.mm(rows[start:end], weight[expert], out=out[start:end])
    return out


def _grouped_mm_backward(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """dweight [E, D, F] of grad [M, F] and rows [M, D]."""
    if rows.is_cuda and rows.dtype != torch.float64:
        out = F.grouped_mm(rows.t(), grad, offs=counts.cumsum(0).int())
        return out.masked_fill_((counts == 0)[:, None, None], 0.0)
    out = rows.new_zeros(counts.shape[0], rows.shape[1], grad.shape[1])
    for expert, start, end in _spans(counts):
        torch.mm(rows[start:end].t(), grad[start:end], out=out[expert])
    return out


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 3 or x.dim() == 0 or _differ(x.shape[-1], weight.shape[1]) or x.dtype != weight.dtype:
        given = f"{tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype}"
        raise OpInputError(op, f"{given} are not rows [..., D] and [E, D, F] of one dtype")


def _check_ids(op: str, x: Tensor, ids: Tensor) -> None:
    if ids.dim() != x.dim() - 1 or any(_differ(a, b) for a, b in zip(ids.shape, x.shape, strict=False)):
        raise OpInputError(op, f"ids {tuple(ids.shape)} are not one for each row of {tuple(x.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise OpInputError(op, f"ids are {ids.dtype}; give torch.int64 or torch.int32")


def _differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ. Comparing a symbolic one would guard the graph."""
    return isinstance(a, int) and isinstance(b, int) and a != b


# ------------------------------------------------------------------------------------ rows in the order of tokens
def _by_expert(x: Tensor, order: Tensor) -> Tensor:
    """x [..., D] -> [M, D] in this order; tokens that are only repeated for their slots are not copied before."""
    slots = x.shape[-2] if x.dim() > 2 and x.stride(-2) == 0 else 1
    tokens = x.select(-2, 0) if slots > 1 else x
    return _dispatch(tokens.reshape(-1, x.shape[-1]), order, slots)


def _expert_mm(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    _check("expert_mm", x, weight)
    _check_ids("expert_mm", x, ids)
    order, counts = _route_rows(ids, weight.shape[0])
    made = _grouped_mm(_by_expert(x, order), weight, counts)
    return _put(made, order).view(*x.shape[:-1], weight.shape[2])


def _expert_mm_backward(grad: Tensor, x: Tensor, ids: Tensor, experts: int) -> Tensor:
    """dweight [E, D, F] of grad [..., F] and x [..., D]."""
    order, counts = _route_rows(ids, experts)
    return _grouped_mm_backward(_by_expert(grad, order), _by_expert(x, order), counts)


# ------------------------------------------------------------------------------------ shapes, and gradients
def _expert_mm_fake(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    _check("expert_mm", x, weight)
    _check_ids("expert_mm", x, ids)
    return x.new_empty(*x.shape[:-1], weight.shape[2])


def _route_rows_fake(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.numel(), dtype=torch.int64), ids.new_empty(experts, dtype=torch.int64)


def _grouped_mm_fake(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    _check("grouped_mm", rows, weight)
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _expert_mm_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ids = ctx.saved_tensors
    dx = own.expert_mm.default(grad, weight.transpose(1, 2), ids) if ctx.needs_input_grad[0] else None
    wanted = ctx.needs_input_grad[1]
    return dx, own.expert_mm_backward.default(grad, x, ids, weight.shape[0]) if wanted else None, None


def _grouped_mm_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, counts = ctx.saved_tensors
    dweight = own.grouped_mm_backward.default(grad, rows, counts)
    return own.grouped_mm.default(grad, weight.transpose(1, 2), counts), dweight, None


def _dispatch_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return own.combine.default(grad, None, *ctx.saved_tensors, ctx.slots), None, None


def _combine_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    rows, weights, order = ctx.saved_tensors
    spread = own.dispatch.default(grad, order, ctx.slots)
    if weights is None:
        return spread, None, None, None
    scale = weights.reshape(-1, 1).index_select(0, order)
    dweights = own.combine.default((rows * spread).sum(1, keepdim=True), None, order, 1).view_as(weights)
    return spread * scale, dweights, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(i for i in inputs if not isinstance(i, int)))
    ctx.slots = inputs[-1]


def _save_order(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.slots = inputs[2]


for _name, _kernel, _fake in (
    ("expert_mm", _expert_mm, _expert_mm_fake),
    ("expert_mm_backward", _expert_mm_backward, lambda g, x, ids, E: x.new_empty(E, x.shape[-1], g.shape[-1])),
    ("route_rows", _route_rows, _route_rows_fake),
    ("dispatch", _dispatch, lambda tokens, order, K: tokens.new_empty(order.shape[0], tokens.shape[1])),
    ("grouped_mm", _grouped_mm, _grouped_mm_fake),
    (
        "grouped_mm_backward",
        _grouped_mm_backward,
        lambda g, x, counts: x.new_empty(len(counts), *x.shape[1:], g.shape[1]),
    ),
    ("combine", _combine, lambda rows, w, order, K: rows.new_empty(rows.shape[0] // K, rows.shape[1])),
):
    for _device in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _device)
    torch.library.register_fake(f"fxpar::{_name}", _fake, lib=_LIB)
for _name, _grad, _context in (
    ("expert_mm", _expert_mm_grad, _save),
    ("dispatch", _dispatch_grad, _save_order),
    ("grouped_mm", _grouped_mm_grad, _save),
    ("combine", _combine_grad, _save),
):
    torch.library.register_autograd(f"fxpar::{_name}", _grad, setup_context=_context, lib=_LIB)
for _name in ("expert_mm_backward", "grouped_mm_backward"):
    refuse_second_derivative(_LIB, f"fxpar::{_name}", "experts' products", "Write the experts out, each on all tokens.")
