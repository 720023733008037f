"""`fxpar::embedding`: look up rows in a slice of the vocabulary; other ids give zeros.

The sum over ranks of the results is the lookup in the whole table, and each rank's gradient is the
gradient of its own rows. `row_ids` [V] says which rows those are: 1 + vocabulary index, ascending,
and 0 for padding rows, which come last and are never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.errors import OpInputError
from fxpar.ops.once import refuse_second_derivative

_LIB = torch.library.Library("fxpar", "FRAGMENT")
_LIB.define(
    "embedding(Tensor weight, Tensor ids, Tensor row_ids) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIB.define(
    "embedding_backward(Tensor grad, Tensor ids, Tensor row_ids, int padding_idx) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _locate(ids: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The local row of each id, and whether it has one; None if all have.

    V > 0. Where an id has no local row, its row may be any number.
    """
    V = row_ids.shape[0]
    if ids.device.type == "cpu":  # looking at the data is free here, and mostly saves the search
        first, last = int(row_ids[0]), int(row_ids[-1])
        if first > 0 and last - first + 1 == V:
            row = ids if first == 1 else ids - (first - 1)
            if row.numel() == 0:
                return row, None
            low, high = torch.aminmax(row)
            inside = int(low) >= 0 and int(high) < V
            return row, None if inside else (row >= 0) & (row < V)
    ascending = row_ids.masked_fill(row_ids == 0, torch.iinfo(torch.int64).max)
    row = torch.searchsorted(ascending, ids + 1).clamp_(max=V - 1)
    return row, ascending[row] == ids + 1


def _check(weight: Tensor, ids: Tensor, row_ids: Tensor) -> None:
    if weight.dim() != 2 or row_ids.shape != weight.shape[:1]:
        raise OpInputError(
            "embedding",
            f"weight {tuple(weight.shape)} and row_ids {tuple(row_ids.shape)} are not [V, D], [V]",
        )
    if ids.dtype not in (torch.int64, torch.int32):
        # A search would find rows for others too, so that of several ranks only some would fail.
        raise OpInputError("embedding", f"ids are {ids.dtype}; give torch.int64 or torch.int32")


def _forward(weight: Tensor, ids: Tensor, row_ids: Tensor) -> Tensor:
    _check(weight, ids, row_ids)
    if weight.shape[0] == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1])
    row, here = _locate(ids, row_ids)
    if here is None:
        return torch.ops.aten.embedding.default(weight, row)
    away = ~here
    out = torch.ops.aten.embedding.default(weight, row.masked_fill(away, 0))
    return out.masked_fill_(away[..., None], 0.0)


def _backward(grad: Tensor, ids: Tensor, row_ids: Tensor, padding_idx: int) -> Tensor:
    V = row_ids.shape[0]
    if V == 0 or ids.numel() == 0:
        return grad.new_zeros(V, grad.shape[-1])
    row, here = _locate(ids, row_ids)
    if here is not None or padding_idx >= 0:
        # V is no row: naming it as the padding index makes ATen pass over what is mapped to it.
        away = ids == padding_idx if here is None else ~here | (ids == padding_idx)
        row = row.masked_fill(away, V)
    return torch.ops.aten.embedding_dense_backward.default(grad, row, V, V, False)


def _forward_fake(weight: Tensor, ids: Tensor, row_ids: Tensor) -> Tensor:
    _check(weight, ids, row_ids)
    return weight.new_empty(*ids.shape, weight.shape[1])


def _backward_fake(grad: Tensor, ids: Tensor, row_ids: Tensor, padding_idx: int) -> Tensor:
    return grad.new_empty(row_ids.shape[0], grad.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.fxpar.embedding_backward.default(grad, *ctx.saved_tensors, -1), None, None


for _device in ("CPU", "CUDA"):
    _LIB.impl("embedding", _forward, _device)
    _LIB.impl("embedding_backward", _backward, _device)
torch.library.register_fake("fxpar::embedding", _forward_fake, lib=_LIB)
torch.library.register_fake("fxpar::embedding_backward", _backward_fake, lib=_LIB)
torch.library.register_autograd("fxpar::embedding", _autograd, setup_context=_setup_context, lib=_LIB)
refuse_second_derivative(
    _LIB,
    "fxpar::embedding_backward",
    "F.embedding",
    "Write it out, as F.one_hot(ids, rows).to(weight.dtype) @ weight.",
)
