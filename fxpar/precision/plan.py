"""The dtype that every node of a graph computes in, before anything is rewritten."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

import fxpar.ops  # noqa: F401 - registers torch.ops.fxpar
from fxpar.ir.graph import LogicalGraph, Output
from fxpar.ir.node_meta import is_size
from fxpar.ops.traits import computes
from fxpar.precision.islands import active_nodes, find_islands, is_float, metas
from fxpar.precision.precision import Precision
from fxpar.torch_api import kernels

own = torch.ops.fxpar

# Positions of operands that are taken as they come. Own ops compute in fp32 inside whatever they are given, and a mask
# or a logsumexp is never worth a copy; uncast logits save the [T, V] copy.
AS_THEY_COME: Mapping[Any, tuple[int, ...]] = {
    own.attention.default: (4,),
    own.attention_backward.default: (5, 7),
    own.cross_entropy.default: (0,),
    own.cross_entropy_backward.default: (2, 5),
    own.weighted_sum.default: (1,),
    own.weighted_sum_backward.default: (2,),
}
# Operand -> the operand whose dtype it must have.
LIKE: Mapping[Any, Mapping[int, int]] = {own.cross_entropy_backward.default: {0: 5, 1: 5}}


@dataclass(frozen=True)
class PrecisionPlan:
    """`computes`: the dtype of each node that is rewritten; any other is copied as it is. `params`: new dtype of each
    parameter whose dtype changes, by node. `captured` is the dtype of islands, `low` that of everything else.
    """

    captured: torch.dtype
    low: torch.dtype
    computes: dict[fx.Node, torch.dtype]
    params: dict[fx.Node, torch.dtype]


def make_plan(logical: LogicalGraph, precision: Precision, captured: torch.dtype, low: torch.dtype) -> PrecisionPlan:
    """Decide for every node. Raises PrecisionGlobError."""
    active = active_nodes(logical)
    islands = find_islands(logical, precision, active)
    computes: dict[fx.Node, torch.dtype] = {}
    moving = []
    for node in logical.gm.graph.nodes:
        if node.op != "call_function" or not _is_rewritten(node, active, captured):
            continue
        computes[node] = captured if node in islands else low
        if is_moving(node):
            moving.append(node)
    outputs = dict(zip(logical.results, logical.outputs, strict=True))
    for node in reversed(moving):  # readers first
        wanted = set(_wanted(node, computes, captured, outputs))
        if len(wanted) == 1:
            computes[node] = wanted.pop()
    params = {}
    for node, info in zip(logical.placeholders, logical.inputs, strict=True):
        if info.kind == "param" and info.meta.dtype == captured:
            wanted = {computes.get(user, low) for user in node.users if user.op == "call_function"}
            if wanted and wanted != {captured}:
                params[node] = low
    return PrecisionPlan(captured, low, computes, params)


def _is_rewritten(node: fx.Node, active: set[fx.Node], captured: torch.dtype) -> bool:
    """Whether the node reads a value that may change its dtype."""
    operands = node.all_input_nodes
    if is_size(node):
        return False
    return any(o in active for o in operands) and any(m.dtype == captured for o in operands for m in metas(o))


def is_moving(node: fx.Node) -> bool:
    """Whether the node only moves values, so that its readers may choose its dtype."""
    relaid = is_cast(node) and "dtype" not in node.kwargs
    return relaid or node.target is operator.getitem or computes(node.target) == "moves"


def is_cast(node: fx.Node) -> bool:
    return node.target is kernels.to_copy


def kept(node: fx.Node) -> set[fx.Node]:
    """Operands that a call takes in whatever dtype they have."""
    if node.target is operator.getitem or (is_cast(node) and "dtype" in node.kwargs):
        return set(node.all_input_nodes)
    positions = (*AS_THEY_COME.get(node.target, ()), *LIKE.get(node.target, ()))
    found: list[fx.Node] = []
    map_arg([node.args[i] for i in positions if i < len(node.args)], found.append)
    return set(found)


def _wanted(
    node: fx.Node, computes: dict[fx.Node, torch.dtype], captured: torch.dtype, outputs: dict[fx.Node, Output]
) -> Iterator[torch.dtype]:
    """The dtypes in which a value is read; a gradient goes out in its parameter's dtype, whatever it has here."""
    for user in node.users:
        if user.op == "output":
            if outputs[node].kind != "grad":
                yield captured
        elif user.target is operator.getitem:
            if is_float(user) and user in computes:
                yield computes[user]
        elif node not in kept(user) and user in computes:
            yield computes[user]
