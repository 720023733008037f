"""Which part of a graph treats the rows of one layer of experts, each row by itself.

Between the first and the last product of a layer (`fxpar::expert_mm`) stand activations, gates, biases: what a row gets
there is made of that row, of weights, and of its expert. So another row may go through in its place.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.errors import ExpertRowsError
from fxpar.ir import collectives as c
from fxpar.ir.axes import EXPERTS
from fxpar.ir.graph import AnnotatedGraph, Size
from fxpar.ir.node_meta import (
    dists_of,
    fqn_of,
    is_backward,
    is_size,
    local_metas,
    local_tensor,
    tensor_of,
    wanted_dists,
)
from fxpar.ir.strategy import Strategy
from fxpar.ops.traits import BY_EXPERT, EXPERT_PRODUCTS_BACKWARD, is_elementwise

aten, own = torch.ops.aten, torch.ops.fxpar
PRODUCTS = (own.expert_mm.default, own.expert_mm_backward.default)


@dataclass(frozen=True)
class ExpertRows:
    """Rows `x` of the experts `ids` (as `same_ids` are too), and `y`, the last product of the forward. `dy` is the
    gradient of y, None without a backward, `dx` are those of x, as terms that the graph adds up later; `sums` over rows
    are gradients of weights. What has a value per row on the way is `inside`, with y and dx; what is made of ids and
    weights alone, such as a bias, `beside`.
    """

    ids: fx.Node
    same_ids: tuple[fx.Node, ...]
    x: fx.Node
    y: fx.Node
    dy: fx.Node | None
    dx: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    beside: tuple[fx.Node, ...]


def experts_axis(node: fx.Node, strategy: Strategy) -> str:
    """The axes, joined by '.', over which the experts of a product are apart and its tokens have not travelled yet; ""
    for none.
    """
    if node.target not in BY_EXPERT or not wanted_dists(node):
        return ""
    weight = dists_of(node)[0] if node.target in EXPERT_PRODUCTS_BACKWARD else wanted_dists(node)[1]
    assert weight is not None
    atoms = [atom for entry in weight.in_parts(strategy.atoms).dims[0] for atom in entry.axis.split(".")]
    apart = any(strategy.axis_in(atom, node.meta.get("rule")) == EXPERTS for atom in atoms if atom in strategy.atoms)
    return ".".join(entry.axis for entry in weight.dims[0]) if apart else ""


def layers_of(graph: AnnotatedGraph) -> list[list[fx.Node]]:
    """The products of each layer, forward and backward: those whose rows have the same experts, also where these are
    gathered more than once.
    """
    found: dict[tuple[fx.Node, tuple[Size, ...]], list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.target in PRODUCTS:
            source: Any = node.args[2]
            shape = local_tensor(source).shape
            while c.is_collective(source) or source.target is aten.detach.default:
                source = source.args[0]
            found.setdefault((source, shape), []).append(node)
    return list(found.values())


def expert_rows(graph: AnnotatedGraph, products: Sequence[fx.Node]) -> ExpertRows:
    """The rows that `products`, all of one layer, are of. Raises ExpertRowsError where rows are not treated each by
    itself, or are not of one width at both ends.
    """
    ends: dict[bool, list[fx.Node]] = {False: [], True: []}  # by whether backward
    for node in products:
        way = [other for other in products if is_backward(other) == is_backward(node)]
        if node.target is own.expert_mm.default and not _reaches(node, way):
            ends[is_backward(node)].append(node)
    same: list[Any] = list(dict.fromkeys(node.args[2] for node in products))
    walk = _Walk(graph, set(same), local_tensor(same[0]).shape, {*ends[False], *ends[True]})
    walk.run(products)
    begins = walk.begins
    last = max(ends[False], default=products[0])
    if [len(begins[False]), len(ends[False])] != [1, 1] or len(begins[True]) > 1:
        raise ExpertRowsError(graph.name, last.name, fqn_of(last), "is one of several that rows of its layer end with")
    x, dy = begins[False][0], next(iter(begins[True]), None)
    if tensor_of(x) != tensor_of(last):
        raise ExpertRowsError(graph.name, last.name, fqn_of(last), "makes rows of another width or dtype than it gets")
    dx, added = _summed(ends[True])
    inside = (*walk.inside, *added)
    return ExpertRows(min(same), tuple(same), x, last, dy, dx, tuple(walk.sums), inside, tuple(walk.beside))


def _summed(terms: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], list[fx.Node]]:
    """Fewer terms, where the graph adds some up and reads them nowhere else; and what adds them up."""
    found, added = list(terms), list[fx.Node]()
    for node in found:
        user = next(iter(node.users), node)
        pair = [term for term in found if [*term.users] == [user] and term < user]
        adds = user.target is aten.add.Tensor and not user.kwargs
        if adds and user not in added and len(pair) == 2:
            added.append(user)
            found.append(user)  # which may be one of the next pair
    return tuple(term for term in found if not any(user in added for user in term.users)), added


def _reaches(node: fx.Node, products: Sequence[fx.Node]) -> bool:
    """Whether another one of the products is made of it."""
    last, todo, seen = max(products), list(node.users), set[fx.Node]()
    while todo:
        user = todo.pop()
        if user in products:
            return True
        if user not in seen and user.op == "call_function" and user < last:
            seen.add(user)
            todo += user.users
    return False


@dataclass
class _Walk:
    """From the products to all that has a value per row, operands first; not beyond `ends`."""

    graph: AnnotatedGraph
    ids: set[fx.Node]
    shape: tuple[Size, ...]
    ends: set[fx.Node]
    begins: dict[bool, list[fx.Node]] = field(default_factory=lambda: {False: [], True: []})
    inside: dict[fx.Node, None] = field(default_factory=dict)
    beside: dict[fx.Node, None] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)

    def run(self, products: Sequence[fx.Node]) -> None:
        todo = [*products, *(user for ids in self.ids for user in ids.users if user.target is own.embedding.default)]
        heapq.heapify(todo)
        seen: set[fx.Node] = set()
        while todo:
            node = heapq.heappop(todo)
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            self._visit(node)
            if (node in self.inside or node in self.beside) and node not in self.ends:
                for user in node.users:
                    heapq.heappush(todo, user)

    def _visit(self, node: fx.Node) -> None:
        args: Any = node.args
        rows, begins = node.args[0] if node.args else None, self.begins[is_backward(node)]
        operands = set(node.all_input_nodes)
        of_rows = any(operand in self.inside and operand not in self.ends for operand in operands)
        if node.target in PRODUCTS and args[2] in self.ids:
            if rows not in self.inside and rows not in begins:
                begins.append(args[0])
            if node.target is own.expert_mm.default:
                self.inside[node] = None
            else:
                self.sums.append(node)
        elif node.target is own.embedding_backward.default and args[1] in self.ids and of_rows:
            self.sums.append(node)
        elif node.target is own.embedding.default and args[1] in self.ids:
            self.beside[node] = None
        elif not of_rows:
            if not self.ends & operands and not self._objection(node):
                self.beside[node] = None
        elif why := self._objection(node):
            raise ExpertRowsError(self.graph.name, node.name, fqn_of(node), why)
        else:
            self.inside[node] = None

    def _objection(self, node: fx.Node) -> str:
        """Why a node may not be one that treats each row by itself; "" if it is."""
        shape, rank = self.shape, len(self.shape)
        if node.target not in _DIMS and not is_elementwise(node.target):
            return f"is {node.target}, of which it is not known that it treats each row by itself"
        results = [meta for meta in local_metas(node) if meta is not None]
        moved = any(dim < rank for dim in _DIMS.get(node.target, _none)(node))
        if moved or any(meta.shape[:rank] != shape for meta in results):
            return "moves rows, or adds them up"
        known = {*self.inside, *self.beside, *self.begins[False], *self.begins[True]}
        for operand in node.all_input_nodes:
            if operand not in known and not is_size(operand):
                own_dims = len(local_tensor(operand).shape) - (len(results[0].shape) - rank)
                if any(size != 1 for size in local_tensor(operand).shape[: max(0, own_dims)]):
                    return f"reads %{operand.name}, which has values of its own for each row"
        return ""


def _none(node: fx.Node) -> list[int]:
    return []


def _at(position: int, default: int = 0) -> Any:
    """The dims that stand at this place of the arguments, as numbers from 0."""

    def dims(node: fx.Node) -> list[int]:
        operand: Any = node.args[0]
        whole = operand[0] if isinstance(operand, list | tuple) else operand
        found: Any = node.args[position] if len(node.args) > position else default
        metas = [meta for meta in (*local_metas(whole), *local_metas(node)) if meta is not None]
        rank = max(len(meta.shape) for meta in metas)
        return [dim % rank for dim in (found if isinstance(found, list | tuple) else [found])]

    return dims


_DIMS: dict[Any, Any] = {
    aten.slice.Tensor: _at(1),
    aten.slice_backward.default: _at(2),
    aten.select.int: _at(1),
    aten.select_backward.default: _at(2),
    aten.unbind.int: _at(1),
    aten.split.Tensor: _at(2),
    aten.split_with_sizes.default: _at(2),
    aten.cat.default: _at(1),
    aten.sum.dim_IntList: _at(1),
    aten.mean.dim: _at(1),
    aten.unsqueeze.default: _at(1),
    aten.squeeze.dim: _at(1),
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten.expand.default, aten.clone.default), _none),
    **dict.fromkeys((operator.getitem, c.all_reduce), _none),
    c.all_gather: _at(2),
    c.reduce_scatter: _at(3),
    c.shard: _at(2),
    c.all_to_all: lambda node: _at(2)(node) + _at(4)(node),
}
"""What treats each row by itself if the dims that it works on are none of the rows' own."""
