"""Write in place: an elementwise op whose operand nobody needs any more writes its result there.

Before: an elementwise op allocates its result. After: it is written over an operand that is fresh memory of the same
shape and dtype and that nothing reads later, through whatever view.

    %b = mul(%grad, %up)                        %b = mul_(%grad, %up)
    %c = silu_backward(%b, %gate)               %c = silu_backward(%b, %gate, grad_input=%b)

Saves: one allocation per op, and a third of what a binary op moves through the caches. Memory is never kept for longer:
an operand that is a part of something larger stays as it is.

The forward never writes over what the backward made or the other way round, nor one phase over what another made: a
later cut there (pipeline stages, a loss that is outside) runs the pieces at different times. Only the body is changed,
which runs for every micro-batch. Runs last, as it depends on the order of the nodes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import is_size, one_local, phase_of
from fxpar.ir.pass_base import Tier, forward_of
from fxpar.ir.serialize import OpOverload
from fxpar.ops.traits import IN_PLACE, OUT, RELABELS

aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}  # without alpha
_RELABEL = RELABELS | {_c10d.wait_tensor.default}
# These keep what their schemas say about memory; an op of somebody else's may well return its operand.
_TRUSTED = ("aten", "fxpar", "_c10d_functional")
_FUNCTIONAL = {new: old for old, new in IN_PLACE.items()}
_OUT_FUNCTIONAL = {new: (old, name) for old, (new, name) in OUT.items()}


@dataclass(frozen=True)
class WriteInPlace:
    """No options."""

    name: ClassVar[str] = "write_in_place"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        memory = _Memory(graph)
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or phase_of(node) != "body":
                continue
            if node.target in IN_PLACE:
                _over_an_operand(node, memory)
            elif node.target in OUT and memory.may_write(node, node.args[0]):
                target, keyword = OUT[node.target]
                node.target = target
                node.kwargs = {**node.kwargs, keyword: node.args[0]}


def functional(graph: fx.Graph) -> None:
    """Make in-place ops and collectives functional again, but ops that write over an operand of the graph
    (accumulators).
    """
    for node in graph.nodes:
        if node.target is _c10d.all_reduce_.default:
            node.target = _c10d.all_reduce.default
        if node.target in _FUNCTIONAL and _source(node.args[0]).op != "placeholder":
            node.target = _FUNCTIONAL[node.target]
        elif node.target in _OUT_FUNCTIONAL and _source(node.args[0]).op != "placeholder":
            node.target, keyword = _OUT_FUNCTIONAL[node.target]
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != keyword}


def _over_an_operand(node: fx.Node, memory: _Memory) -> None:
    first, *others = node.args
    if memory.may_write(node, first):
        node.target = IN_PLACE[node.target]
    elif node.target in _COMMUTE and not node.kwargs and memory.may_write(node, others[0]):
        node.args = (others[0], first)
        if "dist_in" in node.meta:
            node.meta["dist_in"] = node.meta["dist_in"][::-1]
        node.target = IN_PLACE[node.target]


def _source(value: Any) -> fx.Node:
    """What a chain of relabelling views starts from."""
    while value.op == "call_function" and value.target in _RELABEL:
        value = value.args[0]
    return value


class _Memory:
    """Which memory each value may lie in, and by when it has been read for the last time.

    Memory is named by the node that allocated it. An op's schema says which operands its results may share memory with;
    results of a plain function, and of an op that is not known here, may share with all of them.
    """

    def __init__(self, graph: AnnotatedGraph) -> None:
        self.position = {node: i for i, node in enumerate(graph.graph.nodes)}
        early = forward_of(graph)
        self.side = {node: (phase_of(node), node in early) for node in self.position}
        self.of: dict[fx.Node, frozenset[fx.Node]] = {}
        self.last: dict[fx.Node, int] = {}
        self.sides: dict[fx.Node, set[Any]] = {}
        for node in self.position:
            starts = self.of[node] = _memory_of(node, self.of)
            # A collective reads its operand until it is waited for.
            waits = [wait for user in node.users if collective_kind(user) for wait in user.users]
            touches = (node, *node.users, *waits)
            last, sides = max(map(self.position.__getitem__, touches)), set(map(self.side.__getitem__, touches))
            for start in starts:
                self.last[start] = max(self.last.get(start, 0), last)
                self.sides.setdefault(start, set()).update(sides)

    def may_write(self, node: fx.Node, value: Any) -> bool:
        """Whether `node`, an elementwise op, may write its result over its operand `value`."""
        if not isinstance(value, fx.Node) or is_size(value) or one_local(value) is None:
            return False
        start = _source(value)
        return (
            self.of[value] == {start}
            and start.op == "call_function"
            and (_is_known(start) or start.target is operator.getitem)
            and one_local(value) == one_local(node)
            and self.last[start] == self.position[node]
            and self.sides[start] == {self.side[node]}
            and not any(o is not value and start in self.of[o] for o in node.all_input_nodes)
        )


def _memory_of(node: fx.Node, known: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    if node.op == "output":
        return frozenset()
    if node.op != "call_function":
        return frozenset({node})
    if node.target in _RELABEL:
        return known[node.all_input_nodes[0]]
    if node.target is operator.getitem:
        whole = known[node.all_input_nodes[0]]
        # Results of one op that are no views have memory of their own each.
        return frozenset({node}) if whole == {node.args[0]} and _is_known(node.args[0]) else whole
    if not _is_known(node):
        return frozenset({node}).union(*(known[o] for o in node.all_input_nodes))
    schema = node.target._schema  # type: ignore[union-attr]
    if all(result.alias_info is None for result in schema.returns):
        return frozenset({node})
    shared: set[fx.Node] = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            fx.node.map_arg(given, lambda operand: shared.update(known[operand]))
    return frozenset(shared)


def _is_known(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in _TRUSTED
