"""Hide reductions: a gradient that is reduced in the body is waited for when the next one is about to be (ZeRO-2, 3).

Before: each wait stands in front of the first user of the reduced gradient: right behind the reduction, or at the end.
After: the wait and all that is made of the gradient stand in front of the next reduction, so that the network sums one
gradient while the device computes the next, as FSDP does (Zhao et al., "PyTorch FSDP", section 3.3.1), and no more of
them are held.

    %g1 = reduce_scatter(%a, "sum", "@dp")      %g1 = reduce_scatter(%a, "sum", "@dp")
    %w1 = wait_tensor(%g1)                      %b  = mm(%x, %y)
    %s1 = lower(%w1)                            %w1 = wait_tensor(%g1)
    %b  = mm(%x, %y)                            %s1 = lower(%w1)
    %g2 = reduce_scatter(%b, "sum", "@dp")      %g2 = reduce_scatter(%b, "sum", "@dp")

Cost: the same bytes; one more gradient is there while the next one is computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import phase_of
from fxpar.ir.pass_base import Tier


@dataclass(frozen=True)
class HideReductions:
    """No options."""

    name: ClassVar[str] = "hide_reductions"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        reductions = [
            node
            for node in graph.graph.nodes
            if collective_kind(node) in ("reduce_scatter", "all_reduce")
            and phase_of(node) == "body"
            and str(node.meta.get("bucket", "")).startswith("grads/")
        ]
        for one, following in itertools.pairwise(reductions):
            _move(_made_of(one), following)


def _made_of(reduction: fx.Node) -> list[fx.Node]:
    """The wait and what the body makes of the reduced gradient, in order."""
    found: set[fx.Node] = set()
    todo = list(reduction.users)
    while todo:
        node = todo.pop()
        if node not in found and node.op == "call_function" and phase_of(node) == "body":
            found.add(node)
            todo += node.users
    return sorted(found)


def _move(nodes: list[fx.Node], place: fx.Node) -> None:
    """In front of `place`, unless somebody else wants one of them before that; what needs more than is there by then
    stays behind it.
    """
    moving = set(nodes)
    if any(user < place for node in nodes for user in node.users if user not in moving) or place in moving:
        return
    for node in nodes:
        if all(operand < place for operand in node.all_input_nodes):
            place.prepend(node)
