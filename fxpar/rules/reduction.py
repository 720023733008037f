"""Rules of reductions, softmax and normalisation."""

from __future__ import annotations

import torch

from fxpar.ir.dist_config import P, R
from fxpar.rules.option import ABSENT, Factor, Option, OpView, linear

aten = torch.ops.aten

# op -> how the results of chunks of a reduced dim combine (None: they do not).
REDUCTIONS = {
    aten.sum.dim_IntList: "sum",
    aten.sum.default: "sum",
    aten.mean.dim: "avg",
    aten.mean.default: "avg",
    aten.amax.default: "max",
    aten.max.default: "max",
    aten.amin.default: None,
    aten.min.default: None,
    aten.max.dim: None,
    aten.min.dim: None,
    aten.any.dim: None,
    aten.all.dim: None,
    aten.all.default: None,
    aten.argmax.default: None,
    aten.var.correction: None,
    aten.var_mean.correction: None,
    aten.std.correction: None,
    aten.logsumexp.default: "logsumexp",
    aten.linalg_vector_norm.default: None,
    aten.prod.dim_int: None,
}
_DIM_POSITION = {aten.linalg_vector_norm.default: 2}
_KEYWORD_ONLY = 99  # a position that no call has
_KEEPDIM_POSITION = {
    aten.var.correction: _KEYWORD_ONLY,
    aten.var_mean.correction: _KEYWORD_ONLY,
    aten.std.correction: _KEYWORD_ONLY,
    aten.linalg_vector_norm.default: 3,
}

LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
)
LOSSES_BACKWARD = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def reduction_factors(op: OpView) -> list[Factor]:
    """Kept dims are parallel; reduced dims combine by the op's own reduction where there is one."""
    rank = len(op.inputs[0])
    dims = op.arg(_DIM_POSITION.get(op.target, 1), "dim")
    if op.target in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default):
        dims = None
    reduced = _dims(op, dims, rank)
    keep = bool(op.arg(_KEEPDIM_POSITION.get(op.target, 2), "keepdim", False)) if dims is not None else False
    how = REDUCTIONS[op.target]
    factors, position = [], 0
    for d in range(rank):
        if d in reduced:
            if how:
                # Padding adds zeros to a sum; it would bias a mean or a maximum.
                factors.append(Factor((d,), (how,) * len(op.outputs), pad=how == "sum", sections=True))
            position += keep
        else:
            factors.append(Factor((d,), (position,) * len(op.outputs)))
            position += 1
    return factors


def reduction_partials(op: OpView) -> list[Option]:
    """Sums and means are linear."""
    return [linear(op, 0)] if REDUCTIONS[op.target] in ("sum", "avg") else []


def _dims(op: OpView, dims: object, rank: int) -> set[int]:
    if dims is None or dims == ():
        return set(range(rank))
    if isinstance(dims, int):
        return {op.dim(dims)}
    return {op.dim(d) for d in dims}  # type: ignore[attr-defined]


_SUM = 2  # of aten's numbers for reduction="none", "mean", "sum"


def loss_factors(op: OpView) -> list[Factor]:
    """aten.mse_loss and the like: (x, target, ..., reduction) -> like x, or a sum. A mean divides by the local size."""
    reduction = op.arg(_reduction_position(op), "reduction", 1)
    rank, count = len(op.inputs[0]), len(op.inputs)
    if len(set(op.inputs)) != 1 or reduction == 1:
        return []
    return [Factor((d,) * count, ("sum" if reduction == _SUM else d,)) for d in range(rank)]


def loss_backward_factors(op: OpView) -> list[Factor]:
    """(grad, x, target, ..., reduction) -> dx; the gradient of a sum is a scalar."""
    reduction = op.arg(_reduction_position(op), "reduction", 1)
    if len(set(op.inputs[1:])) != 1 or reduction == 1:
        return []
    others = len(op.inputs) - 1
    return [Factor((None if reduction == _SUM else d, *(d,) * others), (d,)) for d in range(len(op.outputs[0]))]


