"""Global to local: sizes in the arguments become those of a rank's own piece.

Before: the graph speaks of whole tensors. After: `meta["local"]` holds the local shape of every value, and shape
arguments match it. Integers that were computed from a dynamic dim keep their *global* meaning and are divided where a
size is used, by the placement there; a batch input that arrives sharded has its size multiplied up first.

    %n : int = sym_size(%ids, 1)                %n_l = sym_size(%ids, 1); %n = mul(%n_l, 2)
    %y : [T, 64@tp] = view(%x, [%n, 64])        %y = reshape(%x, [%n, 32])

Views become reshapes: after a collective a piece may be contiguous where the whole was not. Cost: none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, dists_of, tensor_metas, tensor_of, whole_meta
from fxpar.ir.pass_base import Tier
from fxpar.ops.traits import SIZES

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default}
_Known = dict[tuple[TensorMeta, int], tuple[DistConfig, TensorMeta]]  # of placements by identity, and what keeps that
_END = 2**62  # slices to the end are written with a huge number


@dataclass(frozen=True)
class GlobalToLocal:
    """No options."""

    name: ClassVar[str] = "global_to_local"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        divided: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and node.target is aten.sym_size.int:
                _multiply_up(graph.graph, node)
        known: _Known = {}  # layers that repeat share descriptions
        for node in list(graph.graph.nodes):
            if "dist" not in node.meta:
                continue
            _set_local(node, known)
            if node.op == "call_function":
                with graph.graph.inserting_before(node):
                    _rewrite(node, Divider(graph.graph, divided))


def _set_local(node: fx.Node, known: _Known) -> None:
    pairs = zip(tensor_metas(node), dists_of(node), strict=True)
    found = tuple(_local(meta, dist, known) if meta and dist else None for meta, dist in pairs)
    if found:
        node.meta["local"] = found if isinstance(whole_meta(node), tuple) else found[0]


def _local(meta: TensorMeta, dist: DistConfig, known: _Known) -> TensorMeta:
    if not any(dist.dims):
        return meta
    key = meta, id(dist)
    if key not in known:
        known[key] = dist, TensorMeta(dist.local_shape(meta.shape), meta.dtype)
    return known[key][1]


def _multiply_up(graph: fx.Graph, node: fx.Node) -> None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dim: int = node.args[1]  # type: ignore[assignment]
    degree = dist_of(source).degrees(dim)
    if degree == 1:
        return
    with graph.inserting_after(node):
        whole = graph.call_function(operator.mul, (node, degree))
    whole.meta.update(node.meta)
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


class Divider:
    """Local size of a dim: integers are cut, integer nodes divided once per divisor and shared."""

    def __init__(self, graph: fx.Graph, made: dict[tuple[fx.Node, int], fx.Node]) -> None:
        self.graph, self.made = graph, made

    def __call__(self, size: Any, dist: DistConfig, dim: int) -> Any:
        degree = dist.degrees(dim)
        if degree == 1 or (isinstance(size, int) and (size < 0 or size >= _END)):
            return size
        if not isinstance(size, fx.Node):
            for entry in dist.dims[dim]:
                size = -(-size // dist.mesh.degree(entry.axis))
            return size
        key = (size, degree)
        if key not in self.made:
            with self.graph.inserting_after(size):
                node = self.graph.call_function(operator.floordiv, key)
            node.meta.update(size.meta)
            self.made[key] = node
        return self.made[key]


def _rewrite(node: fx.Node, divide: Divider) -> None:
    """Make the size arguments of one op local."""
    handler = _SPECIAL.get(node.target)  # type: ignore[call-overload]
    if handler is not None:
        handler(node, divide)
    position = SIZES.get(node.target)  # type: ignore[call-overload]
    if position is None:
        return
    dist = dist_of(node)
    sizes: Any = node.args[position]
    new = [divide(size, dist, d) for d, size in enumerate(sizes)]
    _set_arg(node, position, new)
    if node.target in _VIEWS:
        node.target = aten.reshape.default


def _set_arg(node: fx.Node, position: int, value: Any) -> None:
    args = list(node.args)
    args[position] = value
    node.args = tuple(args)


def _slice(node: fx.Node, divide: Divider) -> None:
    """slice(x, dim, start, end): bounds on a cut dim scale with it."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    _bounds(node, 1, dist_of(source), tensor_of(source), divide)


def _slice_backward(node: fx.Node, divide: Divider) -> None:
    _bounds(node, 2, dist_of(node), tensor_of(node), divide)


def _bounds(node: fx.Node, at: int, dist: DistConfig, meta: TensorMeta, divide: Divider) -> None:
    dim: int = (node.args[at] if len(node.args) > at else 0) % len(meta.shape)  # type: ignore[operator]
    whole = meta.shape[dim]
    for position in (at + 1, at + 2):
        value = node.args[position] if len(node.args) > position else None
        if isinstance(value, int) and value < 0 and isinstance(whole, int) and dist.dims[dim]:
            value = max(value + whole, 0)  # counted from the end, which padding may have moved
        if value is not None:
            _set_arg(node, position, divide(value, dist, dim))


def _split(node: fx.Node, divide: Divider) -> None:
    """split_with_sizes(x, sizes, dim) and split(x, size, dim)."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dim: int = (node.args[2] if len(node.args) > 2 else 0) % len(tensor_of(source).shape)  # type: ignore[operator]
    dists: tuple[Any, ...] = dists_of(node)
    sizes: Any = node.args[1]
    if isinstance(sizes, list | tuple):
        _set_arg(node, 1, [divide(s, d, dim) for s, d in zip(sizes, dists, strict=True)])
    else:
        _set_arg(node, 1, divide(sizes, dists[0], dim))


_SPECIAL: dict[Any, Callable[[fx.Node, Divider], None]] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
