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
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.hops import hops_to_experts
from fxpar.errors import ExpertsOrderError
from fxpar.flow.expert_groups import ExpertGroup, calls_on_copies, expert_groups, of_tokens, operands_by_token, sources
from fxpar.ir import collectives as c
from fxpar.ir.counts import run_count
from fxpar.ir.graph import AnnotatedGraph, TensorMeta, run_dims
from fxpar.ir.node_meta import fqn_of, is_backward, is_size, local_tensor
from fxpar.ir.pass_base import Tier
from fxpar.ops import copies
from fxpar.ops.traits import BY_EXPERT
from fxpar.rules.slots import LOOKUPS, has_tokens, ranks_alike

aten, own = torch.ops.aten, torch.ops.fxpar


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
        layers: list[list[ExpertGroup]] = []
        for group in expert_groups(graph):
            if group.ids.meta.get("ep_chunk", 0):  # of the tokens of the layer before
                layers[-1].append(group)
            else:
                layers.append([group])
        for chunks in layers:
            _exchange([_Exchange(graph, group, self._hops(graph, group), numbers) for group in chunks])

    def _hops(self, graph: AnnotatedGraph, group: ExpertGroup) -> tuple[str, ...]:
        x = local_tensor(group.members[0].args[0])
        nbytes = x.numel(run_dims(graph, dict(self.sizes))) // group.slots * x.dtype.itemsize
        _check_order(graph, group)
        return hops_to_experts(graph.strategy.mesh, group.axis, self.cluster, group.slots, group.experts, nbytes)


def _check_order(graph: AnnotatedGraph, group: ExpertGroup) -> None:
    """Process groups have their ranks in ascending order, and what travels goes by that. Raises ExpertsOrderError."""
    strategy = graph.strategy
    if not strategy.mesh.ascends(group.axis.split(".")):
        usual = ".".join(f"{name}{degree}" for name, degree in strategy.axes)
        raise ExpertsOrderError(str(strategy), fqn_of(group.members[0]), group.axis, usual)


