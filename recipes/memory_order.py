"""What a rewrite must keep in a graph that is not functional: who reads memory before and after it is written."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxpar.ir.exec_graph import collective_kind

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class MemoryOrder:
    """The versions of memory that the nodes of a graph see. Memory is named by the node that allocated it.

    An op's schema says which operands its results may share memory with and which it writes; results of anything else
    may share with all operands. A collective reads its operand until it is waited for.
    """

    def __init__(self, graph: fx.Graph) -> None:
        touched, self.writes = _accesses(graph)
        self.versions = _versions(touched, self.writes)

    def changes(self, graph: fx.Graph) -> Iterator[str]:
        """What a rewrite of the same graph has changed, in words; nothing if every node sees what it saw."""
        touched, _ = _accesses(graph)
        for write in self.writes:
            if write not in touched:
                yield f"it has dropped %{write.name} ({write.target}), which writes to memory"
                return
        after = _versions(touched, self.writes)
        replaced: dict[fx.Node, set[int]] = {}
        for node, seen in self.versions.items():
            for memory, version in seen.items():
                if node not in touched:
                    replaced.setdefault(memory, set()).add(version)
        for node, seen in after.items():
            before = self.versions.get(node)
            for memory, version in seen.items():
                # A new node may see what one that it replaces has seen.
                allowed = replaced.get(memory, set()) if before is None else {before.get(memory, version)}
                if version not in allowed:
                    yield f"%{node.name} would read %{memory.name} at another time than when it was meant to"
                    return


def _versions(
    touched: dict[fx.Node, frozenset[fx.Node]], writes: dict[fx.Node, frozenset[fx.Node]]
) -> dict[fx.Node, dict[fx.Node, int]]:
    """Node -> memory that is ever written -> how many of `writes` came before the node."""
    count = dict.fromkeys(frozenset().union(*writes.values()), 0)
    found: dict[fx.Node, dict[fx.Node, int]] = {}
    for node, memories in touched.items():
        found[node] = {memory: count[memory] for memory in memories if memory in count}
        for memory in writes.get(node, ()):
            count[memory] += 1
    return found


def _accesses(graph: fx.Graph) -> tuple[dict[fx.Node, frozenset[fx.Node]], dict[fx.Node, frozenset[fx.Node]]]:
    """Node -> memory that it touches, in order; and node -> memory that it writes, where it writes any."""
    lies_in: dict[fx.Node, frozenset[fx.Node]] = {}
    touched: dict[fx.Node, frozenset[fx.Node]] = {}
    writes: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        reads = frozenset().union(*(lies_in[o] for o in node.all_input_nodes))
        if node.target is _WAIT:
            (started,) = node.all_input_nodes
            reads = reads.union(*(lies_in[o] for o in started.all_input_nodes if collective_kind(started)))
        touched[node] = reads
        shared, written = _by_schema(node)
        lies_in[node] = frozenset().union(*(lies_in[o] for o in shared)) or frozenset({node})
        if written:
            writes[node] = frozenset().union(*(lies_in[o] for o in written))
    return touched, writes


def _by_schema(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operands that a node's results may share memory with, and those that it writes."""
    if node.op in ("placeholder", "get_attr", "output"):
        return [], []
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in (_WAIT, operator.getitem):
        return node.all_input_nodes, []
    shared: list[fx.Node] = []
    written: list[fx.Node] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        given: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        operands: list[fx.Node] = []
        fx.node.map_arg(given, operands.append)
        shared += operands
        if argument.alias_info.is_write:
            written += operands
    return shared, written


__all__ = ["MemoryOrder"]
