"""Numbers that say how long the batch is: a loss that is divided or scaled by one is a mean, however it is written.

Counts are one-element values made from the batch or from dynamic sizes alone. What the batch gives as it is, such as
the weight of a sequence, is none, and neither is a yes or no, such as whether any token has a label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.node_meta import input_kind
from fxpar.ops.traits import RELABELS, SIZES, TAKES
from fxpar.torch_api.schemas import schema_of
from fxpar.torch_api.tracing import OpOverload, node_of

aten = torch.ops.aten

CASTS = RELABELS | {aten.clone.default, aten._to_copy.default, aten.neg.default}
SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
_LIKE = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default}
# Their numbers are those of the call; of a tensor they take the shape.
SHAPED = _LIKE | {op for op, position in SIZES.items() if position == 1 and str(op).startswith("aten.new_")}
_MOVES = CASTS | TAKES
# Of one element each, with these a number of the batch stays one that the user gave.
_AS_GIVEN = SCALINGS | {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.sum.default,
    aten.sum.dim_IntList,
}


def out_of_place(op: Any) -> Any:
    """The op without the write: aten.div.Tensor for aten.div_.Tensor."""
    if not isinstance(op, OpOverload):
        return op
    package, name, overload = str(op).split(".")
    if package != "aten" or not name.endswith("_") or name.endswith("__"):
        return op
    return getattr(getattr(aten, name[:-1], None), overload, op)


def is_static(value: Any) -> bool:
    """Whether no dim of a result is dynamic."""
    if isinstance(value, (tuple, list)):
        return all(map(is_static, value))
    return not isinstance(value, Tensor) or all(isinstance(s, int) for s in value.shape)


def has_one_element(value: Any) -> bool:
    """Whether it is a tensor of one element, whatever the dynamic dims are."""
    return isinstance(value, Tensor) and is_static(value) and math.prod(value.shape) == 1


def is_whole(value: Any) -> bool:
    """Whether it is a tensor of integers or of yes and no: it has no gradient."""
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_yes_or_no(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def is_filled(value: Tensor) -> bool:
    """Whether every element is one number other than 0, as the traced program says (not what the example happens to
    hold): `ones`, moved and cast.
    """
    node = node_of(value)
    while node is not None and node.target in _MOVES and not _is_written(node):
        node = node.all_input_nodes[0]
    if node is None or node.op != "call_function" or _is_written(node):
        return False
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        number = node.args[-1]
        return isinstance(number, bool | int | float) and not -1 < number < 1  # a cast may round what is less to 0
    return node.target in (aten.ones.default, aten.ones_like.default, aten.new_ones.default)


def _is_written(node: fx.Node) -> bool:
    """Whether an op of the program so far writes to a value, or to what may be a view of it."""
    for user in node.users:
        if isinstance(user.target, OpOverload):
            written = schema_of(user.target).writes
            if written or (user.target in TAKES and _is_written(user)):
                return True
    return False


def is_count(node: fx.Node, divides: bool = False) -> bool:
    """Whether a number is made from the batch or from dynamic sizes alone: one value for the whole batch.

    A number that the batch gives is a weight, but not where the loss `divides` by it.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not has_one_element(value):
        return False
    return is_of_batch(node) and (divides or not _is_given(node))


def is_of_batch(node: fx.Node) -> bool:
    """Whether a value is made from the batch or from dynamic sizes, and from no parameter."""
    found = set()
    for kind in _sources(node):
        if kind == "param":
            return False
        found.add(kind)
    return bool(found & {"batch", "size"})


def is_of_parameters(node: fx.Node) -> bool:
    """Whether a value is made of parameters alone, perhaps with buffers and constants."""
    found = set()
    for kind in _sources(node):
        if kind not in ("param", "buffer"):
            return False
        found.add(kind)
    return "param" in found


def _sources(node: fx.Node) -> Iterator[str]:
    """Which of "param", "buffer", "batch", "size", "seed" a value depends on.

    Behind integers and comparisons parameters are the batch: how many losses are above 0 is a count.
    """
    todo, seen = [(node, False)], {(node, False)}
    while todo:
        current, counted = todo.pop()
        value = current.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            yield "size"
            continue
        if (_is_yes_or_no(value) and has_one_element(value)) or _is_given_vector(current):
            continue
        counted = counted or is_whole(value)
        if current.op == "placeholder":
            kind = current.meta.get("kind", "batch")
            yield "batch" if counted and kind == "param" else kind
        if current.target in SHAPED:
            if not is_static(value):
                yield "size"
            continue
        for source in current.all_input_nodes:
            if (source, counted) not in seen:
                seen.add((source, counted))
                todo.append((source, counted))


def _is_given(node: fx.Node) -> bool:
    """Whether a number stands in the batch: moved, cast, and with constants added to it or multiplied."""
    todo = [node]
    while todo:
        current = todo.pop()
        if current.op == "placeholder" or not any(kind in ("batch", "size") for kind in _sources(current)):
            continue
        operands = [a for a in current.args if isinstance(a, fx.Node)]
        if current.target in _MOVES:
            todo += operands[:1]
            continue
        divides = current.target in DIVISIONS and len(operands) > 1
        if divides or current.target not in _AS_GIVEN or not all(has_one_element(a.meta.get("val")) for a in operands):
            return False
        todo += operands
    return True


def _is_given_vector(node: fx.Node) -> bool:
    """Whether it is a vector that stands in the batch, such as the features of one token: its norm is no count."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or is_whole(value) or not is_static(value) or math.prod(value.shape) == 1:
        return False
    while node.target in _MOVES:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and input_kind(node) == "batch"
