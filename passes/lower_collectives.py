"""Lower collectives: single-axis steps become `_c10d_functional` calls on packed buffers, each with its wait.

Before: `all_gather(x, "tp", dim, sections)` and the like, on local shapes.
After: pack (which part goes to which rank) -> collective -> wait -> unpack. Process groups are tokens `@tp`, this
rank's position on an axis is a token `#tp`; both are filled in when the graph is bound to a rank.

    %y = all_gather(%x, "tp", 1, ())            %r = lift(%x)
                                                %c = _c10d_functional.all_gather_into_tensor(%r, 2, "@tp")
                                                %w = _c10d_functional.wait_tensor(%c)
                                                %y = unpack(%w, 1)

Cost: the collective, and a local copy where the dim is not the outermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir import collectives as c
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import local_tensor
from fxpar.ir.pass_base import Tier
from fxpar.ops import copies, layout

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class LowerCollectives:
    """No options."""

    name: ClassVar[str] = "lower_collectives"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in list(graph.graph.nodes):
            if c.is_collective(node):
                with graph.graph.inserting_before(node):
                    value = _LOWER[node.target](_Emitter(graph, node), *node.args)
                value.meta.update({k: node.meta[k] for k in ("tensor", "dist", "local", "buffer") if k in node.meta})
                node.replace_all_uses_with(value)
                graph.graph.erase_node(node)


class _Emitter:
    """Makes the calls that replace one step."""

    def __init__(self, graph: AnnotatedGraph, node: fx.Node) -> None:
        self.graph, self.node = graph.graph, node
        self.mesh = graph.strategy.mesh

    def degree(self, axis: str) -> int:
        return self.mesh.degree(axis)

    def call(self, target: Any, *args: Any, local: TensorMeta | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        for key in ("fqn", "reader", "source", "backward", "phase", "bucket"):
            if key in self.node.meta:
                node.meta[key] = self.node.meta[key]
        node.meta["local"] = local
        node.meta["tensor"] = local  # packed buffers have no global shape of their own
        return node

    def communicate(self, target: Any, axis: str, sent: TensorMeta, got: TensorMeta, *args: Any) -> fx.Node:
        """The collective and its wait. `meta["comm"]` says what one rank sends over the wire (ring algorithms)."""
        node = self.call(target, *args, f"@{axis}", local=got)
        node.meta["comm"] = (axis, sent)
        return self.call(c10d.wait_tensor.default, node, local=got)


def _shape(node: fx.Node) -> TensorMeta:
    return local_tensor(node)


def _rows(meta: TensorMeta, rows: int) -> TensorMeta:
    return TensorMeta((rows, *meta.shape), meta.dtype)


def _cut(meta: TensorMeta, dim: int, degree: int) -> TensorMeta:
    size: Any = meta.shape[dim]
    piece = -(-size // degree) if isinstance(size, int) else size / degree
    return TensorMeta((*meta.shape[:dim], piece, *meta.shape[dim + 1 :]), meta.dtype)


def _all_reduce(emit: _Emitter, x: fx.Node, axis: str, op: str) -> fx.Node:
    here = _shape(x)
    if op == "logsumexp":
        rows = emit.call(layout.lift, x, local=_rows(here, 1))
        gathered = emit.communicate(
            c10d.all_gather_into_tensor.default, axis, here, _rows(here, emit.degree(axis)), rows, emit.degree(axis)
        )
        return emit.call(torch.ops.aten.logsumexp.default, gathered, [0], local=here)
    return emit.communicate(c10d.all_reduce.default, axis, here, here, x, op)


def _all_gather(emit: _Emitter, x: fx.Node, axis: str, dim: int, sections: tuple[int, ...]) -> fx.Node:
    here, degree = _shape(x), emit.degree(axis)
    rows = emit.call(layout.lift, x, local=_rows(here, 1))
    gathered = emit.communicate(c10d.all_gather_into_tensor.default, axis, here, _rows(here, degree), rows, degree)
    return emit.call(layout.unpack, gathered, dim, sections, _true_size(emit, dim, here, degree))


def _true_size(emit: _Emitter, dim: int, piece: TensorMeta, degree: int) -> int:
    """Size to cut a gathered dim back to, or -1 where nothing was padded."""
    whole, part = local_tensor(emit.node).shape[dim], piece.shape[dim]
    if isinstance(whole, int) and isinstance(part, int) and whole != part * degree:
        return whole
    return -1


def _reduce_scatter(emit: _Emitter, x: fx.Node, axis: str, op: str, dim: int, sections: tuple[int, ...]) -> fx.Node:
    degree = emit.degree(axis)
    piece = _cut(_shape(x), dim, degree)
    rows = emit.call(layout.pack, x, degree, dim, sections, local=_rows(piece, degree))
    row = emit.communicate(c10d.reduce_scatter_tensor.default, axis, _shape(x), _rows(piece, 1), rows, op, degree)
    return emit.call(layout.lower, row)


def _all_to_all(
    emit: _Emitter,
    x: fx.Node,
    axis: str,
    gather_dim: int,
    gather_sections: tuple[int, ...],
    dim: int,
    sections: tuple[int, ...],
) -> fx.Node:
    degree = emit.degree(axis)
    here = _shape(x)
    piece = _cut(here, dim, degree)
    rows = emit.call(layout.pack, x, degree, dim, sections, local=_rows(piece, degree))
    ones = [1] * degree
    received = emit.communicate(c10d.all_to_all_single.default, axis, here, _rows(piece, degree), rows, ones, ones)
    return emit.call(layout.unpack, received, gather_dim, gather_sections, _true_size(emit, gather_dim, here, degree))


def _shard(emit: _Emitter, x: fx.Node, axis: str, dim: int, sections: tuple[int, ...]) -> fx.Node:
    return emit.call(layout.take, x, emit.degree(axis), dim, sections, f"#{axis}")


def _partial(emit: _Emitter, x: fx.Node, axis: str) -> fx.Node:
    return emit.call(layout.keep_on_first, x, f"#{axis}")


def _shift(emit: _Emitter, x: fx.Node, axis: str) -> fx.Node:
    # Nothing stands between the wait and who reads it, so that it can sink.
    wait = emit.communicate(layout.shift, axis, _shape(x), _shape(x), x, emit.degree(axis), f"#{axis}")
    axes = tuple(axis.split("."))
    if not emit.mesh.ascends(axes):  # tokens are cut by axes in another order than that of ranks
        group = emit.mesh.group_of(emit.mesh.offset, axes)
        shift = wait.all_input_nodes[0]
        shift.args = (*shift.args, [sorted(group).index(rank) for rank in group])
    return wait


def _exchange(emit: _Emitter, x: fx.Node, axis: str, sent: fx.Node, received: fx.Node) -> fx.Node:
    got = _shape(emit.node)
    return emit.communicate(copies.exchange, axis, _shape(x), got, x, sent, received)


_LOWER: dict[Any, Any] = {
    c.all_reduce: _all_reduce,
    c.all_gather: _all_gather,
    c.reduce_scatter: _reduce_scatter,
    c.all_to_all: _all_to_all,
    c.shard: _shard,
    c.partial: _partial,
    c.shift: _shift,
    c.exchange: _exchange,
}
