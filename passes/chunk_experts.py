"""Chunk experts: under ep, tokens travel to their experts in chunks, one while the experts compute with the one before.

Before: all tokens of a rank go through a layer of experts at once: none of it computes before all have come. After: the
products by expert, and what of their surroundings runs where the experts are (`fxpar.flow.expert_groups`), stand once
for each chunk of the tokens, `+ep_chunks(2)`, the first chunk's before the second's, forward as backward. What is read
elsewhere is joined (a value per token) or added up (a gradient of a weight).

    %h = expert_mm(%x, %w, %ids)                %x0 = slice(%x, 0, 0, %n); %x1 = slice(%x, 0, %n, %m); ...
    %y = expert_mm(silu(%h), %v, %ids)          %h0 = expert_mm(%x0, %w, %ids0); %y0 = expert_mm(silu(%h0), %v, %ids0)
                                                %h1 = expert_mm(%x1, %w, %ids1); %y1 = expert_mm(silu(%h1), %v, %ids1)
                                                %y = cat(%y0, %y1)

`exchange_tokens` then makes an exchange for each: the second chunk travels beside the products of the first, whose
results travel back beside those of the second (Tutel's pipelining, Hwang et al. 2023, section 3.3). Routes are those of
all tokens at once; gradients of weights are sums over chunks, in fp32 at least.

Cost: smaller products, a message of counts more per chunk, a sum over each gradient of experts' weights.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.flow import token_symbol
from fxpar.flow.expert_groups import ExpertGroup, calls_on_copies, expert_groups, of_tokens, sources
from fxpar.ir.dist_config import chunk as part_of
from fxpar.ir.graph import AnnotatedGraph, Size, TensorMeta
from fxpar.ir.node_meta import dist_of, fqn_of, is_backward, is_size, local_meta, local_tensor, tensor_of
from fxpar.ir.pass_base import Tier, ancestors
from fxpar.ops.traits import BY_EXPERT, is_view
from fxpar.rules.slots import Kinds, has_tokens, source_of_ids

aten = torch.ops.aten
_WIDE = torch.float32  # what terms of low precision are added up in


@dataclass(frozen=True)
class ChunkExperts:
    """Reads from the strategy and its rules in how many chunks."""

    name: ClassVar[str] = "chunk_experts"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        strategy = graph.strategy
        if strategy.most("ep_chunks") == 1:
            return
        most = 1
        for group in expert_groups(graph):
            chunks = strategy.chunks_of(fqn_of(group.members[0]), "ep_chunks")
            if chunks > 1:
                _Cutter(graph.graph, group, chunks, calls_on_copies(graph.graph, group)).cut()
                most = math.lcm(most, chunks)
        if most > 1:
            token = str(token_symbol(graph))  # the runtime pads tokens so that all chunks have equally many
            graph.divisors[token] = graph.divisors.get(token, 1) * most


@dataclass
class _Cutter:
    """Makes `rows`, the calls of a layer that run where its experts are, one chunk of the tokens after the other."""

    graph: fx.Graph
    group: ExpertGroup
    chunks: int
    rows: dict[fx.Node, Kinds]
    made: list[dict[fx.Node, fx.Node]] = field(default_factory=list)  # for each chunk: value -> its part
    borders: list[Any] = field(default_factory=list)  # where chunks begin, and where the last one ends

    def cut(self) -> None:
        self.made = [{} for _ in range(self.chunks)]
        for run in self._runs():
            self._cut(run)
        for node in reversed([*self.rows]):
            self.graph.erase_node(node)

    @property
    def each(self) -> Any:
        """Tokens of a chunk, a `Size`."""
        return part_of(self.group.tokens, self.chunks)

    def _runs(self) -> list[list[fx.Node]]:
        """The calls, in runs of which each may stand at one place, as nothing from outside that it reads is made of it:
        in most layers all of the forward, and all of the backward.
        """
        runs: list[list[fx.Node]] = []
        behind: set[fx.Node] = set()  # what is made of the last run
        for node in self.graph.nodes:
            if node in self.rows:
                outside = any(o in behind for o in node.all_input_nodes if o not in self.rows)
                if not runs or outside or is_backward(node) != is_backward(runs[-1][0]):
                    runs.append([])
                    behind = set()
                runs[-1].append(node)
                behind.add(node)
            elif not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return runs

    def _cut(self, run: Sequence[fx.Node]) -> None:
        first = run[0]
        outside = [o for node in run for o in node.all_input_nodes if o not in self.rows]
        _move_up(outside, first)
        with self.graph.inserting_before(first):
            if not self.borders:
                self._measure(first)
            for number in range(self.chunks):  # all that travels stands in front of what computes
                self._part(self.group.ids, number, first)
            for number in range(self.chunks):
                for operand in outside:
                    self._part(operand, number, first)
            for number, made in enumerate(self.made):
                for node in run:
                    made[node] = self._again(node, lambda o, n=number: self._part(o, n, first))  # type: ignore[misc]
        for node in run:
            if any(user not in self.rows for user in node.users):
                self._give(node, first)

    # ------------------------------------------------------------------------------------------------ one chunk
    def _part(self, value: fx.Node, number: int, first: fx.Node) -> fx.Node:
        """What a chunk reads in place of a value: what it has made itself; of a value from outside a slice, or a call
        on slices of what is less.
        """
        made, ids = self.made[number], self.group.ids
        if is_size(value) or not has_tokens(value):
            return made.get(value, value)
        if source_of_ids(value) is source_of_ids(ids) and local_meta(value) == local_meta(ids):
            value = ids  # gathered twice, for forward and backward, they are the same
        if value not in made:
            if value is ids or value in sources(value, self.group.tokens, made):
                made[value] = self._slice(value, number, first)
            else:
                made[value] = self._again(value, lambda operand: self._part(operand, number, first))
                made[value].meta["backward"] = is_backward(first)
        return made[value]

    def _again(self, node: fx.Node, part: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A call once more, for the tokens of a chunk."""
        copy = self.graph.node_copy(node, part)
        copy.meta = dict(node.meta)
        if node.target not in BY_EXPERT:  # which still say how their weights lie
            copy.meta.pop("dist_in", None)
        if self.rows.get(node) != "same":
            of_tokens(copy, self.borders[1], self.each)
        return copy

    def _slice(self, value: fx.Node, number: int, first: fx.Node) -> fx.Node:
        found = self._call(aten.slice.Tensor, (value, 0, self.borders[number], self.borders[number + 1]), first)
        meta = local_tensor(value)
        found.meta["tensor"] = found.meta["local"] = TensorMeta((self.each, *meta.shape[1:]), meta.dtype)
        if value is self.group.ids:
            found.meta["ep_chunk"] = number
        return found

    def _measure(self, first: fx.Node) -> None:
        """Where chunks begin, and where the last one ends."""
        whole = self._integer(aten.sym_size.int, (self.group.ids, 0), self.group.tokens, first)
        each = self._integer(operator.floordiv, (whole, self.chunks), self.each, first)
        more = (self._integer(operator.mul, (each, n), self.each * n, first) for n in range(2, self.chunks + 1))
        self.borders = [0, each, *more]

    def _integer(self, target: Any, args: tuple[Any, ...], size: Size, like: fx.Node) -> fx.Node:
        node = self._call(target, args, like)
        node.meta["sym"] = size
        return node

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args)
        for key in ("fqn", "source", "backward", "phase"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        return node

    # ------------------------------------------------------------------------------------------------ all chunks
    def _give(self, node: fx.Node, first: fx.Node) -> None:
        """Let those outside read what all chunks have made."""
        readers = [user for user in node.users if user not in self.rows]
        parts = [made[node] for made in self.made]
        if self.rows[node] == "same":
            with self.graph.inserting_before(first):
                whole = self._sum(node, parts)
        else:
            with self.graph.inserting_before(min(readers)):  # nobody waits for the last chunk before
                whole = self._call(aten.cat.default, (parts, 0), node)
        for key in ("tensor", "local", "dist"):
            if key in node.meta:
                whole.meta[key] = node.meta[key]
        for reader in readers:
            reader.replace_input_with(node, whole)
        if whole.target is aten._to_copy.default:
            _round_once(self.graph, whole)

    def _sum(self, node: fx.Node, terms: Sequence[fx.Node]) -> fx.Node:
        meta, total = local_tensor(node), terms[0]
        wide = meta.dtype if meta.dtype.itemsize >= _WIDE.itemsize else _WIDE
        if wide != meta.dtype:
            total = self._cast(total, wide)
        for term in terms[1:]:
            total = self._call(aten.add.Tensor, (total, term), node)
            total.meta["tensor"] = total.meta["local"] = TensorMeta(meta.shape, wide)
        return total if wide == meta.dtype else self._cast(total, meta.dtype)

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        made = self._call(aten._to_copy.default, (value,), value)
        made.kwargs = {"dtype": dtype}
        made.meta["tensor"] = made.meta["local"] = TensorMeta(local_tensor(value).shape, dtype)
        return made


def _round_once(graph: fx.Graph, rounded: fx.Node) -> None:
    """Of a sum that is cast to what its terms are, and behind views back, neither cast is needed."""
    ways = [rounded]
    while len(ways[-1].users) == 1 and is_view((user := next(iter(ways[-1].users))).target):
        ways.append(user)
    casts = list(ways[-1].users)
    if any(cast.target is not aten._to_copy.default or cast.kwargs != {"dtype": _WIDE} for cast in casts):
        return
    (total,) = rounded.all_input_nodes
    total.meta["dist"] = dist_of(rounded)
    rounded.replace_all_uses_with(total)
    for way in (total, *ways[1:]):
        local, whole, dist = (replace(one(way), dtype=_WIDE) for one in (local_tensor, tensor_of, dist_of))
        way.meta.update(local=local, tensor=whole, dist=dist)
        if "dist_in" in way.meta:
            way.meta["dist_in"] = tuple(replace(one, dtype=_WIDE) for one in way.meta["dist_in"])
    for cast in casts:
        cast.replace_all_uses_with(ways[-1] if len(ways) > 1 else total)
    for node in (*casts, rounded):
        graph.erase_node(node)


def _move_up(values: Sequence[fx.Node], first: fx.Node) -> None:
    """Compute the values, and what they are made of, in front of a call."""
    for node in sorted(node for node in ancestors(values) if node > first and node.op == "call_function"):
        first.prepend(node)
