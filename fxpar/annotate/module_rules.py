"""Rules of a strategy on a graph: do they match, and can the modules do what they say?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxpar.errors import RuleGlobError, RuleHeadsError
from fxpar.ir.axes import BINS, EXPERTS, RING, USES
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.module_rules import PROPERTIES
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.ir.strategy import Strategy


def modules_of(graph: LogicalGraph | AnnotatedGraph) -> list[str]:
    """FQNs of all modules that compute something or have parameters."""
    body = graph.gm.graph if isinstance(graph, LogicalGraph) else graph.graph
    places = {fqn_of(node) for node in body.nodes if node.op == "call_function" and not is_backward(node)}
    for info in graph.inputs:
        places |= {name.rpartition(".")[0] for name in (info.fqn, *info.aliases) if info.kind == "param"}
    found = set()
    for place in places:
        parts = place.split(".")
        found |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return sorted(found - {""})


def check_rules(graph: LogicalGraph, strategy: Strategy, of: str = "the model") -> None:
    """Raises RuleGlobError for a rule that matches no module (`of` the whole, in words), RuleConflictError for two that
    say the same of one.
    """
    if not strategy.rules:
        return
    modules = modules_of(graph)
    for rule in strategy.rules:
        if not any(map(rule.matches, modules)):
            raise RuleGlobError(rule.glob, modules, of)
    for module in modules:
        for what in PROPERTIES:
            strategy.rule_of(module, what)


def check_heads(graph: AnnotatedGraph, uncut: Mapping[fx.Node, tuple[int, int]]) -> None:
    """`uncut` is attention that an axis leaves whole as heads do not divide, with the numbers of its query and of its
    key and value heads. Raises RuleHeadsError where a rule asked for it.
    """
    strategy = graph.strategy
    for node, (heads, kv_heads) in uncut.items():
        rule = strategy.rule_of(fqn_of(node))
        if rule is not None:
            found = strategy.rules[rule]
            for axis, degree in found.axes:  # bins and rings divide tokens, not heads
                legal = [d for d in range(1, heads + 1) if _divides(axis, d, heads, kv_heads)]
                if degree > 1 and axis not in (BINS, EXPERTS, RING) and degree not in legal:
                    nearest = min(legal, key=lambda d: (abs(d - degree), d))
                    asked, near = f"{axis}{degree}", f"{axis}{nearest}"
                    raise RuleHeadsError(str(found), fqn_of(node), heads, kv_heads, asked, near)


def _divides(axis: str, degree: int, heads: int, kv_heads: int) -> bool:
    """Whether attention with so many heads runs on so many ranks without doing work twice."""
    shared = heads // kv_heads
    narrow = USES[axis] == "weights" and degree % kv_heads == 0 and shared % (degree // kv_heads) == 0
    return kv_heads % degree == 0 or shared % degree == 0 or narrow
