"""Rules of element-wise ops, broadcasting included, and of ops that only look like them."""

from __future__ import annotations

import torch

from fxpar.ir.dist_config import P
from fxpar.rules.option import Factor, Option, OpView, linear

aten = torch.ops.aten

# Linear in every operand at once, in each operand alone, in the first only.
_ADDS = (aten.add.Tensor, aten.sub.Tensor)
_MULTIPLIES = (aten.mul.Tensor,)
_LINEAR_IN_FIRST = (
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
)


def pointwise_factors(op: OpView) -> list[Factor]:
    """One factor per result dim; an operand takes part where it is not broadcast."""
    rank = len(op.outputs[0])
    factors = []
    for d in range(rank):
        size = op.outputs[0][d]
        inputs = []
        for shape in op.inputs:
            own = d - (rank - len(shape))
            inputs.append(own if own >= 0 and (shape[own] == size and size != 1) else None)
        factors.append(Factor(tuple(inputs), (d,) * len(op.outputs)))
    return factors


def pointwise_partials(op: OpView) -> list[Option]:
    """How partial sums pass through an element-wise op."""
    count = len(op.inputs)
    if op.target in _ADDS:
        # With a Python scalar as second operand every rank would add it once.
        return [Option((P,) * count, (P,))] if count == 2 else []
    if op.target in _MULTIPLIES:
        # Any factor would do, but a sum is best taken before a tensor product of full size; a scalar factor (the
        # loss scale) may come first.
        scalars = [i for i, shape in enumerate(op.inputs) if not shape]
        return [linear(op, i) for i in range(count) if count == 1 or any(j != i for j in scalars)]
    if op.target in _LINEAR_IN_FIRST and not _rounds(op):
        return [linear(op, 0)]
    return []


def pointwise_terms(op: OpView) -> list[Option]:
    """Products are linear in each factor, of whatever size the others are."""
    return [linear(op, i) for i in range(len(op.inputs))] if op.target in _MULTIPLIES else []


def _rounds(op: OpView) -> bool:
    """Whether the op is a cast to integers; a cast to fewer bits of a float is as good before a sum as after it."""
    dtype = dict(op.kwargs).get("dtype")
    return dtype is not None and not dtype.is_floating_point
