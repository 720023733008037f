"""Padding that an op cannot use: numbers for which it makes none, and which spoil gradients whatever is made of them.

A gradient of zero times an infinite derivative is no number, so hiding such a result (`where(w > 0, y / w, 0)`) does
not help. Gradients are asked too: the root of a known zero is found by the division in its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.flow.call import FlowCall
from fxpar.flow.statements import MOVES, Flows
from fxpar.flow.value import Flow
from fxpar.ops.traits import INDEX_PUTS

aten = torch.ops.aten

# Op -> argument at whose zeros it, or its derivative, has a pole.
_POLES: dict[Any, int] = {
    aten.reciprocal.default: 0,
    aten.rsqrt.default: 0,
    aten.addcdiv.default: 2,
    aten.floor_divide.default: 1,
    aten.xlogy.Tensor: 1,
    aten.xlogy.Scalar_Self: 1,
    aten.pow.Tensor_Tensor: 0,
    **dict.fromkeys((aten.div.Tensor, aten.div.Tensor_mode, aten.true_divide.Tensor), 1),
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar_Tensor, aten.fmod.Tensor), 1),
}
# Op -> argument of indices, which count from the end below 0, or are an error; `fxpar::embedding` makes zeros of them.
_INDICES: dict[Any, int] = {
    aten.embedding.default: 1,
    aten.take.default: 1,
    aten.index.Tensor: 1,
    aten._unsafe_index.Tensor: 1,
    **dict.fromkeys(INDEX_PUTS, 1),
    **dict.fromkeys((aten.gather.default, aten.index_select.default, aten.index_add.default), 2),
    **dict.fromkeys((aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), 2),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce), 2),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter_reduce.two), 2),
}
# They only choose: what is infinite in their results was so before.
_CHOICES = (MOVES - {aten._to_copy.default}) | {
    *(aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.cat.default, aten.stack.default),
}
# They have no poles: infinite is a sum of two of the lowest numbers, which masks of attention may be.
_OVERFLOWING = {
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar),
    *(aten.mul.Tensor, aten.mul.Scalar, aten._to_copy.default),
}


def operand(node: fx.Node, flows: Mapping[fx.Node, Flows]) -> str:
    """What an op makes of padding in one operand, of which more is known than of the others; empty if nothing bad."""
    if node.target in _POLES and _padded(_argument(node, _POLES[node.target]), flows) == 0:
        return "divides by what is 0 at padding, or takes its root or logarithm"
    if node.target in _INDICES:
        index = _argument(node, _INDICES[node.target])
        found = [_padded(i, flows) for i in (index if isinstance(index, (list, tuple)) else [index])]
        if any(number is not None and number < 0 for number in found):
            return "is given negative indices by padding"
    return ""


def result(call: FlowCall, made: Flow) -> str:
    """Whether an op makes infinite numbers, or none, of numbers that padding has; empty if not."""
    number, target = made.padded, call.node.target
    if number is None or math.isfinite(number) or made.everywhere is not None or target in _CHOICES:
        return ""
    given = [flow.everywhere if flow.padded is None else flow.padded for flow in call.flows]
    given += [value for value in (*call.node.args, *call.node.kwargs.values()) if isinstance(value, float)]
    before = any(value is not None and not math.isfinite(value) for value in given)
    if math.isnan(number):
        return "" if any(value is not None and math.isnan(value) for value in given) else _NO_NUMBER
    return "" if before or target in _OVERFLOWING else _NO_NUMBER


_NO_NUMBER = "makes no finite number of what padding has"


def _argument(node: fx.Node, position: int) -> Any:
    return node.args[position] if position < len(node.args) else None


def _padded(value: Any, flows: Mapping[fx.Node, Flows]) -> float | None:
    """The number at padding, where it is another than elsewhere."""
    flow = flows.get(value) if isinstance(value, fx.Node) else None
    return flow.padded if isinstance(flow, Flow) and flow.kind == "same" and flow.everywhere is None else None
