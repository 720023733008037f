"""Clean-up: drop what nobody uses, and collectives or slices that were made twice from the same value.

Before: any graph. After: no dead nodes, no placement markers, no two equal communication chains.

    %a = all_gather(%x, "tp", 0, ())            %a = all_gather(%x, "tp", 0, ())
    %b = all_gather(%x, "tp", 0, ())            (users of %b use %a)

Saves: the bytes of each duplicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpar.ir.collectives import is_collective
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.markers import vary
from fxpar.ir.node_meta import phase_of
from fxpar.ir.pass_base import Tier, tensor_operands


@dataclass(frozen=True)
class Cleanup:
    """No options."""

    name: ClassVar[str] = "cleanup"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=vary):
            term: Any = node.args[0]
            for user in node.users:
                if wanted := user.meta.get("dist_in"):  # a copy that another pass has made
                    pairs = zip(tensor_operands(user), wanted, strict=True)
                    user.meta["dist_in"] = tuple(term.meta["dist"] if o is node else dist for o, dist in pairs)
            node.replace_all_uses_with(term)
            graph.graph.erase_node(node)
        _deduplicate(graph.graph)
        _drop_dead(graph.graph)


def _deduplicate(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not is_collective(node):
            continue
        # ZeRO-3 gathers a parameter again in the backward on purpose: its bucket keeps the two apart.
        key = (node.target, node.args, phase_of(node), node.meta.get("bucket"))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _drop_dead(graph: fx.Graph) -> None:
    """Everything here is functional, so a node without users has no effect (placeholders stay)."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
