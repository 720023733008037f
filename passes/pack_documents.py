"""Pack documents: a graph of one sequence becomes one of a row of documents that do not see each other.

Before: a captured graph, which is what the model does to one sequence. After: two more inputs of the batch,
`document_ids` and `document_positions` [1, T]; the loss of a row is the sum of its documents' losses, each run alone,
and so are the gradients:

    %k = arange(T)                          %k = view(%document_positions, [T])
    %o = attention(%q, %k, %v, None)        %o = attention(%q, %k, %v, %document_ids)
    %p = _softmax(%s, -1)                   %m = ne(docs [T, 1], docs [1, T]); %p = _softmax(masked_fill(%s, %m, -inf))
    %c = cumsum(%x, 1)                      less what the tokens before the document had added up to
    %w = slice(%table, 0, 0, T)             %w = embedding(%table, %positions)

It is done only where `fxpar.flow` proves that nothing else mixes tokens. Padding is then a document of its own; whether
its loss is nothing is proved as well.

Cost: none in bytes sent. A softmax that is written out gets a mask of T x T booleans, made once per graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import PackingError
from fxpar.flow import TokenFlow, in_words, token_flow
from fxpar.ir.copies import copy_graph
from fxpar.ir.graph import (
    DOCUMENTS,
    POSITIONS,
    Dim,
    ForwardGraph,
    Input,
    LogicalGraph,
    Packing,
    Size,
    TensorMeta,
    dim_symbol,
)
from fxpar.ir.node_meta import is_size, size_of, tensor_of
from fxpar.ops.traits import DOCUMENTS_AT
from fxpar.torch_api.modules import lazy_module

aten = torch.ops.aten
own = torch.ops.fxpar

_TOKENS = "T"


def pack_documents(logical: LogicalGraph, *, force: bool = False) -> LogicalGraph:
    """The graph of a row of documents. `force`: also if the documents would not be kept apart, or are not known to be.

    Raises PackingError, which names the first op that mixes documents and its line of source.
    """
    tokens = next((dim for dim in logical.dims if dim.name == _TOKENS), None)
    if tokens is None:
        raise PackingError(logical.name, "it has no dim of tokens")
    flow = token_flow(logical, dim_symbol(_TOKENS), "documents")
    if flow.hazard is not None and not force:
        raise PackingError(logical.name, in_words(flow.hazard))
    new: dict[fx.Node, fx.Node] = {}
    graph = copy_graph(logical.gm.graph, new)
    rewrite = _Rewrite(graph, flow, new, logical)
    inputs = rewrite.run()
    graph.eliminate_dead_code()
    graph.lint()
    dims = tuple(Dim(d.name, d.example) if d is tokens else d for d in logical.dims)
    kept = set(graph.nodes)
    hazards = (
        _padding_hazard(logical, flow),
        _order_hazard(logical, flow, {old for old, node in new.items() if node in kept}),
    )
    packing = Packing(hazards[0], tokens.minimum, tokens.maximum, hazards[1])
    return replace(logical, gm=lazy_module(logical.gm, graph), inputs=inputs, dims=dims, packing=packing)


def packed_if_proved(logical: LogicalGraph, *, force: bool = False) -> tuple[LogicalGraph, str]:
    """`pack_documents`, or the graph as it is and why it stays so. A graph whose rows are packed stays as it is."""
    if logical.packing is not None:
        return logical, ""
    try:
        return pack_documents(logical, force=force), ""
    except PackingError as error:
        return logical, error.why


def _padding_hazard(logical: LogicalGraph, flow: TokenFlow) -> str | None:
    """Why a row must not be padded by one more document, if it must not."""
    if flow.hazard is not None:
        return in_words(flow.hazard)
    for node, out in zip(logical.results, logical.outputs, strict=True):
        found: Any = flow.flows.get(node)
        if out.kind == "loss" and found.padded != 0:
            return f"{in_words(replace(found, why='sums up all tokens, padding included'))}"
    return None if flow.unusable is None else in_words(flow.unusable)


def _order_hazard(logical: LogicalGraph, flow: TokenFlow, kept: set[fx.Node]) -> str | None:
    """Why the tokens of a row must lie in their order, if they must. Packing has left these nodes."""
    for first in (flow.hazard, *flow.ordered):
        if first is not None and (first.origin is None or first.origin in kept):
            return in_words(first)
    sizes = ((info.fqn, size) for info in logical.inputs if info.kind == "batch" for size in info.meta.shape)
    others = [fqn for fqn, size in sizes if not isinstance(size, int) and size != dim_symbol(_TOKENS)]
    return f"{others[0]!r} of the batch has another length than the tokens" if others else None


@dataclass
class _Rewrite:
    """Rewrites the sites of `flow` in a copy of the graph; `new` leads from a node to its copy."""

    graph: fx.Graph
    flow: TokenFlow
    new: dict[fx.Node, fx.Node]
    logical: LogicalGraph
    masks: dict[tuple[int, int, int], fx.Node] = field(default_factory=dict)

    def run(self) -> tuple[Input, ...]:
        """Do it; the inputs of the new graph."""
        self.token = dim_symbol(_TOKENS)
        inputs = self._placeholders()
        self.length = self._length_node()
        with self.graph.inserting_after(self.length):
            self.positions = self._like(
                self.length, aten.view.default, (self.position_input, [self.length]), (self.token,)
            )
        self.first_row: fx.Node | None = None
        sliced = self._sliced_tables()
        # Backwards of what is told: behind the gradient they have the same operands.
        told = {node.args[:2] for node, site in self.flow.sites.items() if site == "documents"}
        for old, node in self.new.items():
            site = self.flow.sites.get(old)
            if site == "positions":
                self._positions(node)
            elif site == "documents":
                self._tell(node)
            elif site == "softmax":
                self._softmax(old, node)
            elif site == "count":
                self._count(old, node)
            elif site == "table":
                self._table(node)
            elif node.op == "call_function" and node.target in DOCUMENTS_AT and old.args[1:3] in told:
                self._tell(node)
            elif node.op == "call_function" and node.target is aten.slice_backward.default and _key(old) in sliced:
                self._table_backward(node)
        return inputs

    def _tell(self, node: fx.Node) -> None:
        """Tell a call the documents. A call of the user's may have its own, which stay; padding is one more of them."""
        at = DOCUMENTS_AT[node.target]
        if not (isinstance(self.logical, ForwardGraph) and node.args[at] is not None):
            node.args = (*node.args[:at], self.documents, *node.args[at + 1 :])

    # ------------------------------------------------------------------------------------------------- inputs
    def _placeholders(self) -> tuple[Input, ...]:
        inputs = list(self.logical.inputs)
        nodes = {info.fqn: self.new[n] for n, info in zip(self.logical.placeholders, inputs, strict=True)}
        meta = TensorMeta((1, self.token), torch.int64)
        for name in (DOCUMENTS, POSITIONS):
            known = next((i for i in inputs if i.kind == "batch" and i.fqn == name), None)
            if known is not None:
                continue
            last = max(i for i, info in enumerate(inputs) if info.kind == "batch")
            with self.graph.inserting_after(nodes[inputs[last].fqn]):
                node = self.graph.placeholder(_unused(name, self.graph))
            node.meta.update(tensor=meta, fqn="", source=None, backward=False)
            inputs.insert(last + 1, Input("batch", name, meta))
            nodes[name] = node
        self.documents, self.position_input = nodes[DOCUMENTS], nodes[POSITIONS]
        return tuple(inputs)

    def _length_node(self) -> fx.Node:
        """The node whose value is the number of tokens."""
        for node in self.graph.nodes:
            if node.meta.get("sym") == self.token:
                return node
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.call_function(aten.sym_size.int, (self.documents, 1))
        node.meta.update(sym=self.token, fqn="", source=None, backward=False)
        return node

    # ------------------------------------------------------------------------------------------------- sites
    def _positions(self, node: fx.Node) -> None:
        """`arange(a, a + T)`."""
        meta = tensor_of(node)
        start: Any = 0 if node.target is aten.arange.default else node.args[0]
        with self.graph.inserting_before(node):
            value = self.positions
            if start:
                value = self._like(node, aten.add.Tensor, (value, start), meta.shape)
            if meta.dtype != torch.int64:
                value = self._cast(node, value, meta.shape, meta.dtype)
        node.replace_all_uses_with(value)

    def _softmax(self, old: fx.Node, node: fx.Node) -> None:
        source: Any = node.args[0]
        meta = tensor_of(source)
        dim: Any = node.args[1]
        flow: Any = self.flow.flows[old]
        rank = len(meta.shape)
        keys = dim % rank
        (queries,) = (s.dim for s in flow.dims if s.dim != keys)
        mask = self._mask(rank, queries, keys)
        with self.graph.inserting_before(node):
            hidden = self._like(node, aten.masked_fill.Scalar, (source, mask, float("-inf")), meta.shape, meta.dtype)
        node.args = (hidden, *node.args[1:])

    def _mask(self, rank: int, queries: int, keys: int) -> fx.Node:
        """True for two tokens of different documents, of so many dims; made once, at the top."""
        found = self.masks.get((rank, queries, keys))
        if found is not None:
            return found

        def spread(dim: int) -> tuple[Size, ...]:
            return tuple(self.token if d == dim else 1 for d in range(rank))

        def sizes(shape: tuple[Size, ...]) -> list[Any]:
            return [self.length if size == self.token else size for size in shape]

        with self.graph.inserting_after(self.positions):
            pair = tuple(self.token if d in (queries, keys) else 1 for d in range(rank))
            mask = self._like(self.length, aten.ne.Tensor, (None, None), pair, torch.bool)
        with self.graph.inserting_before(mask):
            mask.args = tuple(
                self._like(self.length, aten.view.default, (self.documents, sizes(spread(d))), spread(d))
                for d in (queries, keys)
            )
        self.masks[rank, queries, keys] = mask
        return mask

    def _count(self, old: fx.Node, node: fx.Node) -> None:
        """`cumsum(x, dim)`, less what it was before the document."""
        meta = tensor_of(node)
        source: Any = node.args[0]
        dim: Any = node.args[1] % len(meta.shape)  # type: ignore[operator]
        known: Any = self.flow.flows[old.args[0]]  # type: ignore[index]
        users = list(node.users)
        with self.graph.inserting_after(node):
            result = self._like(node, aten.sub.Tensor, (node, node), meta.shape, meta.dtype)
        with self.graph.inserting_before(result):
            if meta.dtype.is_floating_point:
                result.args = self._counted_constant(result, meta, dim, known.everywhere)
            else:
                wide = self._cast(node, source, meta.shape, meta.dtype)
                before = self._like(node, aten.sub.Tensor, (node, wide), meta.shape, meta.dtype)
                chosen = self._like(
                    node, aten.index_select.default, (before, dim, self._first_rows()), meta.shape, meta.dtype
                )
                result.args = (node, chosen)
        for user in users:
            user.replace_input_with(node, result)

    def _counted_constant(self, like: fx.Node, meta: TensorMeta, dim: int, value: float) -> tuple[fx.Node, float]:
        """(position + 1) * value as `a - b`: a running sum of one number is exact."""
        shape = tuple(self.token if d == dim else 1 for d in range(len(meta.shape)))
        sizes = [self.length if size == self.token else size for size in shape]
        count = self._like(like, aten.view.default, (self.positions, sizes), shape)
        wide = self._cast(like, count, shape, meta.dtype)
        times = self._like(like, aten.mul.Tensor, (wide, value), shape, meta.dtype)
        full = [self.length if size == self.token else size for size in meta.shape]
        return self._like(like, aten.expand.default, (times, full), meta.shape, meta.dtype), -value

    def _first_rows(self) -> fx.Node:
        """Per token, where its document begins in the row [T]; made once, at the top."""
        if self.first_row is None:
            with self.graph.inserting_after(self.positions):
                self.first_row = self._like(self.length, aten.sub.Tensor, (None, self.positions), (self.token,))
            with self.graph.inserting_before(self.first_row):
                index = self._like(self.length, aten.arange.default, (self.length,), (self.token,))
            self.first_row.args = (index, self.positions)
        return self.first_row

    # ------------------------------------------------------------------------------------------------- tables
    def _sliced_tables(self) -> set[Any]:
        """What tells the gradient of `slice(table, ...)` from that of any other slice."""
        return {
            (tuple(tensor_of(n.args[0]).shape), *_bounds(n, 1))
            for n, site in self.flow.sites.items()
            if site == "table"
        }

    def _rows(self, like: fx.Node, start: int) -> fx.Node:
        if not start:
            return self.positions
        return self._like(like, aten.add.Tensor, (self.positions, start), (self.token,))

    def _table(self, node: fx.Node) -> None:
        """`slice(table, dim, a, a + T)`."""
        table: Any = node.args[0]
        meta = tensor_of(node)
        dim, start = _bounds(node, 1)[:2]
        shape = tensor_of(table).shape
        with self.graph.inserting_before(node):
            rows = self._rows(node, start)
            whole = any(size != 1 for size in shape[:dim]) or not all(isinstance(size, int) for size in shape)
            if whole or not meta.dtype.is_floating_point:
                found = self._like(node, aten.index_select.default, (table, dim, rows), meta.shape, meta.dtype)
            else:
                count: Any = shape[dim]
                width = _product(shape[dim + 1 :])
                flat = self._like(node, aten.view.default, (table, [count, width]), (count, width), meta.dtype)
                ids = self._like(node, aten.arange.start, (1, count + 1), (count,))
                looked = self._like(node, own.embedding.default, (flat, rows, ids), (self.token, width), meta.dtype)
                sizes = [self.length if size == self.token else size for size in meta.shape]
                found = self._like(node, aten.view.default, (looked, sizes), meta.shape, meta.dtype)
        node.replace_all_uses_with(found)

    def _table_backward(self, node: fx.Node) -> None:
        """`slice_backward(grad, sizes, dim, a, a + T)`."""
        grad: Any = node.args[0]
        meta = tensor_of(node)
        dim, start = _bounds(node, 2)[:2]
        count, width = meta.shape[dim], _product(meta.shape[dim + 1 :])
        with self.graph.inserting_before(node):
            rows = self._rows(node, start)
            flat = self._like(node, aten.view.default, (grad, [self.length, width]), (self.token, width), meta.dtype)
            ids = self._like(node, aten.arange.start, (1, count + 1), (count,))  # type: ignore[operator]
            summed = self._like(node, own.embedding_backward.default, (flat, rows, ids, -1), (count, width), meta.dtype)
            found = self._like(node, aten.view.default, (summed, list(meta.shape)), meta.shape, meta.dtype)
        node.replace_all_uses_with(found)

    def _like(
        self,
        node: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        shape: tuple[Size, ...],
        dtype: torch.dtype = torch.int64,
    ) -> fx.Node:
        """A new call at the insertion point, from the place in the user's model where `node` is."""
        made = self.graph.call_function(target, args)
        for key in ("fqn", "source", "backward"):
            made.meta[key] = node.meta.get(key)
        made.meta.update(tensor=TensorMeta(tuple(shape), dtype))
        made.meta["pass"] = "pack_documents"
        return made

    def _cast(self, node: fx.Node, value: fx.Node, shape: tuple[Size, ...], dtype: torch.dtype) -> fx.Node:
        made = self._like(node, aten._to_copy.default, (value,), shape, dtype)
        made.kwargs = {"dtype": dtype}
        return made


def _bounds(node: fx.Node, at: int) -> tuple[int, int, Any]:
    """(dim, start, end) of a slice or of its gradient, whose dim is argument `at`."""
    args = [size_of(a) if isinstance(a, fx.Node) and is_size(a) else a for a in node.args]
    rank = len((node.meta if at == 2 else args[0].meta)["tensor"].shape)  # type: ignore[union-attr]
    dim = (args[at] if len(args) > at else 0) % rank  # type: ignore[operator]
    start = args[at + 1] if len(args) > at + 1 else 0
    return dim, start or 0, args[at + 2] if len(args) > at + 2 else None  # type: ignore[return-value]


def _key(node: fx.Node) -> Any:
    """See `_sliced_tables`."""
    return (tuple(tensor_of(node).shape), *_bounds(node, 2))


def _product(sizes: tuple[Size, ...]) -> Any:
    return sympy.prod(sizes) if any(not isinstance(s, int) for s in sizes) else int(sympy.prod(sizes))


def _unused(name: str, graph: fx.Graph) -> str:
    """A name for a placeholder that no other has."""
    taken = {str(n.target) for n in graph.nodes if n.op == "placeholder"}
    while name in taken:
        name = f"_{name}"
    return name
