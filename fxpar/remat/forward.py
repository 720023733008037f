"""What can be recomputed: the forward of a lowered graph as seen by its backward."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, is_size, phase_of, reader_of
from fxpar.ops import copies
from fxpar.ops.traits import CHOICES, is_random

_ADDING = ("all_reduce", "reduce_scatter")
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class ForwardValues:
    """Of a graph between `lower_collectives` and `bucket_collectives`.

    `nodes`: tensor-valued calls of the forward's body, in order. `needed`: those that the backward reads. `fixed`:
    those that must not run twice: in-place, random in another way each time, or a parameter that ZeRO-3 gathers once
    for forward and backward. `gathered`: part of a gather for the forward -> its equal of a gather for the backward.
    `sums`: what makes sums over ranks of partial ones.
    """

    nodes: tuple[fx.Node, ...]
    needed: frozenset[fx.Node]
    fixed: frozenset[fx.Node]
    gathered: dict[fx.Node, fx.Node]
    sums: frozenset[fx.Node] = frozenset()

    def place_of(self, node: fx.Node) -> str:
        """The module that a node is recomputed with. What moves a value goes with its reader, for a gathered value is
        larger than its pieces; but a sum with who makes its terms, as it is no larger than one of them: the block that
        reads it keeps the sum.
        """
        return fqn_of(node) if node in self.sums else reader_of(node)

    def blocks(self) -> dict[fx.Node, str]:
        """The repeated block (`layers.3`) of each node in one."""
        return {node: block for node in self.nodes if (block := block_of(self.place_of(node)))}

    def modules(self, globs: Collection[str]) -> tuple[dict[fx.Node, str], list[str]]:
        """The outermost module that a glob matches, of each node inside one; and the globs that match no module."""
        chosen: dict[str, str | None] = {}
        unused = set(globs)
        for node in self.nodes:
            fqn = self.place_of(node)
            if fqn not in chosen:
                chosen[fqn] = None
                for module in prefixes(fqn):
                    hits = {g for g in globs if fnmatch.fnmatchcase(module, g)}
                    unused -= hits
                    if hits and chosen[fqn] is None:
                        chosen[fqn] = module
        found = {n: m for n in self.nodes if (m := chosen[self.place_of(n)]) is not None}
        return found, [g for g in globs if g in unused]

    def module_names(self) -> list[str]:
        """FQNs of all modules that compute something."""
        return sorted({p for node in self.nodes for p in prefixes(self.place_of(node))})

    def leaves_region(self, node: fx.Node, region: dict[fx.Node, str]) -> bool:
        """Whether the forward reads the node outside of its region, or the graph returns it."""
        mine = region[node]
        return any(
            user.op == "output" or (not is_backward(user) and not is_size(user) and region.get(user) != mine)
            for user in node.users
        )


def prefixes(fqn: str) -> Iterator[str]:
    """`a`, `a.b`, `a.b.c` for `a.b.c`; nothing for the root."""
    parts = fqn.split(".") if fqn else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def forward_values(graph: AnnotatedGraph) -> ForwardValues:
    """Look at a graph."""
    body = [n for n in graph.graph.nodes if n.op == "call_function" and phase_of(n) == "body" and not is_size(n)]
    forward = [n for n in body if not is_backward(n)]
    needed = {n for n in forward if any(is_backward(u) for u in n.users)}
    twins, held = _gathers(graph, body)
    fixed = frozenset(_fixed(body, forward)) | held
    return ForwardValues(tuple(forward), frozenset(needed), fixed, twins, _sums(forward))


def is_communication(node: fx.Node) -> bool:
    """A collective, or the wait for one."""
    return node.target is _WAIT or collective_kind(node) is not None


def _sums(forward: list[fx.Node]) -> frozenset[fx.Node]:
    """Collectives that add up, and what a pass has put in front of and behind them for the same reader."""
    inside, found = set(forward), set()
    todo = [node for node in forward if collective_kind(node) in _ADDING]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            near = (*node.all_input_nodes, *node.users)
            todo += [n for n in near if n in inside and "reader" in n.meta and _moved(n) == _moved(node)]
    return frozenset(found)


def _moved(node: fx.Node) -> tuple[str, str]:
    """From which module to which."""
    return fqn_of(node), reader_of(node)


def _fixed(body: list[fx.Node], forward: list[fx.Node]) -> Iterator[fx.Node]:
    yield from _routes(forward)
    # What an in-place op has written to is another value from then on, so its operands are not read again either.
    written = {operand for node in body for operand in _written(node)}
    for node in forward:
        touched = node in written or any(o in written for o in node.all_input_nodes)
        if is_random(node.target) or node.target in CHOICES or touched or _written(node):
            yield node


def _routes(forward: list[fx.Node]) -> Iterator[fx.Node]:
    """Where tokens go to their experts: counted and told once, for forward and backward."""
    found: set[fx.Node] = set()
    for node in forward:
        operands = [o for o in node.all_input_nodes if not is_size(o)]
        meta = node.meta.get("local")
        told = node.target is copies.exchange and isinstance(meta, TensorMeta) and not meta.dtype.is_floating_point
        if node.target is copies.copies or told or (operands and all(o in found for o in operands)):
            found.add(node)
            yield node


def _written(node: fx.Node) -> list[fx.Node]:
    """Operands that the node writes into."""
    schema: Any = getattr(node.target, "_schema", None)
    found: list[fx.Node] = []
    if schema is not None and schema.is_mutable:
        for place, value in zip(schema.arguments, node.args, strict=False):
            if place.alias_info is not None and place.alias_info.is_write:
                fx.node.map_arg(value, found.append)
    return found


def _gathers(graph: AnnotatedGraph, body: list[fx.Node]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """Chains that start at parameters alone and contain a collective: forward node -> its equal in the backward, and
    the forward nodes of chains that run once.
    """
    numbers: dict[Any, int] = {}
    value: dict[fx.Node, int] = {}
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        if info.kind == "param":
            value[node] = numbers.setdefault(node, len(numbers))
    for node in graph.graph.nodes:  # casts of the prologue too
        operands = node.all_input_nodes
        if node.op == "call_function" and operands and all(o in value for o in operands):
            key = (node.target, _hashable(fx.node.map_arg((node.args, node.kwargs), value.__getitem__)))
            value[node] = numbers.setdefault(key, len(numbers))
    gathers: dict[fx.Node, None] = {}
    for node in body:
        if node in value and (collective_kind(node) or any(o in gathers for o in node.all_input_nodes)):
            gathers[node] = None
    backward = {value[n]: n for n in gathers if is_backward(n)}
    twins: dict[fx.Node, fx.Node] = {}
    once: set[fx.Node] = set()
    for node in gathers:
        if is_backward(node):
            continue
        if value[node] in backward:
            twins[node] = backward[value[node]]
        elif collective_kind(node) or any(o in once for o in node.all_input_nodes):
            once.add(node)  # not so a view of what has a twin: it is made anew of the twin
    return twins, once


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in value.items())
    return value
