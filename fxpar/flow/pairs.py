"""Values per pair of tokens: what pairs of different documents have."""

from __future__ import annotations

import torch

from fxpar.flow.call import FlowCall
from fxpar.flow.statements import MOVES
from fxpar.ir.dist_config import Shard

aten = torch.ops.aten
own = torch.ops.fxpar

_SCALINGS = {aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.neg.default}
_COMPARISONS = {getattr(aten, name).Scalar for name in ("eq", "ne", "gt", "ge", "lt", "le")}
# Of zeros they make finite numbers.
_FINITE_AT_ZERO = {
    *(MOVES | _SCALINGS | _COMPARISONS),
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, own.dropout.default),
    *(aten.exp.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.abs.default),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.logical_and.default, aten.logical_not.default),
}


def may_be_infinite(call: FlowCall, dims: tuple[Shard, ...]) -> bool:
    """Whether pairs of different documents may have no finite number."""
    if len(dims) != 2:
        return False
    divided = call.node.target is aten.div.Tensor and any(f.inside for f in call.flows[1:])
    made = any(f.inside for f in call.flows) and call.node.target not in _FINITE_AT_ZERO
    return divided or made or any(f.infinite for f in call.flows)


def stay_inside(call: FlowCall, dims: tuple[Shard, ...]) -> bool:
    """Whether pairs of different documents stay zero."""
    if len(dims) != 2 or not call.flows:
        return False
    target, inside = call.node.target, [f.inside for f in call.flows]
    if target in (aten.mul.Tensor, aten.logical_and.default):
        return any(inside)
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return all(inside) and len(inside) == 2
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return inside[0] and bool(call.node.args[2] == 0)
    return inside[0] and (target in MOVES or target in _SCALINGS)