def label_loss_factors(op: OpView) -> list[Factor]:
    """aten.nll_loss_forward(x [N, V], labels [N], weight [V]?, reduction, ...) -> (loss, total weight): rows."""
    reduction = op.arg(3, "reduction", 1)
    if len(op.inputs[0]) != 2 or reduction == 1:
        return []
    rest = (None,) * (len(op.inputs) - 2)
    return [Factor((0, 0, *rest), ("sum" if reduction == _SUM else 0, "sum"), pad=False)]


def label_loss_backward_factors(op: OpView) -> list[Factor]:
    """(grad, x [N, V], labels [N], weight [V]?, reduction, ..., total weight) -> dx: rows."""
    reduction = op.arg(4, "reduction", 1)
    if len(op.inputs[1]) != 2 or reduction == 1:
        return []
    rest = (None,) * (len(op.inputs) - 3)
    return [Factor((None if reduction == _SUM else 0, 0, 0, *rest), (0,), pad=False)]


def _reduction_position(op: OpView) -> int:
    names = [argument.name for argument in op.target._schema.arguments]
    return names.index("reduction")


def softmax_factors(op: OpView) -> list[Factor]:
    """Every dim but the one that is normalised; the backward takes (grad, output, dim)."""
    position = 2 if len(op.inputs) == 2 else 1
    dim = op.dim(op.arg(position, "dim"))
    count = len(op.inputs)
    return [Factor((d,) * count, (d,)) for d in range(len(op.inputs[0])) if d != dim]


def cumulative_factors(op: OpView) -> list[Factor]:
    """cumsum and friends: every dim but the one that is scanned."""
    dim = op.dim(op.arg(1, "dim"))
    return [Factor((d,), (d,) * len(op.outputs)) for d in range(len(op.inputs[0])) if d != dim]


def layer_norm_factors(op: OpView) -> list[Factor]:
    """(x [..., N], weight [N]?, bias [N]?) -> (y, mean [..., 1], rstd): leading dims are parallel."""
    leading = len(op.inputs[0]) - len(op.arg(1, "normalized_shape"))
    rest = (None,) * (len(op.inputs) - 1)
    return [Factor((d, *rest), (d,) * len(op.outputs)) for d in range(leading)]


def layer_norm_backward_factors(op: OpView) -> list[Factor]:
    """(grad, x, normalized_shape, mean, rstd, weight?, bias?, mask) -> (dx, dweight, dbias)."""
    leading = len(op.inputs[0]) - len(op.arg(2, "normalized_shape"))
    affine = (None,) * (len(op.inputs) - 4)
    mask = op.arg(7, "output_mask", (True, True, True))
    factors = []
    for d in range(leading):
        made = tuple(o if keep else ABSENT for o, keep in zip((d, "sum", "sum"), mask, strict=True))
        factors.append(Factor((d, d, d, d, *affine), made))
    return factors


def rms_norm_factors(op: OpView) -> list[Factor]:
    """aten._fused_rms_norm(x [..., N], normalized_shape, weight?, eps) -> (y, rstd)."""
    return layer_norm_factors(op)


def rms_norm_backward_factors(op: OpView) -> list[Factor]:
    """(grad, x, normalized_shape, rstd, weight?, mask) -> (dx, dweight)."""
    leading = len(op.inputs[0]) - len(op.arg(2, "normalized_shape"))
    affine = (None,) * (len(op.inputs) - 3)
    mask = op.arg(5, "output_mask", (True, True))
    factors = []
    for d in range(leading):
        made = tuple(o if keep else ABSENT for o, keep in zip((d, "sum"), mask, strict=True))
        factors.append(Factor((d, d, d, *affine), made))
    return factors


def norm_backward_terms(op: OpView) -> list[Option]:
    """The backward of a norm is linear in `grad`; results that the call leaves out are no terms."""
    made = tuple(P if shape else R for shape in op.outputs)
    return [Option((P, *(R,) * (len(op.inputs) - 1)), made)]
