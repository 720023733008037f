"""Embedding lookups as `fxpar::embedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.errors import PositionTableError
from fxpar.torch_api.tracing import first_of_range
from fxpar.tracer.context import current
from fxpar.tracer.provenance import user_line


class _PaddedEmbedding(torch.autograd.Function):
    """The lookup whose gradient leaves out the row of the padding index."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, row_ids: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids, row_ids)
        ctx.padding_idx = padding_idx
        return torch.ops.fxpar.embedding(weight, ids, row_ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ids, row_ids = ctx.saved_tensors
        return torch.ops.fxpar.embedding_backward(grads[0], ids, row_ids, ctx.padding_idx), None, None, None


def functional_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`: ids `input` [...] into the rows of `weight` [V, D] -> [..., D]."""
    if max_norm is not None or sparse or scale_grad_by_freq:
        option = "max_norm" if max_norm is not None else "sparse" if sparse else "scale_grad_by_freq"
        context = current()
        assert context is not None
        raise context.unsupported(f"F.embedding with {option}", f"Leave {option} at its default.")
    V = weight.shape[0]
    first = first_of_range(input) if input.dim() else None
    # Positions that the model counts itself. The table must have a row for each, so this bounds the length.
    if first is not None and not input.shape[-1] + first <= V:
        context = current()
        assert context is not None
        raise PositionTableError(int(input.shape[-1]), V - int(first), context.provenance.fqn, user_line())
    row_ids = torch.arange(1, V + 1)
    if padding_idx is None:
        return torch.ops.fxpar.embedding(weight, input, row_ids)
    return _PaddedEmbedding.apply(weight, input, row_ids, padding_idx % V)
