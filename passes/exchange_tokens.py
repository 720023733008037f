"""Exchange tokens: under ep, tokens travel to the ranks that have their experts, and what these make of them back.

Before: a rank has a run of the experts, and products by expert (`fxpar::expert_mm`) of its own tokens, in local shapes.
After: of each token one copy goes to each rank that has one of its experts; all between the products, and around them
as far as it is known what it makes of rows (`fxpar.rules.slots`), runs there, on copies in place of tokens. Rows of
experts that a rank does not have are zeros, so what a rank makes of a token is a term, and the terms are added up where
the token is from.

    %rows = expand(unsqueeze(%x, 1))            %to, %sent = copies(%ids, 8, 4)
    %h = expert_mm(%rows, %w1, %ids)            %received = all_to_all(%sent, "ep")
    %y = expert_mm(silu(%h), %w2, %ids)         %x_r = exchange(index_select(%x, 0, %to), "ep", %sent, %received)
    %out = sum(mul(%y, %weights), [1])          ... the same on %x_r, %ids_r and %weights_r ...
                                                %out = sum_copies(exchange(%out_r, "ep", %received, %sent), ...)

The backward likewise: gradients of results travel to the experts, those of tokens and weights back. The forward's rows
are saved where its experts are, and copies are counted once for both. How many a rank gets is known at run time
(`fxpar.ir.counts`). A product whose surroundings are not known travels alone, there and back.

With a cluster of several nodes, and where the cost room says that it pays (`fxpar.cost.hops`), the exchange is two: a
copy of a token goes to each *node* that has one of its experts, to the rank with the sender's place there, and copies
of it from there to the ranks of that node. On the way back terms are added up in the node first.

What is sent starts as soon as it is there, and is waited for where it is read: weights of slots travel while the first
products run, results of experts while gradients of their weights are computed.

Cost in bytes per rank and layer, forward as backward: a row of D there and one back for each copy that leaves, and a
number for each slot. Results are those of one device but for rounding: terms are added up by rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.hops import hops_to_experts
from fxpar.flow.expert_rows import experts_axis
from fxpar.ir import collectives as c
from fxpar.ir.counts import run_count
from fxpar.ir.graph import AnnotatedGraph, TensorMeta, run_dims
from fxpar.ir.node_meta import is_backward, is_size, local_meta, local_tensor
from fxpar.ir.pass_base import Tier, tensor_operands
from fxpar.ops import copies
from fxpar.ops.traits import BY_EXPERT, EXPERT_PRODUCTS_BACKWARD, SIZES
from fxpar.rules.slots import (
    LOOKUPS,
    Kinds,
    Rows,
    has_tokens,
    is_by_token,
    ranks_alike,
    source_of_ids,
    walk_rows,
)

aten, own = torch.ops.aten, torch.ops.fxpar
_GRADIENTS = EXPERT_PRODUCTS_BACKWARD | {own.embedding_backward.default}
_MANY = 1 << 20  # elements of a dim that grows with the batch
_MOST_STEPS = 6  # between what travels and the product that reads it


@dataclass(frozen=True)
class ExchangeTokens:
    """`cluster`: which ranks share a node, and what links carry; None: all are on one node. `sizes` are those of a
    micro-batch as a run has them, by default the example's.
    """

    cluster: ClusterSpec | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "exchange_tokens"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        numbers = itertools.count()  # of the sizes that are known at run time
        for group in _groups(graph):
            _Exchange(graph, group, self._hops(graph, group), numbers).run()

    def _hops(self, graph: AnnotatedGraph, group: _Group) -> tuple[str, ...]:
        x, slots = local_tensor(group.members[0].args[0]), int(local_tensor(group.ids).shape[1])  # type: ignore[arg-type]
        nbytes = x.numel(run_dims(graph, dict(self.sizes))) // slots * x.dtype.itemsize
        return hops_to_experts(graph.strategy.mesh, group.axis, self.cluster, slots, group.experts, nbytes)


@dataclass
class _Group:
    """The products whose tokens have the same experts, and lookups by these."""

    axis: str
    ids: fx.Node
    experts: int  # of all ranks
    members: list[fx.Node] = field(default_factory=list)


def _groups(graph: AnnotatedGraph) -> list[_Group]:
    """In the order of the graph."""
    found: dict[tuple[fx.Node, str], _Group] = {}
    ranks = graph.strategy.mesh.degree
    for node in graph.graph.nodes:
        axis = experts_axis(node, graph.strategy)
        if axis:
            ids = node.args[2]
            made = local_tensor(node if node.target in EXPERT_PRODUCTS_BACKWARD else node.args[1])
            experts = int(made.shape[0]) * ranks(axis)
            found.setdefault((source_of_ids(ids), axis), _Group(axis, ids, experts)).members.append(node)
    for node in graph.graph.nodes:
        at = LOOKUPS.get(node.target)
        for (source, _), group in found.items() if at is not None else ():
            if source_of_ids(node.args[at]) is source:
                group.members.append(node)
    return list(found.values())


@dataclass
class _Hop:
    """One exchange: over an axis, of how many rows at its start, with what it sends and receives. Nodes: the ids by
    which rows are routed, which of the rows go, in what order, how many to each rank and how many from each.
    """

    axis: str
    rows: Any
    sent_rows: Any
    received_rows: Any
    ids: fx.Node
    to: fx.Node
    sent: fx.Node
    come: fx.Node


class _Exchange:
    """Makes one group's calls work on copies of tokens."""

    def __init__(self, graph: AnnotatedGraph, group: _Group, hops: tuple[str, ...], numbers: Iterator[int]) -> None:
        self.graph, self.group, self.numbers = graph.graph, group, numbers
        self.degree = graph.strategy.mesh.degree
        self.ranks = self.degree(group.axis)
        shape: Any = local_tensor(group.ids).shape
        self.tokens, self.slots = shape
        self.alike = ranks_alike(group.members[0])
        self.axes = hops
        self.members: dict[fx.Node, Rows] = {
            node: "same" if node.target in _GRADIENTS else "zero" for node in group.members
        }
        self.hops: list[_Hop] = []
        self.received: dict[fx.Node, fx.Node] = {}  # a value of the rank's own tokens -> that of the copies it gets
        self.here: fx.Node | None = None  # the call in front of which nodes are made
        self.whole: dict[fx.Node, dict[str, Any]] = {}  # how values lie that are made of copies now

    def run(self) -> None:
        rows = self._rows()
        ordered = [node for node in self.graph.nodes if node in rows]
        self.here = ordered[0]
        self._route()
        for node in ordered:
            self.here = node
            self._take_over(node, rows)
        for node in ordered:
            if rows[node] != "same" and any(user not in rows for user in node.users):
                self._back(node, rows)

    # ------------------------------------------------------------------------------------- which calls run there
    def _rows(self) -> dict[fx.Node, Kinds]:
        """The calls that run on copies, with what they make. What is junk in part must not leave: then it is made where
        the tokens are, of rows that have come back.
        """
        stay: set[fx.Node] = set()
        while True:
            found = walk_rows(self.graph.nodes, self.members, self.tokens, self.slots, stay)
            junk = (n for n, kind in found.items() if kind == "junk")
            leaves: set[Any] = {n for n in junk if any(u not in found for u in n.users)}
            leaves = {n.args[0] if n.target is operator.getitem else n for n in leaves}  # all results of an op
            leaves = leaves or self._too_far(found)
            if not leaves:
                return found
            stay |= leaves

    def _too_far(self, found: dict[fx.Node, Kinds]) -> set[fx.Node]:
        """Of the calls behind the last products, those that are no way to a smaller result: with them more would
        travel, of the result and of what else they read, than with what they are made of.
        """
        before, todo = set[fx.Node](), list(self.group.members)
        while todo:
            node = todo.pop()
            if node not in before:
                before.add(node)
                todo += [o for o in node.all_input_nodes if o in found]
        needed = {one for node in before for one in self._read(node, found)}
        cost: dict[fx.Node, float] = {}
        left: set[fx.Node] = set()
        for node in reversed(found):
            users = [user for user in node.users if user in found]
            behind = [user for user in users if user not in before]
            alone = isinstance(local_meta(node), TensorMeta) and found[node] != "junk"
            here = _width(node) if alone else math.inf
            further = sum(cost[user] for user in behind)
            further += sum(map(_width, {one for user in behind for one in self._read(user, found)} - needed))
            away = len(users) < len(node.users)  # the value leaves in any case
            cost[node] = here if away or not behind else min(here, further)
            if behind and (away or here <= further):
                left.update(behind)
        return left

    def _read(self, node: fx.Node, found: dict[fx.Node, Kinds]) -> set[fx.Node]:
        """What has to travel for a call besides its rows."""
        others = (o for o in node.all_input_nodes if o not in found and not is_size(o) and has_tokens(o))
        return {one for other in others for one in self._sources(other)}

    # --------------------------------------------------------------------------------------------- making calls
    def _call(self, target: Any, args: tuple[Any, ...], meta: Any) -> fx.Node:
        assert self.here is not None
        with self.graph.inserting_before(self.here):
            node = self.graph.call_function(target, args)
        self._place(node, self.here)
        node.meta.update(tensor=meta, local=meta)
        return node

    def _place(self, node: fx.Node, like: fx.Node) -> None:
        for key in ("fqn", "reader", "source", "backward", "phase"):
            if key in like.meta:
                node.meta[key] = like.meta[key]

    def _route(self) -> None:
        """Which tokens go where, how many come from where, and the ids of those."""
        ids, axis, each = self.group.ids, self.group.axis, self.group.experts
        raw, reached = ids, 1
        for hop in self.axes:
            if self.hops:  # to a node: numbered as its experts are
                outer = self.hops[-1].axis
                ids = self._call(copies.own_ids, (raw, each, f"#{outer}", True), local_tensor(raw))
            reached *= self.degree(hop)
            self.hops.append(self._hop(hop, ids, each, reached))
            raw = self._travel(raw, self.hops[-1])
            each //= self.degree(hop)
        self.received_rows = self.hops[-1].received_rows
        self.received[self.group.ids] = raw
        meta = local_tensor(raw)
        self.numbered = self._call(copies.own_ids, (raw, each, f"#{axis}", True), meta)
        rows = run_count(Fraction(self.slots), self.slots * self.ranks, self.tokens, next(self.numbers))
        order = TensorMeta((rows,), torch.int64), TensorMeta((each,), torch.int64)
        self._call(copies.own_rows, (self.numbered, each), order).meta["experts"] = (axis, self.alike)
        self.masked = self._call(copies.own_ids, (raw, each, f"#{axis}", False), meta)
        self.size = self._call(aten.sym_size.int, (raw, 0), None)
        del self.size.meta["tensor"], self.size.meta["local"]
        self.size.meta["sym"] = self.received_rows

    def _hop(self, axis: str, ids: fx.Node, experts: int, reached: int) -> _Hop:
        """An exchange over an axis of rows with such ids, after which each token is on `reached` ranks at most."""
        ranks, rows, before = self.degree(axis), local_tensor(ids).shape[0], reached // self.degree(axis)
        mean = copies.mean_copies(self.slots, self.group.experts, reached)
        sent_rows = run_count(mean, before * min(self.slots, ranks), self.tokens, next(self.numbers))
        received_rows = run_count(mean, reached, self.tokens, next(self.numbers))
        metas = TensorMeta((sent_rows,), torch.int64), TensorMeta((ranks,), torch.int64)
        routes = self._call(copies.copies, (ids, experts, ranks), metas)
        to, sent = (self._call(operator.getitem, (routes, i), metas[i]) for i in (0, 1))
        come = self._call(c.all_to_all, (sent, axis, 0, (), 0, ()), metas[1])
        return _Hop(axis, rows, sent_rows, received_rows, ids, to, sent, come)

    def _travel(self, value: fx.Node, hop: _Hop) -> fx.Node:
        meta = local_tensor(value)
        picked = TensorMeta((hop.sent_rows, *meta.shape[1:]), meta.dtype)
        rows = self._call(aten.index_select.default, (value, 0, hop.to), picked)
        got = TensorMeta((hop.received_rows, *meta.shape[1:]), meta.dtype)
        return self._call(c.exchange, (rows, hop.axis, hop.sent, hop.come), got)

    def _send(self, value: fx.Node) -> fx.Node:
        """Of the rank's own tokens -> of the copies that it gets. It starts once the value and counts are there, so
        that it travels while experts compute.
        """
        reader = self.here
        assert reader is not None
        if is_backward(value) == is_backward(reader):
            self.here = max(value, self.hops[-1].come).next
        for hop in self.hops:
            value = self._travel(value, hop)
            for node in (value, *value.all_input_nodes[:1]):
                self._place(node, reader)
        self.here = reader
        return value

    def _back(self, node: fx.Node, rows: dict[fx.Node, Kinds]) -> None:
        """What others read of a value comes back, summed up over copies."""
        meta = local_tensor(node)
        readers = [user for user in node.users if user not in rows]
        self.here, summed = node.next, node
        for hop in reversed(self.hops):
            got = TensorMeta((hop.sent_rows, *meta.shape[1:]), meta.dtype)
            terms = self._call(c.exchange, (summed, hop.axis, hop.come, hop.sent), got)
            self._place(terms, node)
            if hop is self.hops[0]:
                self.here = min(readers)  # nobody waits for it before
            whole = TensorMeta((hop.rows, *meta.shape[1:]), meta.dtype)
            summed = self._call(copies.sum_copies, (terms, hop.to, hop.sent, hop.ids), whole)
            self._place(summed, node)
        summed.meta.update(self.whole.get(node, {}))
        for reader in readers:
            reader.replace_input_with(node, summed)

    # ------------------------------------------------------------------------------------------- calls on copies
    def _take_over(self, node: fx.Node, rows: dict[fx.Node, Kinds]) -> None:
        """Let a call work on copies."""
        at = 2 if node.target in BY_EXPERT else LOOKUPS.get(node.target)
        ids = None if at is None else node.args[at]
        own_ids = self.numbered if node.target in BY_EXPERT else self.masked

        def swap(operand: fx.Node) -> fx.Node:
            if is_size(operand) or operand in rows or not has_tokens(operand):
                return operand
            return own_ids if operand is ids else self._get(operand)

        node.args = fx.node.map_arg(node.args, swap)  # type: ignore[assignment]
        node.kwargs = fx.node.map_arg(node.kwargs, swap)  # type: ignore[assignment]
        node.meta.pop("dist_in", None)
        if node.target is own.expert_mm_backward.default:
            node.args = (*node.args[:3], self.group.experts // self.ranks)
        if rows[node] != "same":
            self.whole[node] = {key: node.meta[key] for key in ("tensor", "dist") if key in node.meta}
            self._on_copies(node)

    def _on_copies(self, node: fx.Node) -> None:
        """Sizes of a call, and of its results, whose first dim counted the rank's own tokens."""
        position = SIZES.get(node.target)  # type: ignore[call-overload]
        if position is not None:
            sizes: Any = node.args[position]
            first = sizes[0] if isinstance(sizes[0], int) and sizes[0] < 0 else self.size
            node.args = (*node.args[:position], [first, *sizes[1:]], *node.args[position + 1 :])
        meta = local_meta(node)
        metas = [self._of_copies(one) for one in (meta if isinstance(meta, tuple) else (meta,))]
        found = tuple(metas) if isinstance(meta, tuple) else metas[0]
        node.meta.pop("dist", None)
        node.meta.update(tensor=found, local=found)

    def _of_copies(self, meta: Any) -> Any:
        return TensorMeta((self.received_rows, *meta.shape[1:]), meta.dtype) if meta else meta

    def _get(self, value: fx.Node) -> fx.Node:
        """A value of the rank's own tokens, of the copies that it gets: what is large for a token is made there."""
        if value not in self.received:
            if value not in self._sources(value):
                given = {operand: self._get(operand) for operand in self._operands(value)}
                assert self.here is not None
                with self.graph.inserting_before(self.here):
                    made = self.graph.node_copy(value, lambda n: given.get(n, n))
                made.meta = dict(value.meta)
                self._place(made, self.here)
                made.meta.pop("dist_in", None)
                self._on_copies(made)
                self.received[value] = made
            else:
                self.received[value] = self._send(value)
        return self.received[value]

    def _operands(self, value: fx.Node) -> list[fx.Node]:
        """Of a call that may as well be made of copies: what it reads of tokens."""
        if value.op != "call_function" or isinstance(local_meta(value), tuple) or not is_by_token(value, self.tokens):
            return []
        return [operand for operand in tensor_operands(value) if has_tokens(operand)]

    def _sources(self, value: fx.Node, steps: int = _MOST_STEPS) -> frozenset[fx.Node]:
        """What has to travel for a value: itself, or what it is made of if that is less."""
        operands = self._operands(value) if steps and value not in self.received else []
        made = frozenset[fx.Node]().union(*(self._sources(operand, steps - 1) for operand in operands))
        less = sum(_width(one) for one in made if one not in self.received) < _width(value)
        return made if operands and less else frozenset([value])


def _width(value: fx.Node) -> int:
    """Bytes per token."""
    meta = local_meta(value)
    first: Any = meta[0] if isinstance(meta, tuple) else meta
    return first.dtype.itemsize * math.prod(size if isinstance(size, int) else _MANY for size in first.shape[1:])
