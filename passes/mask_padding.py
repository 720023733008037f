"""Mask padding: where a sum runs over an unevenly cut dim, make sure that the padding is zero.

Before: a dim of 100 cut in 3 pieces of 34 has 2 elements of padding on the last rank, with unknown content.
After: they are zero wherever a product or a sum contracts the dim, and in every result of the graph.

    %s : f32[T] P(tp) = sum(%h, [1])            %h_z : f32[T, 100@tp] = zero_padding(%h, 1, 100, "#tp")
                                                %s : f32[T] P(tp)     = sum(%h_z, [1])

Padding starts as zero (parameters are stored that way) and most ops keep it so; only where that is not known a mask is
inserted. Cost: one local copy per mask, none in graphs whose dims divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.collectives import is_collective
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import dist_of, dists_of, phase_of, tensor_of
from fxpar.ir.pass_base import Tier, insert, replace_operands, set_results, tensor_operands
from fxpar.ops.layout import zero_padding
from fxpar.ops.traits import KEEPS_ZERO

aten = torch.ops.aten
own = torch.ops.fxpar

_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_ALWAYS_ZERO = {own.cross_entropy_backward.default, own.embedding_backward.default}
# These know which columns are classes and leave padding out by themselves.
_AWARE = {own.cross_entropy.default, own.cross_entropy_backward.default, own.embedding.default}


@dataclass(frozen=True)
class MaskPadding:
    """No options."""

    name: ClassVar[str] = "mask_padding"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        known: dict[tuple[int, Any], tuple[int, ...]] = {}  # what nodes say is shared by repeated layers
        padded = {n: _padded(n, known) for n in graph.graph.nodes if n.op in ("placeholder", "call_function")}
        if not any(padded.values()):
            return
        zero: dict[fx.Node, bool] = {}
        masked: dict[fx.Node, fx.Node] = {}
        for node in list(graph.graph.nodes):
            if node.op == "output":
                set_results(graph.graph, [_clean(graph.graph, r, node, padded, zero, masked) for r in graph.results])
            elif node in padded:
                _mask_contracted(graph.graph, node, padded, zero, masked)
                zero[node] = not padded[node] or _stays_zero(node, padded, zero)


def _padded(node: fx.Node, known: dict[tuple[int, Any], tuple[int, ...]]) -> tuple[int, ...]:
    dist, meta = node.meta.get("dist"), node.meta.get("tensor")
    if not isinstance(dist, DistConfig) or meta is None or not any(dist.dims):
        return ()
    key = id(dist), meta.shape
    if key not in known:
        known[key] = dist.padded_dims(meta.shape)
    return known[key]


def _mask_contracted(graph: fx.Graph, node: fx.Node, padded: dict, zero: dict, masked: dict) -> None:
    """Clean the operands that the node sums over a padded dim."""
    partial = {a for c in dists_of(node) if c for a, _ in c.partial}
    operands = tensor_operands(node)
    if is_collective(node):
        # What is cut on another axis as well can no longer be masked, so a collective that keeps padding gets it clean.
        if padded[node]:
            replace_operands(node, [_clean(graph, o, node, padded, zero, masked) for o in operands])
        return
    if not partial or node.target in _AWARE:
        return
    needs = [any(e.axis in partial for d in padded.get(o, ()) for e in dist_of(o).dims[d]) for o in operands]
    if any(needs):
        clean = [
            _clean(graph, o, node, padded, zero, masked) if need else o for o, need in zip(operands, needs, strict=True)
        ]
        replace_operands(node, clean)


def _clean(graph: fx.Graph, value: fx.Node, user: fx.Node, padded: dict, zero: dict, masked: dict) -> fx.Node:
    """`value` with zero padding."""
    if zero.get(value, True):
        return value
    if value not in masked:
        dist, meta = dist_of(value), tensor_of(value)
        node = value
        for d in padded[value]:
            axis, size = dist.dims[d][0].axis, meta.shape[d]
            with graph.inserting_before(user):
                node = insert(
                    graph,
                    zero_padding,
                    (node, d, size, f"#{axis}"),
                    like=value,
                    tensor=meta,
                    dist=dist,
                    phase=phase_of(value),
                )
        masked[value] = node
    return masked[value]


def _stays_zero(node: fx.Node, padded: dict, zero: dict) -> bool:
    """Whether the node's padding is known to be zero, given what is known of its operands."""
    if node.op == "placeholder" or node.target in _ALWAYS_ZERO or is_collective(node):
        return True
    operands = tensor_operands(node)
    relevant = [o for o in operands if padded.get(o)]
    if not all(zero.get(o, False) for o in relevant) or not relevant:
        return False
    if node.target in _SUMS:
        # A term that is broadcast over the padded dim would not be zero there.
        return len(operands) == 2 and len(relevant) == 2
    return node.target in KEEPS_ZERO
