"""Which forward values are computed again in the backward, for each way to say it."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from fxpar.cost.calls import busy_s
from fxpar.cost.cluster import USUAL
from fxpar.cost.ops import SizesAt, flops
from fxpar.errors import RematBudgetError, RematGlobError
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.remat import Remat
from fxpar.ir.strategy import Strategy
from fxpar.remat.cut import Cut, least_bytes, least_work
from fxpar.remat.forward import ForwardValues, forward_values, is_communication, prefixes
from fxpar.remat.storages import trace_storages

# What a graph computes again must not depend on where it was lowered: ranks compare graphs, and a cache keeps them.
_CLUSTER = USUAL["cuda"]
_LEAST_S = 1e-15  # views take no time, but of two cuts the one that repeats fewer of them is better


def chosen_by_module(graph: AnnotatedGraph, dims: Mapping[sympy.Symbol, int]) -> frozenset[fx.Node]:
    """As `choose`, with what the strategy says of each module, its rules included."""
    strategy, values = graph.strategy, forward_values(graph)
    if not any("remat" in rule.says for rule in strategy.rules):
        return choose(graph, strategy.remat, dims) if strategy.remat else frozenset()
    by_rule: dict[int | None, dict[fx.Node, str]] = {}
    for node in values.nodes:
        place = values.place_of(node)
        by_rule.setdefault(strategy.rule_of(place, "remat"), {})[node] = place
    found: set[fx.Node] = set()
    for index, places in by_rule.items():
        rule = None if index is None else strategy.rules[index]
        remat = strategy.remat if rule is None else rule.remat
        if remat is None or remat.mode == "none":
            continue
        if rule is None or remat.mode != "full":
            found |= choose(graph, remat, dims) & places.keys()
            continue
        region = {node: _outermost(rule, place) for node, place in places.items()}
        found |= _inside(values, region, remat)
    return frozenset(found)


def _outermost(rule: ModuleRule, place: str) -> str:
    """The outermost module that the rule matches, of those around a place."""
    return next((module for module in prefixes(place) if rule.matches(module)), "")


def _named(strategy: Strategy) -> str:
    """With the ranks of a team or stage that is not the first."""
    first = strategy.offset
    return f"'{strategy}'" + (f" on ranks {first} to {first + strategy.world - 1}" if first else "")


def choose(graph: AnnotatedGraph, remat: Remat, dims: Mapping[sympy.Symbol, int]) -> frozenset[fx.Node]:
    """Forward nodes to run again where the backward needs their values; all others are saved if they are needed.

    `graph` stands between `lower_collectives` and `bucket_collectives`; bytes are those with the dynamic dims at
    `dims`. What one block hands to the next is always saved, so no more than one block is recomputed at a time.

    Raises RematGlobError, RematBudgetError.
    """
    values = forward_values(graph)
    if remat.mode == "full":
        return _inside(values, values.blocks(), remat)
    if remat.mode == "modules":
        region, unused = values.modules(remat.globs)
        if unused:
            raise RematGlobError(unused[0], values.module_names())
        return _inside(values, region, remat)
    return _cheapest(graph, values, remat, dims)


def _inside(values: ForwardValues, region: dict[fx.Node, str], remat: Remat) -> frozenset[fx.Node]:
    """Everything in a region but what leaves it."""
    keep = remat.collectives == "keep"
    return frozenset(
        node
        for node in region
        if node not in values.fixed
        and not values.leaves_region(node, region)
        and not (keep and is_communication(node) and node not in values.gathered)
    )


def _cheapest(
    graph: AnnotatedGraph, values: ForwardValues, remat: Remat, dims: Mapping[sympy.Symbol, int]
) -> frozenset[fx.Node]:
    storages = trace_storages(graph.graph, dims)
    region = {node: "" for node in values.nodes} | values.blocks()
    allowed = {n for n in values.nodes if n not in values.fixed and not values.leaves_region(n, region)}
    if remat.collectives == "keep" or (remat.mode == "selective" and remat.collectives == "auto"):
        allowed -= {n for n in allowed if is_communication(n)}
    shape = SizesAt(dims)
    work = {node: float(busy_s(node, shape, _CLUSTER)) + _LEAST_S for node in allowed}
    returned = frozenset(s for node in graph.results for s in storages.of[node])
    if remat.mode == "selective":
        allowed = {n for n in allowed if not flops(n, shape)}
        return least_bytes(Cut(values, storages, frozenset(allowed), work, returned)).recomputed
    cut = Cut(values, storages, frozenset(allowed), work, returned)
    least = least_bytes(cut)
    if least.saved_bytes > remat.budget_bytes:
        sizes = {str(k): v for k, v in dims.items()}
        raise RematBudgetError(remat.budget_bytes, least.saved_bytes, sizes, _named(graph.strategy))
    return least_work(cut, remat.budget_bytes, least).recomputed
