"""Numbers that are known without running anything: of all elements of a value, and of padded tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxpar.flow.call import FlowCall
from fxpar.flow.statements import MOVES
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import tensor_of, whole_meta
from fxpar.ops.traits import MATRIX_PRODUCTS, is_elementwise

aten = torch.ops.aten
_FILLED: dict[Any, float] = {
    aten.zeros.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.ones.default: 1.0,
    aten.new_ones.default: 1.0,
    aten.ones_like.default: 1.0,
}
_FILL_POSITION: dict[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
# Of zero and anything they make zero.
_ZERO_OF_ONE = MATRIX_PRODUCTS | {
    *(aten.mul.Tensor, aten.mul.Scalar, aten.logical_and.default, aten.bitwise_and.Tensor),
}
# Of nothing but zeros they make zero.
_SUMS = {
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default),
    *(aten.linalg_vector_norm.default, aten.var.correction, aten.std.correction, aten.amax.default, aten.amin.default),
}
_JOINS = {aten.cat.default, aten.stack.default}


def everywhere(call: FlowCall) -> float | None:
    """The number that all elements of the result are."""
    return _result(call, [flow.everywhere for flow in call.flows])


def padded(call: FlowCall) -> float | None:
    """The number of padded tokens in the result, or of what they add to a sum."""
    return _result(call, [flow.everywhere if flow.padded is None else flow.padded for flow in call.flows])


def contracts_to_zero(call: FlowCall) -> bool:
    """Whether padded tokens add nothing to a sum over the tokens."""
    return any(flow.padded == 0 or flow.everywhere == 0 for flow in call.flows)


def _result(call: FlowCall, known: list[float | None]) -> float | None:
    target = call.node.target
    if target in _FILLED:
        return _FILLED[target]
    if target in _FILL_POSITION:
        value = call.node.args[_FILL_POSITION[target]]
        return float(value) if isinstance(value, (bool, int, float)) else None
    if not known:
        return None
    if target in MOVES and target is not aten._to_copy.default:
        return known[0]
    if target in _SUMS:
        return 0.0 if known[0] == 0 else None
    if target in _JOINS:
        return known[0] if len(set(known)) == 1 else None
    if target in _ZERO_OF_ONE and 0.0 in known and all(math.isfinite(k) for k in known if k is not None):
        return 0.0  # of finite numbers; where padding is what makes others, it is refused (`unusable`)
    if target is aten.where.self:
        same = known[1] if known[1] == known[2] else None
        return same if known[0] is None else known[1] if known[0] else known[2]
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return _filled(call.node, known)
    if None in known or not is_elementwise(target):
        return None
    return _evaluated(call.node, [float(k) for k in known if k is not None])


def _filled(node: fx.Node, known: list[float | None]) -> float | None:
    """`masked_fill(x, mask, value)`."""
    if known[1] is None:
        return None
    if not known[1]:
        return known[0]
    value = node.args[2]
    return known[2] if isinstance(value, fx.Node) else float(value)  # type: ignore[arg-type]


def _evaluated(node: fx.Node, known: list[float]) -> float | None:
    """The op run on single numbers in the operands' dtypes; None where it cannot be."""
    values = iter(known)

    def number(arg: fx.Node) -> torch.Tensor:
        return torch.tensor(next(values), dtype=torch.float64).to(tensor_of(arg).dtype)

    nodes = [*node.all_input_nodes]
    if any(not isinstance(whole_meta(n), TensorMeta) for n in nodes):
        return None
    args = fx.node.map_arg(node.args, number)
    kwargs = fx.node.map_arg(node.kwargs, number)
    try:
        found = node.target(*args, **kwargs)  # type: ignore[operator]
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # a whole number divided by zero, say
        return None
    return float(found) if isinstance(found, torch.Tensor) and not found.is_complex() else None
