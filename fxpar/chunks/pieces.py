"""A loss region once per chunk of tokens, one chunk after the other."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxpar.chunks.region import LossRegion
from fxpar.ir.dist_config import Placement, Shard
from fxpar.ir.dist_config import chunk as part_of
from fxpar.ir.graph import AnnotatedGraph, Size, TensorMeta
from fxpar.ir.node_meta import dist_of, is_backward, is_size, local_tensor, size_of, tensor_of
from fxpar.ir.pass_base import ancestors, replace_operands, tensor_operands
from fxpar.ops.traits import SIZES

aten = torch.ops.aten
_WIDE = torch.float32  # what terms of low precision are added up in


def cut_in_chunks(graph: AnnotatedGraph, region: LossRegion, chunks: int) -> None:
    """Run the region for one of `chunks` of the tokens after the other, in place. All of it is then part of the
    forward: what the backward reads are gradients of all tokens, joined, and sums over them.
    """
    _Cutter(graph.graph, region, chunks).cut()


@dataclass
class _Cutter:
    graph: fx.Graph
    region: LossRegion
    chunks: int
    number: int = 0  # of the chunk that is made
    integers: dict[Any, fx.Node] = field(default_factory=dict)
    lengths: dict[Size, fx.Node] = field(default_factory=dict)
    narrowed: dict[Any, fx.Node] = field(default_factory=dict)

    def cut(self) -> None:
        inside, head = set(self.region.nodes), self.region.head
        _move_up([o for n in self.region.nodes for o in n.all_input_nodes if o not in inside], head)
        given = {n: [u for u in n.users if u not in inside] for n in self.region.nodes}
        totals: dict[fx.Node, list[fx.Node]] = {n: [] for n, users in given.items() if users}
        with self.graph.inserting_before(head):
            for number in range(self.chunks):
                self.number = number
                copies = self._copies()
                for node, found in totals.items():
                    self._add(node, copies[node], found)
            for node, found in totals.items():
                whole = self._whole(node, found)
                for user in given[node]:
                    self._read(user, node, whole)
                if not whole.users:
                    self.graph.erase_node(whole)
        for node in reversed(self.region.nodes):
            self.graph.erase_node(node)

    # ------------------------------------------------------------------------------------------------ one chunk
    def _copies(self) -> dict[fx.Node, fx.Node]:
        """The region for one chunk."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.region.nodes:
            takes, makes = self.region.cuts.takes[node], self.region.cuts.makes[node]
            pairs = zip(tensor_operands(node), takes, strict=True)
            operands = [copies[o] if o in copies else self._narrow(o, lies) for o, lies in pairs]
            copy = copies[node] = self.graph.node_copy(node)
            copy.meta = {**node.meta, "backward": False, "chunk": self.number, "gradient": is_backward(node)}
            replace_operands(copy, operands)
            for key in ("tensor", "local"):
                metas = node.meta[key] if isinstance(node.meta[key], tuple) else (node.meta[key],)
                cut = tuple(self._cut_meta(m, p) if m else None for m, p in zip(metas, makes, strict=False))
                copy.meta[key] = cut if isinstance(node.meta[key], tuple) else cut[0]
            self._cut_sizes(copy, makes[0])
        return copies

    def _cut_meta(self, meta: TensorMeta, placement: Placement) -> TensorMeta:
        if not isinstance(placement, Shard):
            return meta
        shape = list(meta.shape)
        shape[placement.dim] = part_of(shape[placement.dim], self.chunks)
        return replace(meta, shape=tuple(shape))

    def _cut_sizes(self, copy: fx.Node, placement: Placement) -> None:
        """Make a size among the arguments that of the chunk."""
        position = SIZES.get(copy.target)  # type: ignore[call-overload]
        if position is None or not isinstance(placement, Shard):
            return
        sizes: list[Any] = list(copy.args[position])  # type: ignore[arg-type]
        size = sizes[placement.dim]
        if isinstance(size, fx.Node):
            with self.graph.inserting_before(copy):
                new = self._integer(operator.floordiv, size, self.chunks, size_of(size) / self.chunks)
            sizes[placement.dim] = new
        elif size >= 0:
            sizes[placement.dim] = size // self.chunks
        args = list(copy.args)
        args[position] = sizes
        copy.args = tuple(args)

    def _narrow(self, value: fx.Node, placement: Placement) -> fx.Node:
        """The chunk of a value from outside."""
        if not isinstance(placement, Shard):
            return value
        key = value, placement, self.number
        if key not in self.narrowed:
            dim, rows = placement.dim, len(placement.sections)
            shape = local_tensor(value).shape
            if rows > 1:  # [B * T] -> [B, T], cut, and back
                each = part_of(shape[dim], rows)
                whole = self._reshape(value, value, [*shape[:dim], rows, each, *shape[dim + 1 :]])
                found = self._slice(whole, value, dim + 1)
                left = part_of(shape[dim], self.chunks)
                self.narrowed[key] = self._reshape(found, value, [*shape[:dim], left, *shape[dim + 1 :]])
            else:
                self.narrowed[key] = self._slice(value, value, dim)
        return self.narrowed[key]

    def _slice(self, value: fx.Node, like: fx.Node, dim: int) -> fx.Node:
        size = local_tensor(value).shape[dim]
        start, end = (self._border(value, dim, n) for n in (self.number, self.number + 1))
        shape = list(local_tensor(value).shape)
        shape[dim] = part_of(size, self.chunks)
        return self._call(aten.slice.Tensor, (value, dim, start, end), like, shape)

    def _border(self, value: fx.Node, dim: int, number: int) -> Any:
        """Where chunk `number` begins."""
        size = local_tensor(value).shape[dim]
        each = part_of(size, self.chunks)
        if isinstance(each, int) or not number:
            return number * each if isinstance(each, int) else 0
        length = self._length(value, dim)
        step = self._integer(operator.floordiv, length, self.chunks, each)
        return step if number == 1 else self._integer(operator.mul, step, number, each * number)

    def _length(self, value: fx.Node, dim: int) -> fx.Node:
        """The size of a dim, read from the first value that has it."""
        size = local_tensor(value).shape[dim]
        if size not in self.lengths:
            self.lengths[size] = self._integer(aten.sym_size.int, value, dim, size)
        return self.lengths[size]

    def _reshape(self, value: fx.Node, like: fx.Node, shape: list[Size]) -> fx.Node:
        moving = [d for d, size in enumerate(shape) if not isinstance(size, int)]
        if len(moving) > 1:  # of several dynamic dims each needs an integer
            sizes: list[Any] = list(shape)
            for d in moving[1:]:
                sizes[d] = self._length(value, local_tensor(value).shape.index(shape[d]))
            sizes[moving[0]] = -1
        else:
            sizes = [-1 if d in moving else size for d, size in enumerate(shape)]
        return self._call(aten.reshape.default, (value, sizes), like, shape)

    def _integer(self, target: Any, first: fx.Node, second: int, size: Any) -> fx.Node:
        key = target, first, second
        if key not in self.integers:
            node = self.integers[key] = self.graph.call_function(target, (first, second))
            node.meta.update({"sym": size, "fqn": first.meta.get("fqn"), "source": first.meta.get("source")})
        return self.integers[key]

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, shape: list[Size]) -> fx.Node:
        node = self.graph.call_function(target, args)
        for key in ("fqn", "source", "dist"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        node.meta["tensor"] = node.meta["local"] = TensorMeta(tuple(shape), local_tensor(like).dtype)
        node.meta.update({"phase": "body", "backward": False, "chunk": self.number})
        return node

    # ------------------------------------------------------------------------------------------------ all chunks
    def _add(self, node: fx.Node, copy: fx.Node, found: list[fx.Node]) -> None:
        """Keep the chunk's part of a value that is read outside: to be joined, or in a sum so far."""
        if isinstance(self.region.cuts.makes[node][0], Shard) or not found:
            found.append(copy)
            return
        (so_far,) = found
        shape, dtype = list(local_tensor(node).shape), local_tensor(node).dtype
        if copy.target is aten.mm.default and dtype.itemsize >= _WIDE.itemsize:
            copy.target, copy.args = aten.addmm.default, (so_far, *copy.args)
            copy.meta.pop("dist_in", None)
            found[:] = [copy]
            return
        narrow = dtype.is_floating_point and dtype.itemsize < _WIDE.itemsize
        if narrow and local_tensor(so_far).dtype == dtype:
            so_far = self._cast(so_far, _WIDE)
        total = self._call(aten.add.Tensor, (so_far, copy), node, shape)
        _describe(total, node, local_tensor(so_far).dtype)
        total.meta["dist"] = dist_of(so_far)
        found[:] = [total]

    def _whole(self, node: fx.Node, found: list[fx.Node]) -> fx.Node:
        """A value of all tokens."""
        placement, meta = self.region.cuts.makes[node][0], local_tensor(node)
        if not isinstance(placement, Shard):
            (total,) = found
            whole = total if local_tensor(total).dtype == meta.dtype else self._cast(total, meta.dtype)
        elif len(placement.sections) > 1:
            dim, rows, shape = placement.dim, len(placement.sections), meta.shape
            each = part_of(part_of(shape[dim], rows), self.chunks)
            parts = [self._reshape(p, node, [*shape[:dim], rows, each, *shape[dim + 1 :]]) for p in found]
            joined = [*shape[:dim], rows, part_of(shape[dim], rows), *shape[dim + 1 :]]
            whole = self._call(aten.cat.default, (parts, dim + 1), node, joined)
            whole = self._reshape(whole, node, list(shape))
        else:
            whole = self._call(aten.cat.default, (found, placement.dim), node, list(meta.shape))
        for key in ("tensor", "local"):
            whole.meta[key] = node.meta[key]
        return whole

    def _read(self, user: fx.Node, node: fx.Node, whole: fx.Node) -> None:
        """Let a reader of the region's `node` take `whole`. A cast that only makes of a sum what it was before it was
        rounded is not needed.
        """
        total: Any = whole.args[0] if whole.target is aten._to_copy.default else whole
        if user.target is aten._to_copy.default and total is not whole and user.kwargs == {"dtype": _WIDE}:
            total.meta["dist"] = user.meta["dist"]
            user.replace_all_uses_with(total)
            self.graph.erase_node(user)
        else:
            user.replace_input_with(node, whole)

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        node = self._call(aten._to_copy.default, (value,), value, list(local_tensor(value).shape))
        node.kwargs = {"dtype": dtype}
        _describe(node, value, dtype)
        node.meta["dist"] = replace(dist_of(value), dtype=dtype)
        return node


def _describe(node: fx.Node, like: fx.Node, dtype: torch.dtype) -> None:
    """Let the value of `node`, which may be a result of the graph, have the shapes of another one."""
    node.meta["tensor"] = replace(tensor_of(like), dtype=dtype)
    node.meta["local"] = replace(local_tensor(like), dtype=dtype)


def _move_up(values: Iterable[fx.Node], head: fx.Node) -> None:
    """Compute the values, and what they are made of, in front of the head."""
    late = [n for n in ancestors(values) if n > head and n.op == "call_function"]
    for node in sorted(late):
        head.prepend(node)
        if not is_size(node) and is_backward(node):
            node.meta["backward"] = False
