"""An op, its gradient, and their sharding rules."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.rules.option import Factor, OpView
from fxpar.rules.table import register_rule


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


register_rule(torch.ops.extras.relu2.default, relu2_loops, flops=relu2_flops)
register_rule(
    torch.ops.extras.relu2_backward.default,
    relu2_backward_loops,
    flops=lambda operands, results: 3 * relu2_flops(operands, results),
)
