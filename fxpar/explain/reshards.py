"""Reshards of an annotated graph: who has a value, who wants it otherwise, and which collectives that takes.

The reshards are those that the pass `insert_reshards` makes, and the steps those of `reshard_to_collectives`: what is
explained here is what is lowered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import fx

from fxpar.ir.collectives import partial, reshard, shard
from fxpar.ir.dist_config import DistConfig, Partial
from fxpar.ir.exec_graph import Communication
from fxpar.ir.graph import AnnotatedGraph, TensorMeta, run_dims
from fxpar.ir.node_meta import dist_of, dists_of, tensor_of, wanted_dists
from fxpar.ir.pass_base import tensor_operands
from fxpar.ir.steps import steps
from fxpar.ops.traits import is_view
from fxpar.passes.insert_reshards import InsertReshards
from fxpar.rules.view import resolve

LOCAL = {shard: "slice", partial: "keep on first"}  # steps without traffic


@dataclass(frozen=True)
class StepTaken:
    """One step on one axis; `wire_bytes` of one rank with the example's sizes. A slice has none."""

    kind: str
    axis: str
    sent: TensorMeta
    wire_bytes: float


@dataclass(frozen=True)
class Reshard:
    """`value` lies as `have` and these users want it as `wanted`.

    `cut_from` is the placement that it is made of, where that is another reshard of the value. `behind` are the ops
    that the users stand for: where a user is a view, those that read it. `terms` are the ops whose results a partial
    value is the sum of, the last first; a term that is moved for itself too stands at the end.
    """

    value: fx.Node
    have: DistConfig
    wanted: DistConfig
    users: tuple[fx.Node, ...]
    behind: tuple[fx.Node, ...]
    terms: tuple[fx.Node, ...]
    cut_from: DistConfig
    steps: tuple[StepTaken, ...]

    @property
    def wire_bytes(self) -> float:
        return sum(step.wire_bytes for step in self.steps)


def moves(graph: AnnotatedGraph) -> tuple[Reshard, ...]:
    """All reshards in program order. The graph is left with its reshard nodes in it."""
    InsertReshards()(graph)
    made = [node for node in graph.graph.nodes if node.target is reshard]
    moved = {_unmoved(node) for node in made}
    return tuple(_move(graph, node, moved) for node in made)


def _move(graph: AnnotatedGraph, node: fx.Node, moved: set[fx.Node]) -> Reshard:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    value, dims = _unmoved(node), run_dims(graph)
    wanting = tuple(u for u in node.users if u.target is not reshard)
    have, wanted = dist_of(value), dist_of(node)
    taken = tuple(_steps(graph, tensor_of(node), dist_of(source), wanted, dims))
    behind = dict.fromkeys(reader for user in wanting for reader in _readers(user))
    terms = _terms(value, moved) if have.partial else (resolve(value)[0],)
    return Reshard(value, have, wanted, wanting, tuple(behind), terms, dist_of(source), taken)


def _steps(
    graph: AnnotatedGraph, meta: TensorMeta, source: DistConfig, target: DistConfig, dims: dict[sympy.Symbol, int]
) -> Iterator[StepTaken]:
    current = source
    for op, args, made in steps(source, target, meta.shape):
        sent = TensorMeta(current.local_shape(meta.shape), meta.dtype)
        kind, axis = getattr(op, "__name__", str(op)), args[0]
        if kind == "all_reduce" and args[1] == "logsumexp":
            kind = "all_gather"  # the terms themselves are gathered
        if op in LOCAL:
            yield StepTaken(LOCAL[op], axis, sent, 0.0)  # type: ignore[index]
        else:
            degree = graph.strategy.mesh.degree(axis)
            yield StepTaken(
                kind, axis, sent, Communication(kind, axis, sent, "body", "", False).wire_bytes(degree, dims)
            )
        current = made


def _readers(user: fx.Node) -> Iterator[fx.Node]:
    """A user; where it is a view of its operand, those who read the view."""
    if user.target is reshard or (user.op == "call_function" and is_view(resolve(user)[0].target) and user.users):
        for reader in user.users:
            yield from _readers(reader)
    else:
        yield user


def _terms(value: fx.Node, moved: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The ops in which a partial value's terms are computed: partial sums pass through views and additions."""
    found: set[fx.Node] = set()
    apart: set[fx.Node] = set()
    todo, seen = [resolve(value)[0]], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        axes = {axis for each in dists_of(node) if each for axis, _ in each.partial}
        wanted = zip(_values(node), wanted_dists(node), strict=False)
        passed = [o for o, want in wanted if any(isinstance(want.placement(axis), Partial) for axis in axes)]
        apart |= {resolve(o)[0] for o in passed if o in moved}
        todo += [resolve(o)[0] for o in passed if o not in moved]
        found |= set() if passed else {node}
    return (*sorted(found, reverse=True), *sorted(apart - found, reverse=True))


def _unmoved(node: fx.Node) -> fx.Node:
    """The value behind reshards."""
    while node.target is reshard:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _values(node: fx.Node) -> list[fx.Node]:
    """Operands as they were before reshards stood between."""
    return [_unmoved(operand) for operand in tensor_operands(node)]


def weights_of(graph: AnnotatedGraph) -> dict[fx.Node, set[fx.Node]]:
    """Per node the parameters that it reads, views and casts of them looked through."""
    read: dict[fx.Node, set[fx.Node]] = {}
    views: dict[fx.Node, set[fx.Node]] = {
        node: {node} for node, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"
    }
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        operands = _values(node)
        read[node] = set().union(*(views.get(operand, set()) for operand in operands)) if operands else set()
        if len(operands) == 1 and read[node]:
            views[node] = read[node]
    return read


__all__ = ["Reshard", "StepTaken", "moves", "weights_of"]