def _exchange(chunks: list[_Exchange]) -> None:
    """Let the tokens of a layer travel, chunk by chunk. First ranks tell each other where all go; what is sent for a
    chunk then waits for nothing that another one computes.
    """
    front = chunks[0].ordered[0]
    for chunk in chunks:
        chunk.tell(front)
    for chunk in chunks:
        chunk.sort(front)
    for chunk in chunks:
        chunk.take_over(chunks[0].numbered)


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

    def __init__(
        self, graph: AnnotatedGraph, group: ExpertGroup, hops: tuple[str, ...], numbers: Iterator[int]
    ) -> None:
        self.graph, self.group, self.numbers = graph.graph, group, numbers
        self.degree = graph.strategy.mesh.degree
        self.alike = ranks_alike(group.members[0])
        self.axes = hops
        self.rows = calls_on_copies(graph.graph, group)
        self.ordered = [node for node in graph.graph.nodes if node in self.rows]
        self.begins = {is_backward(node): node for node in reversed(self.ordered)}  # forward and backward
        self.hops: list[_Hop] = []
        self.received: dict[fx.Node, fx.Node] = {}  # a value of the rank's own tokens -> that of the copies it gets
        self.here: fx.Node = self.ordered[0]  # the call in front of which nodes are made
        self.whole: dict[fx.Node, dict[str, Any]] = {}  # how values lie that are made of copies now

    # ------------------------------------------------------------------------------------------------ which go where
    def tell(self, front: fx.Node) -> None:
        """In front of a call: which tokens go where, how many come from where, and the ids of those."""
        self.here, ids, each, reached = front, self.group.ids, self.group.experts, 1
        raw = ids
        for hop in self.axes:
            if self.hops:  # to a node: numbered as its experts are
                outer = self.hops[-1].axis
                ids = self._call(copies.own_ids, (raw, each, f"#{outer}", True), local_tensor(raw))
            reached *= self.degree(hop)
            self.hops.append(self._hop(hop, ids, each, reached))
            raw = self._travel(raw, self.hops[-1])
            each //= self.degree(hop)
        self.received_rows, self.each = self.hops[-1].received_rows, each
        self.received[self.group.ids] = raw

    def _hop(self, axis: str, ids: fx.Node, experts: int, reached: int) -> _Hop:
        """An exchange over an axis of rows with such ids, after which each token is on `reached` ranks at most."""
        ranks, rows, before = self.degree(axis), local_tensor(ids).shape[0], reached // self.degree(axis)
        tokens, slots = self.group.tokens, self.group.slots
        mean = copies.mean_copies(slots, self.group.experts, reached)
        sent_rows = run_count(mean, before * min(slots, ranks), tokens, next(self.numbers))
        received_rows = run_count(mean, reached, tokens, next(self.numbers))
        metas = TensorMeta((sent_rows,), torch.int64), TensorMeta((ranks,), torch.int64)
        routes = self._call(copies.copies, (ids, experts, ranks), metas)
        to, sent = (self._call(operator.getitem, (routes, i), metas[i]) for i in (0, 1))
        come = self._call(c.all_to_all, (sent, axis, 0, (), 0, ()), metas[1])
        return _Hop(axis, rows, sent_rows, received_rows, ids, to, sent, come)

    def sort(self, front: fx.Node) -> None:
        """In front of a call: the ids as this rank's experts are numbered, and the order of the rows that it has."""
        self.here, raw, slots = front, self.received[self.group.ids], self.group.slots
        meta, place = local_tensor(raw), f"#{self.group.axis}"
        self.numbered = self._call(copies.own_ids, (raw, self.each, place, True), meta)
        most = slots * self.degree(self.group.axis)
        rows = run_count(Fraction(slots), most, self.group.tokens, next(self.numbers))
        order = TensorMeta((rows,), torch.int64), TensorMeta((self.each,), torch.int64)
        own_rows = self._call(copies.own_rows, (self.numbered, self.each), order)
        own_rows.meta["experts"] = (self.group.axis, self.alike)
        self.masked = self._call(copies.own_ids, (raw, self.each, place, False), meta)
        self.size = self._call(aten.sym_size.int, (raw, 0), None)
        del self.size.meta["tensor"], self.size.meta["local"]
        self.size.meta["sym"] = self.received_rows

    # --------------------------------------------------------------------------------------------- there and back
    def _travel(self, value: fx.Node, hop: _Hop) -> fx.Node:
        meta = local_tensor(value)
        picked = TensorMeta((hop.sent_rows, *meta.shape[1:]), meta.dtype)
        rows = self._call(aten.index_select.default, (value, 0, hop.to), picked)
        got = TensorMeta((hop.received_rows, *meta.shape[1:]), meta.dtype)
        return self._call(c.exchange, (rows, hop.axis, hop.sent, hop.come), got)

    def _send(self, value: fx.Node) -> fx.Node:
        """Of the rank's own tokens -> of the copies that it gets. It starts once the value and counts are there, so
        that it travels while experts compute; and goes on from its node in front of what the chunk computes.
        """
        reader = self.here
        if is_backward(value) == is_backward(reader):
            self.here = max(value.next, self.told)
        for number, hop in enumerate(self.hops):
            begin = self.begins[is_backward(reader)]
            self.here = begin if number and value < begin else self.here
            value = self._travel(value, hop)
            for node in (value, *value.all_input_nodes[:1]):
                self._place(node, reader)
        self.here = reader
        return value

    def _back(self, node: fx.Node) -> None:
        """What others read of a value comes back, summed up over copies."""
        meta = local_tensor(node)
        readers = [user for user in node.users if user not in self.rows]
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
    def take_over(self, told: fx.Node) -> None:
        """Let the calls work on copies. In front of `told` all that ranks tell each other has been sent."""
        self.told = told
        for node in self.ordered:
            self.here = node
            self._on_copies(node)
        for node in self.ordered:
            if self.rows[node] != "same" and any(user not in self.rows for user in node.users):
                self._back(node)

    def _on_copies(self, node: fx.Node) -> None:
        at = 2 if node.target in BY_EXPERT else LOOKUPS.get(node.target)
        ids = None if at is None else node.args[at]
        own_ids = self.numbered if node.target in BY_EXPERT else self.masked

        def swap(operand: fx.Node) -> fx.Node:
            if is_size(operand) or operand in self.rows or not has_tokens(operand):
                return operand
            return own_ids if operand is ids else self._get(operand)

        node.args = fx.node.map_arg(node.args, swap)  # type: ignore[assignment]
        node.kwargs = fx.node.map_arg(node.kwargs, swap)  # type: ignore[assignment]
        node.meta.pop("dist_in", None)
        if node.target is own.expert_mm_backward.default:
            node.args = (*node.args[:3], self.each)
        if self.rows[node] != "same":
            self.whole[node] = {key: node.meta[key] for key in ("tensor", "dist") if key in node.meta}
            of_tokens(node, self.size, self.received_rows)

    def _get(self, value: fx.Node) -> fx.Node:
        """A value of the rank's own tokens, of the copies that it gets: what is large for a token is made there."""
        if value not in self.received:
            if value in sources(value, self.group.tokens, self.received):
                self.received[value] = self._send(value)
            else:
                given = {operand: self._get(operand) for operand in operands_by_token(value, self.group.tokens)}
                with self.graph.inserting_before(self.here):
                    made = self.graph.node_copy(value, lambda n: given.get(n, n))
                made.meta = dict(value.meta)
                self._place(made, self.here)
                made.meta.pop("dist_in", None)
                of_tokens(made, self.size, self.received_rows)
                self.received[value] = made
        return self.received[value]

    # --------------------------------------------------------------------------------------------- making calls
    def _call(self, target: Any, args: tuple[Any, ...], meta: Any) -> fx.Node:
        with self.graph.inserting_before(self.here):
            node = self.graph.call_function(target, args)
        self._place(node, self.here)
        node.meta.update(tensor=meta, local=meta)
        return node

    def _place(self, node: fx.Node, like: fx.Node) -> None:
        for key in ("fqn", "reader", "source", "backward", "phase"):
            node.meta.pop(key, None)  # of the call in front of which it was made, such as a gather of the prologue
            if key in like.meta:
                node.meta[key] = like.meta[key]
