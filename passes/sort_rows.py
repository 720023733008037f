"""Sort rows: the rows of a layer of experts are sorted by expert once, and not for each of its products.

Before: rows in the order of tokens, [N, K, D]; each product sorts them inside and puts its result back. After: rows by
expert, [N * K, D], from the first product to the last, with what is between them. The backward has the same order.
Where `exchange_tokens` says which slots have an expert on this rank, the rows are those alone: [M, D], a count that is
known at run time, and no other slot is computed.

    %x3 = expand(unsqueeze(%x, 1), [N, K, D])   %order, %counts = route_rows(%ids, E)
    %h = expert_mm(%x3, %w1, %ids)              %h = grouped_mm(dispatch(%x, %order, %ids), %w1, %counts)
    %a = silu(%h)                               %a = silu(%h)
    %r = expert_mm(%a, %w2, %ids)               %r = grouped_mm(%a, %w2, %counts)
    %y = weighted_sum(%r, %p)                   %y = combine(%r, %p, %order, %ids)

What is between products stays sorted if it is done to each row by itself; a value that anything else reads is put back
for it. Saves: two copies of the rows per product and more than one; never more copies than before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import local_meta, local_tensor
from fxpar.ir.pass_base import Tier, tensor_operands
from fxpar.ops.copies import own_rows
from fxpar.ops.traits import is_elementwise
from fxpar.rules.slots import ranks_alike

aten, own = torch.ops.aten, torch.ops.fxpar


@dataclass(frozen=True)
class SortRows:
    """No options."""

    name: ClassVar[str] = "sort_rows"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        sorting = _Sorting(graph.graph)
        for node in list(graph.graph.nodes):
            if node.op == "call_function":
                with graph.graph.inserting_before(node):
                    sorting.visit(node)
        sorting.finish()


@dataclass(frozen=True)
class _Route:
    """What a layer's rows are sorted by: the nodes, N and K of the rank's tokens, and how many rows there are."""

    ids: fx.Node
    order: fx.Node
    counts: fx.Node
    rows: Any
    tokens: Any
    slots: int


@dataclass
class _Sorting:
    """One walk. `rows`: of a value [N, K, D], its route and its rows by expert [M, D]."""

    graph: fx.Graph
    routes: dict[tuple[fx.Node, int], _Route] = field(default_factory=dict)
    rows: dict[fx.Node, tuple[_Route, fx.Node]] = field(default_factory=dict)
    taken: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    done: list[fx.Node] = field(default_factory=list)

    def visit(self, node: fx.Node) -> None:
        """Sort what a call makes, if it is one that may be."""
        handler = _HANDLERS.get(node.target)  # type: ignore[call-overload]
        if handler is not None:
            handler(self, node)
        elif is_elementwise(node.target):
            self._elementwise(node)

    def finish(self) -> None:
        """Put rows back where others read them, and drop what nobody reads any more."""
        for node, (route, rows) in self.rows.items():
            if any(user not in self.rows and user not in self.done for user in node.users):
                with self.graph.inserting_after(rows):
                    placed = self._call(node, own.place_rows.default, (rows, route.order, route.ids), local_meta(node))
                self._stand_in(node, placed)
        for node in reversed([n for n in self.graph.nodes if n in self.rows or n in self.done]):
            if not node.users:
                self.graph.erase_node(node)

    # ------------------------------------------------------------------------------------------------- calls
    def products(self, node: fx.Node) -> None:
        """expert_mm(x, weight, ids)."""
        args: Any = node.args
        x, weight, ids = args
        experts: Any = local_tensor(weight).shape[0]
        route = self._route(node, ids, experts)
        self._make(node, route, own.grouped_mm.default, (self._by_expert(x, route), weight, route.counts))

    def gradient(self, node: fx.Node) -> None:
        """expert_mm_backward(grad, x, ids, experts)."""
        given: Any = node.args
        grad, x, ids, experts = given
        route = self._route(node, ids, experts)
        args = (self._by_expert(grad, route), self._by_expert(x, route), route.counts)
        self._replace(node, own.grouped_mm_backward.default, args)

    def weigh(self, node: fx.Node) -> None:
        """weighted_sum(rows, weights)."""
        args: Any = node.args
        rows, weights = args
        if rows in self.rows:
            route, rows = self.rows[rows]
            self._replace(node, own.combine.default, (rows, weights, route.order, route.ids))

    def weigh_backward(self, node: fx.Node) -> None:
        """weighted_sum_backward(grad, rows, weights) -> (drows, dweights)."""
        given: Any = node.args
        grad, rows, weights = given
        if rows not in self.rows:
            return
        route, rows = self.rows[rows]
        drows, dweights = local_meta(node)  # type: ignore[misc]
        args = (grad, rows, weights, route.order)
        made = self._call(node, own.combine_backward.default, args, (self._sorted(drows, route), dweights))
        for user in list(node.users):
            if user.args[1] == 0:
                self._make(user, route, operator.getitem, (made, 0))
            else:
                user.args = (made, 1)
        self.done.append(node)

    def total(self, node: fx.Node) -> None:
        """sum(rows, [1], keepdim): what tokens get back from their rows."""
        given: Any = node.args
        rows, dims, *rest = given
        if rows not in self.rows or list(dims) not in ([1], [-2]) or node.kwargs:
            return
        route, rows = self.rows[rows]
        args, meta = (rows, None, route.order, route.ids), local_tensor(node)
        if not any(rest):
            self._replace(node, own.combine.default, args)
            return
        flat = TensorMeta((meta.shape[0], meta.shape[2]), meta.dtype)
        self._replace(node, aten.unsqueeze.default, (self._call(node, own.combine.default, args, flat), 1))

    def last_dim(self, node: fx.Node) -> None:
        """split(x, size, 2), slice(x, 2, start, end): calls that name a dim, which is the last."""
        at = _DIM_AT[node.target]
        x: Any = node.args[0]
        tensors = x if isinstance(x, list | tuple) else [x]
        route = self._common(tensors)
        dim = node.args[at] if len(node.args) > at else 0
        if route is None or dim not in (2, -1):
            return
        found = [self._by_expert(t, route) for t in tensors]
        args = [found if isinstance(x, list | tuple) else found[0], *node.args[1:]]
        args[at] = -1
        self._make(node, route, node.target, tuple(args))

    def part_backward(self, node: fx.Node) -> None:
        """slice_backward(grad, sizes, 2, start, end, step)."""
        given: Any = node.args
        grad, sizes, dim, *rest = given
        route = self._common([grad])
        if route is None or dim not in (2, -1):
            return
        rows = route.rows
        if not isinstance(rows, int):
            rows = self._call(node, aten.sym_size.int, (route.order, 0), None)
            del rows.meta["tensor"], rows.meta["local"]
            rows.meta["sym"] = route.rows
        self._make(node, route, node.target, (self._by_expert(grad, route), [rows, sizes[2]], -1, *rest))

    def item(self, node: fx.Node) -> None:
        """One result of several."""
        source: Any = node.args[0]
        if source in self.rows:
            route, rows = self.rows[source]
            self._make(node, route, operator.getitem, (rows, node.args[1]))

    def _elementwise(self, node: fx.Node) -> None:
        operands = tensor_operands(node)
        route = self._common([o for o in operands if self._rank(o) > 1])
        if route is None or isinstance(local_meta(node), tuple):
            return

        def sort(arg: fx.Node) -> fx.Node:
            return self._by_expert(arg, route) if arg in operands and self._rank(arg) > 1 else arg

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), sort)
        self._make(node, route, node.target, args, kwargs)

    # ------------------------------------------------------------------------------------------------- nodes
    def _route(self, node: fx.Node, ids: fx.Node, experts: int) -> _Route:
        key = ids, experts
        if key not in self.routes:
            shape: Any = local_tensor(ids).shape
            tokens, slots = shape
            made = next((user for user in ids.users if user.target is own_rows and user.args == key), None)
            if made is None:
                metas = TensorMeta((tokens * slots,), torch.int64), TensorMeta((experts,), torch.int64)
                made = self._call(node, own.route_rows.default, key, metas)
                made.meta["experts"] = "", ranks_alike(node)
            results: Any = local_meta(made)
            order, counts = results
            first = self._call(node, operator.getitem, (made, 0), order)
            second = self._call(node, operator.getitem, (made, 1), counts)
            second.meta["experts"] = made.meta.pop("experts")
            self.routes[key] = _Route(ids, first, second, order.shape[0], tokens, slots)
        return self.routes[key]

    def _common(self, values: Any) -> _Route | None:
        """The one route of values of which some are sorted and all are [N, K, D] of its rows."""
        routes = {self.rows[value][0] for value in values if value in self.rows}
        if len(routes) != 1:
            return None
        (route,) = routes
        shapes = [local_tensor(value).shape for value in values]
        return route if all(len(s) == 3 and s[:2] == (route.tokens, route.slots) for s in shapes) else None

    def _rank(self, value: fx.Node) -> int:
        return len(local_tensor(value).shape)

    def _by_expert(self, value: Any, route: _Route) -> fx.Node:
        """A value [N, K, D] sorted by `route`."""
        if value in self.rows and self.rows[value][0] == route:
            return self.rows[value][1]
        key = value, route.order
        if key not in self.taken:
            meta = self._sorted(local_tensor(value), route)
            self.taken[key] = self._call(
                value, own.dispatch.default, (_repeated(value) or value, route.order, route.ids), meta
            )
        return self.taken[key]

    def _sorted(self, meta: TensorMeta | None, route: _Route) -> TensorMeta | None:
        return meta and TensorMeta((route.rows, *meta.shape[2:]), meta.dtype)

    def _make(self, node: fx.Node, route: _Route, target: Any, args: Any, kwargs: Any = None) -> None:
        """The rows by expert of what `node` makes."""
        meta = local_meta(node)
        found: Any = (
            tuple(self._sorted(m, route) for m in meta) if isinstance(meta, tuple) else self._sorted(meta, route)
        )
        self.rows[node] = route, self._call(node, target, args, found, kwargs)

    def _replace(self, node: fx.Node, target: Any, args: Any) -> None:
        """What `node` makes, made otherwise."""
        self._stand_in(node, self._call(node, target, args, local_meta(node)))
        self.done.append(node)

    def _stand_in(self, node: fx.Node, new: fx.Node) -> None:
        new.meta.update({key: node.meta[key] for key in ("tensor", "dist") if key in node.meta})
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.rows and user not in self.done)

    def _call(self, like: fx.Node, target: Any, args: Any, meta: Any, kwargs: Any = None) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs or {})
        for key in ("fqn", "reader", "source", "backward", "phase"):
            if key in like.meta:
                made.meta[key] = like.meta[key]
        made.meta.update(tensor=meta, local=meta)  # of a rank: rows by expert are no part of a whole
        return made


def _repeated(value: fx.Node) -> fx.Node | None:
    """The tokens [N, D] that a value [N, K, D] has once per slot."""
    if value.target is not aten.expand.default:
        return None
    once: Any = value.args[0]
    if once.target is not aten.unsqueeze.default or once.args[1] not in (1, -2):
        return None
    return once.args[0]


_DIM_AT: dict[Any, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.cat.default: 1,
    aten.slice.Tensor: 1,
}
_HANDLERS: dict[Any, Callable[[_Sorting, fx.Node], None]] = {
    own.expert_mm.default: _Sorting.products,
    own.expert_mm_backward.default: _Sorting.gradient,
    own.weighted_sum.default: _Sorting.weigh,
    own.weighted_sum_backward.default: _Sorting.weigh_backward,
    aten.sum.dim_IntList: _Sorting.total,
    operator.getitem: _Sorting.item,
    aten.slice_backward.default: _Sorting.part_backward,
    **dict.fromkeys(_DIM_AT, _Sorting.last_dim),
}
