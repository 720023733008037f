"""Exact shortcuts in what autograd writes: work on full-size tensors that a small one would do for.

The backward of `x.pow(2).mean(-1)` in every RMS norm reads `expand(s) / N * (x ** 1.0 * 2.0)`: four passes over the
activation where one is enough. Every rule here gives the same bits: x ** 1 is x, an op on an expanded tensor is the
expansion of the op, and a factor that is a power of two commutes with any product.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import tensor_of
from fxpar.ops.traits import FACTORIES, is_elementwise, is_view

aten = torch.ops.aten
_SCALAR_OPS = (aten.mul.Scalar, aten.div.Scalar)


def simplify(gm: fx.GraphModule) -> None:
    """Apply the rules until none fits, in one walk (operands come first)."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            _state_dtype(node)
            _state_promotion(gm.graph, node)
            _drop_power_of_one(node) or _scale_before_expand(gm.graph, node) or _fold_scale(gm.graph, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _state_dtype(node: fx.Node) -> None:
    """A constant made without a dtype would take the default one, which the range of a wider graph may not fit."""
    if node.target in FACTORIES | {aten.arange.default} and "dtype" not in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": tensor_of(node).dtype}


def _state_promotion(graph: fx.Graph, node: fx.Node) -> None:
    """Integers of which an op makes numbers of the default dtype are cast to it first: in a step the default may be
    another one.
    """
    operands = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("tensor"), TensorMeta)]
    if not operands or not is_elementwise(node.target) or "dtype" in node.kwargs:
        return
    dtype = tensor_of(node).dtype
    if not dtype.is_floating_point or any(not _is_whole(tensor_of(operand).dtype) for operand in operands):
        return
    for operand in operands:
        with graph.inserting_before(node):
            cast = _like(graph, node, aten._to_copy.default, (operand,), replace(tensor_of(operand), dtype=dtype))
        cast.kwargs = {"dtype": dtype}
        node.replace_input_with(operand, cast)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _drop_power_of_one(node: fx.Node) -> bool:
    """x ** 1 -> x."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return False
    source: Any = node.args[0]
    if tensor_of(source) != tensor_of(node):
        return False
    node.replace_all_uses_with(source)
    return True


def _scale_before_expand(graph: fx.Graph, node: fx.Node) -> bool:
    """expand(s) * c -> expand(s * c)."""
    source: Any = node.args[0] if node.args else None
    if node.target not in _SCALAR_OPS or not isinstance(source, fx.Node) or source.target is not aten.expand.default:
        return False
    if tensor_of(source).dtype != tensor_of(node).dtype:
        return False
    small: Any = source.args[0]
    with graph.inserting_before(node):
        scaled = _like(graph, node, node.target, (small, node.args[1]), tensor_of(small))
        expanded = _like(graph, node, aten.expand.default, (scaled, *source.args[1:]), tensor_of(node))
    _copy_in_views(node)
    node.replace_all_uses_with(expanded)
    return True


def _copy_in_views(node: fx.Node) -> None:
    """Views of a tensor that is about to be an expanded one: what cannot be a view of that is copied."""
    for user in node.users:
        if user.target is aten.view.default:
            user.target = aten.reshape.default
        if user.op == "call_function" and is_view(user.target):
            _copy_in_views(user)


def _fold_scale(graph: fx.Graph, node: fx.Node) -> bool:
    """expand(s) * (x * 2^n) -> expand(s * 2^n) * x, if nobody else uses the products."""
    if node.target is not aten.mul.Tensor:
        return False
    for i in (0, 1):
        wide: Any
        scaled: Any
        wide, scaled = node.args[i], node.args[1 - i]
        if not (isinstance(wide, fx.Node) and isinstance(scaled, fx.Node)):
            return False
        if wide.target is not aten.expand.default or scaled.target is not aten.mul.Scalar or len(scaled.users) > 1:
            continue
        factor: Any = scaled.args[1]
        small: Any = wide.args[0]
        same = tensor_of(small).dtype == tensor_of(scaled).dtype == tensor_of(node).dtype
        if not same or not factor or math.frexp(abs(factor))[0] != 0.5:
            continue
        with graph.inserting_before(node):
            product = _like(graph, node, aten.mul.Scalar, (small, factor), tensor_of(small))
            expanded = _like(graph, node, aten.expand.default, (product, *wide.args[1:]), tensor_of(wide))
        node.args = (expanded, scaled.args[0])
        return True
    return False


def _like(graph: fx.Graph, node: fx.Node, target: Any, args: tuple, tensor: TensorMeta) -> fx.Node:
    new = graph.call_function(target, args)
    new.meta = {**node.meta, "tensor": tensor}
    return new
