"""Rematerialize: the backward computes forward values again instead of keeping them in memory from the forward.

Before: every forward value that the backward reads lives until then. After: the chosen ones (`fxpar.remat`) are freed
by the forward and computed again, from what is still there, right before the backward first reads them.

    %h = silu(%a)                               %h = silu(%a)
    %y = mm(%h, %w)                             %y = mm(%h, %w)
    ...                                         ...
    %dw = mm(%dy_t, %h)                         %h_again = silu(%a)
                                                %dw = mm(%dy_t, %h_again)

Same ops on the same operands, so the same bits: dropout numbers its elements and draws the same mask. What ZeRO-3
gathers for the forward is read from what it gathers for the backward. Saves: the bytes of values read in the backward.
Costs: the work of what runs again; "full" is one forward more, less what leaves the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpar.ir.graph import AnnotatedGraph, run_dims
from fxpar.ir.node_meta import counted_by, is_backward
from fxpar.ir.pass_base import Tier
from fxpar.remat import chosen_by_module, forward_values, saved_bytes, trace_storages


@dataclass(frozen=True)
class Rematerialize:
    """Reads `strategy.remat`. `sizes` are the dynamic dims of a whole micro-batch by name, for a budget in bytes; the
    sizes of the captured example where they are not given.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "rematerialize"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        remat, by_rules = graph.strategy.remat, any(rule.remat for rule in graph.strategy.rules)
        if not (remat or by_rules) or not forward_values(graph).needed:
            return
        dims = run_dims(graph, dict(self.sizes))  # that every placement divides
        again = chosen_by_module(graph, dims)
        if not again and remat and remat.mode == "full" and not by_rules:
            graph.notes.append(
                f"{remat}: nothing is recomputed, since the model has no repeated blocks (layers.0, ...)"
            )
        _sink(_duplicate(graph, again))
        _drop_unused(graph.graph)
        if remat and remat.mode == "budget":  # which may be meant at other sizes than it was applied to
            saved = saved_bytes(graph.graph, trace_storages(graph.graph, dims)) / 1e6
            where = ", ".join(f"{symbol} = {size}" for symbol, size in dims.items())
            graph.notes.append(
                f"{remat}: {saved:.3f} MB per rank are saved for the backward at {where or 'these sizes'}"
            )


def _duplicate(graph: AnnotatedGraph, again: frozenset[fx.Node]) -> list[fx.Node]:
    """Let the backward read copies of the nodes in `again`; all nodes that may have to move, operands first."""
    values = forward_values(graph)
    backward = [n for n in graph.graph.nodes if n.op == "call_function" and is_backward(n)]
    wanted = _wanted(values.needed, again)
    copies: dict[fx.Node, fx.Node] = dict(values.gathered)
    with graph.graph.inserting_before(backward[0]):
        for node in values.nodes:
            if node in wanted and node not in copies:
                copy = graph.graph.node_copy(node, lambda n: copies.get(n, n))
                copy.meta = {**node.meta, "backward": True, "again": True}
                copies[node] = copy
    for node in backward:
        for operand in node.all_input_nodes:
            if operand in copies:
                node.replace_input_with(operand, copies[operand])
    # The gathers for the backward may stand behind what reads them now.
    gathers = _chains(values.gathered.values())
    return [*gathers, *(copy for node, copy in copies.items() if node not in values.gathered)]


def _wanted(needed: Iterable[fx.Node], again: frozenset[fx.Node]) -> set[fx.Node]:
    """What of `again` the backward needs, directly or for something else in it."""
    found: set[fx.Node] = set()
    todo = [n for n in needed if n in again]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [o for o in node.all_input_nodes if o in again]
    return found


def _chains(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes and what they are computed from in the backward, operands first."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and node.op == "call_function" and is_backward(node):
            found.add(node)
            todo += node.all_input_nodes
    return sorted(found)


def _sink(nodes: list[fx.Node]) -> None:
    """Move each node right before its first user, users first."""
    for node in reversed(nodes):
        if node.users:
            min(node.users).prepend(node)


def _drop_unused(graph: fx.Graph) -> None:
    """Nodes that only the backward read, and has copies of now. Counts of rows are read by who runs the graph."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not counted_by(node)[1]:
            graph.erase_node(node)
