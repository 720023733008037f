"""Ops, their gradients, and what fxpar has to know of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.flow.statements import own_document
from fxpar.rules.option import Factor, OpView
from fxpar.rules.table import register_op


@torch.library.custom_op("extras::relu2", mutates_args=())
def relu2(x: Tensor, weight: Tensor) -> Tensor:
    """relu(x [..., D] @ weight [D, E]) ** 2."""
    return (x @ weight).relu() ** 2


@relu2.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


@torch.library.custom_op("extras::relu2_backward", mutates_args=())
def relu2_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., D] and weight [D, E], from that of the result [..., E]."""
    inner = 2 * grad * (x @ weight).relu()
    return inner @ weight.T, x.flatten(0, -2).T @ inner.flatten(0, -2)


@relu2_backward.register_fake
def _(grad, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


relu2.register_autograd(
    lambda ctx, grad: relu2_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def relu2_loops(op: OpView) -> list[Factor]:
    """(x [..., D], weight [D, E]) -> [..., E]: rows, or E of weight and result. D is summed before relu: no loop."""
    last = len(op.inputs[0]) - 1
    return [*(Factor((d, None), (d,)) for d in range(last)), Factor((None, 1), (last,))]


def relu2_backward_loops(op: OpView) -> list[Factor]:
    """(grad [..., E], x [..., D], weight [D, E]) -> (dx, dweight): the same loops; what one does not walk is a sum."""
    last = len(op.inputs[0]) - 1
    return [*(Factor((d, d, None), (d, "sum")) for d in range(last)), Factor((last, None, 1), ("sum", 1))]


def relu2_flops(operands, results) -> int:
    """2 per multiply-add: rows * D * E of the one product."""
    (*rows, dim), (_, width) = operands[-2:]
    return 2 * torch.Size(rows).numel() * dim * width


register_op(torch.ops.extras.relu2.default, rule=relu2_loops, flops=relu2_flops)
register_op(
    torch.ops.extras.relu2_backward.default,
    rule=relu2_backward_loops,
    flops=lambda operands, results: 3 * relu2_flops(operands, results),
)


@torch.library.custom_op("extras::document_mean", mutates_args=())
def document_mean(x: Tensor, document_ids: Tensor) -> Tensor:
    """x [B, T, D] averaged over the tokens of each document; document_ids [B, T]."""
    same = (document_ids[:, :, None] == document_ids[:, None, :]).to(x.dtype)
    return same / same.sum(-1, keepdim=True) @ x


@document_mean.register_fake
def _(x, document_ids):
    return torch.empty_like(x)


document_mean.register_autograd(
    lambda ctx, grad: (document_mean(grad, *ctx.saved_tensors), None),  # tokens weigh on each other alike
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def document_mean_loops(op: OpView) -> list[Factor]:
    """(x [B, T, D], document_ids [B, T]) -> [B, T, D]: rows, or D; a token needs all others of its document."""
    return [Factor((0, 0), (0,)), Factor((2, None), (2,))]


register_op(torch.ops.extras.document_mean.default, rule=document_mean_loops, flow=own_document, precision="fp32")
