"""Annotate: every value gets a placement, from a small search for each axis of a replica (tp, then cp).

Before: the graph of one replica with global shapes, as it was captured. After: the same calls; each node has a
`DistConfig` for its results (`meta["dist"]`) and its operands (`meta["dist_in"]`), which need not agree yet with how
the operands lie: `insert_reshards` sees to that.

    %y = aten.mm(%x, %w)          ->  %y: P(sum)@tp = aten.mm(%x: S(1)@tp, %w: S(0)@tp)

The axis that cuts weights is solved first, then the one that cuts tokens, on sizes local to the first.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sympy
from torch import fx

from fxpar.annotate.bins import check_bins
from fxpar.annotate.experts import check_experts
from fxpar.annotate.module_rules import check_rules
from fxpar.annotate.nesting import combine, is_within, modules_in_order_of_search
from fxpar.annotate.notes import (
    Choice,
    note_attention,
    note_idle_flags,
    note_missing_rules,
    note_uncut,
    warn_of_missing_rules,
)
from fxpar.annotate.policy import ContextAxis, boundary_placement, grad_cost, resolve_overrides
from fxpar.annotate.problem import RECEIVED, AxisProblem, build
from fxpar.annotate.roles import Policy, check_options, policy_of
from fxpar.annotate.solve import AxisSearch, Demand, Search
from fxpar.errors import NotYetError
from fxpar.flow import padding_hazard, token_symbol
from fxpar.ir.axes import whole_axis
from fxpar.ir.copies import copy_graph
from fxpar.ir.dist_config import DistConfig, OuterShard, P, Partial, Placement, R, Shard
from fxpar.ir.fqn import block_or_module_of, starred
from fxpar.ir.graph import TOKENS, AnnotatedGraph, LogicalGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, dists_of, fqn_of, input_kind, tensor_metas, tensor_of, whole_meta
from fxpar.ir.pass_base import Tier, tensor_operands
from fxpar.ir.strategy import Strategy
from fxpar.rules.option import Option
from fxpar.rules.view import Sizes, is_op, resolve

SENT = ("sent", "sent_grad")


@dataclass(frozen=True)
class Annotate:
    """The first pass of the ladder; another one in its place must leave a placement on every value.

    Raises OverrideError for an override that fits nothing, UnknownRoleError and RoleContractError for a role,
    RuleHeadsError for a rule that cuts heads which do not divide.
    """

    name: ClassVar[str] = "annotate"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        search_placements(graph)


@dataclass(frozen=True)
class AnnotateOnce:
    """`Annotate` for many strategies of one logical graph: those that differ only in what saves memory (ZeRO,
    recomputation) place every value alike, so one search is for all of them.
    """

    known: dict[Strategy, _Placed] = field(default_factory=dict)
    name: ClassVar[str] = Annotate.name
    tier: ClassVar[Tier] = Annotate.tier

    def __call__(self, graph: AnnotatedGraph) -> None:
        key = graph.strategy.placing()
        if key not in self.known:
            search_placements(graph)
            metas = tuple((node.name, dict(node.meta)) for node in graph.graph.nodes)
            self.known[key] = _Placed(metas, dict(graph.divisors), tuple(graph.notes))
            return
        found = self.known[key]
        for node, (name, meta) in zip(graph.graph.nodes, found.metas, strict=True):
            assert node.name == name, "a graph of another model"
            node.meta = dict(meta)
        graph.divisors.update(found.divisors)
        graph.notes.extend(found.notes)
        warn_of_missing_rules(graph)


@dataclass(frozen=True)
class _Placed:
    """What a search leaves: the metadata of each node by name, in order; divisors and notes of the graph."""

    metas: tuple[tuple[str, dict[str, Any]], ...]
    divisors: Mapping[str, int]
    notes: tuple[str, ...]


def annotate(logical: LogicalGraph, strategy: Strategy) -> AnnotatedGraph:
    """A copy of the logical graph with placements on every node. Raises as `unplaced` and `Annotate` do, RuleGlobError,
    RuleConflictError and BinsError.
    """
    check_rules(logical, strategy)
    check_bins(logical, strategy)
    check_experts(logical, strategy)
    return annotate_and_search(logical, strategy)[0]


def annotate_and_search(logical: LogicalGraph, strategy: Strategy) -> tuple[AnnotatedGraph, tuple[AxisSearch, ...]]:
    """As `annotate`, and the search of each axis that cuts something; their classes hold nodes of the copy. Unchecked:
    a pipeline stage need not have every module that a rule is about, nor say that its rows are packed.
    """
    graph = unplaced(logical, strategy)
    searches = search_placements(graph)
    graph.passes.append(Annotate.name)
    return graph, searches


def unplaced(logical: LogicalGraph, strategy: Strategy) -> AnnotatedGraph:
    """A copy of the logical graph for `strategy`, without placements yet.

    Raises NotYetError for teams and pipelines.
    """
    what = f"a graph of one mesh for '{strategy}'"
    if strategy.teams:
        raise NotYetError(what, "Take one team of it: strategy.of_team(0).")
    if strategy.pipeline_size > 1:
        raise NotYetError(what, "Cut it into stages: fxpar.lowering.pipeline.lower_pipeline.")
    return AnnotatedGraph(
        copy_graph(logical.gm.graph),
        logical.inputs,
        logical.outputs,
        logical.dims,
        strategy,
        logical.name,
        logical.constants,
        padding_hazard=padding_hazard(logical),
        timings=dict(logical.timings),
    )


def search_placements(graph: AnnotatedGraph) -> tuple[AxisSearch, ...]:
    """Place every value of `graph`, in place; the search of each axis that cuts something."""
    started = time.process_time()
    strategy, token = graph.strategy, token_symbol(graph)
    _label_placeholders(graph)
    sizes = Sizes([d.symbol for d in graph.dims], degrees_product(strategy), token)
    overrides = resolve_overrides(graph, strategy)
    _label_variants(graph, overrides)
    _label_rules(graph)
    searches: list[AxisSearch] = []
    choices: dict[str, Choice] = {}
    others: list[tuple[Choice, int]] = []
    for axis in strategy.model_axes:
        policy = policy_of(strategy, axis, overrides, token, graph.bins > 1)
        problem = build(graph.graph, sizes, policy.degree, others, policy, token)
        check_options(strategy, axis, problem)
        demands, of_rows = _demands(graph, problem, token, axis, policy), token is not None and str(token) != TOKENS
        searches.append(_search(axis, policy, problem, demands, of_rows))
        choices[axis] = _spread(searches[-1])
        others.append((choices[axis], policy.degree))
    _write(graph, choices, token)
    note_attention(graph, choices, sizes)
    note_uncut(graph, choices)
    note_idle_flags(graph)
    note_missing_rules(graph)
    if token is not None:
        graph.divisors[str(token)] = strategy.token_parts
    graph.timings["annotate_cpu_s"] = time.process_time() - started
    return tuple(searches)


def _label_placeholders(graph: AnnotatedGraph) -> None:
    """Parameters of repeated layers share a class; every other input is a class of its own."""
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        node.meta["kind"] = info.kind
        name = starred(info.fqn) if info.kind == "param" else info.fqn
        node.meta["class"] = (info.kind, name, info.requires_grad)


def _label_variants(graph: AnnotatedGraph, overrides: dict[str, Placement]) -> None:
    """Repeated blocks that the user treats differently are not repetitions of each other: they decide separately."""
    variants: dict[str, list[str]] = defaultdict(list)
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        if node.name in overrides:
            block = block_or_module_of(info.fqn)
            variants[block].append(f"{info.fqn.removeprefix(block)}={overrides[node.name]}")
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        if info.kind == "param":
            node.meta["class"] = (*node.meta["class"], *variants.get(block_or_module_of(info.fqn), ()))
    for node in graph.graph.nodes:
        if node.op == "call_function" and variants:
            node.meta["variant"] = tuple(variants.get(block_or_module_of(fqn_of(node)), ()))


def _label_rules(graph: AnnotatedGraph) -> None:
    """Each node gets the rule of its module, which decides for what axes are there, and classes of its own with it."""
    strategy = graph.strategy
    if not any(rule.axes for rule in strategy.rules):
        return
    fqns = {node: info.fqn for node, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        module = fqns[node].rpartition(".")[0] if node in fqns else fqn_of(node)
        # What comes from another stage lies as both agree on without rules, whatever module made it there.
        received = input_kind(node) in RECEIVED
        rule = node.meta["rule"] = None if received else strategy.rule_of(module)
        if node in fqns:
            node.meta["class"] = (*node.meta["class"], rule)
        node.meta["variant"] = (*node.meta.get("variant", ()), rule)


def _demands(
    graph: AnnotatedGraph, problem: AxisProblem, token: sympy.Symbol | None, axis: str, policy: Policy
) -> list[Demand]:
    """What the graph's results may be: a gradient lies like its parameter, or stays partial if that is replicated.

    Buffers, values and gradients of the batch leave whole, what goes to another stage as `boundary_placement` says. On
    a data axis terms of gradients cost nothing: they are summed with those of the replicas.
    """
    cuts_tokens = axis in graph.strategy.token_axes
    placeholder = {
        info.fqn: node for node, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"
    }
    demands: dict[tuple, Demand] = {}
    for node, output in zip(graph.results, graph.outputs, strict=True):
        source, index = resolve(node)
        value = (problem.class_of[source], index)
        if output.kind in ("buffer", "value", "input_grad"):
            demand = Demand(value, (R,), (0.0,))
        elif output.kind in SENT:
            demand = Demand(value, (boundary_placement(tensor_of(node), token, cuts_tokens),), (0.0,))
        elif output.kind == "loss":
            demand = Demand(value, (R, P), (0.0, 0.0))
        else:
            param = problem.class_of[placeholder[output.fqn]]
            lies = [o.outputs[0] for o in problem.classes[param].options]
            is_data = isinstance(policy.of(problem.classes[param]), ContextAxis)
            nbytes = problem.sizes.nbytes(tensor_metas(source)[index])  # type: ignore[arg-type]
            later = 0.0 if is_data else grad_cost(nbytes, P, problem.degree)
            if param in problem.narrow:
                later = 0.0  # heads, not bytes, decide how these lie
            whole = [(R, 0.0, R), (P, later, R)] if R in lies else []  # the gradient's, its cost, the parameter's
            cut = [(p, 0.0, p) for p in lies if p != R]
            terms = [(replace(p, inner=P), later, p) for p in lies if isinstance(p, OuterShard)]
            placements, costs, ties = zip(*whole, *cut, *terms, strict=True)
            demand = Demand(value, placements, costs, param, ties)
        demands[(demand.value, demand.options, demand.tie)] = demand
    return list(demands.values())


def _search(axis: str, policy: Policy, problem: AxisProblem, demands: list[Demand], of_rows: bool) -> AxisSearch:
    search = Search(problem, lambda entry, option: policy.node_cost(problem, entry, option), demands, of_rows)
    return AxisSearch(axis, policy, search, search.run())


def _spread(found: AxisSearch) -> Choice:
    return {node: found.solution.options[index] for node, index in found.problem.class_of.items()}


def _write(graph: AnnotatedGraph, choices: Mapping[str, Choice], token: sympy.Symbol | None) -> None:
    """Put DistConfigs on all nodes from the choices of all axes."""
    mesh, bins = graph.strategy.mesh, graph.strategy.bin_axes

    configs: dict[Any, DistConfig] = {}

    def config(meta: TensorMeta, placements: Mapping[str, Placement], roles: Mapping[str, str] | None) -> DistConfig:
        key = (meta, tuple(placements.items()), tuple((roles or {}).items()))
        if key not in configs:
            whole = DistConfig.replicated(mesh, len(meta.shape), meta.dtype)
            configs[key] = combine(whole, meta, placements, token, roles, bins)
        return configs[key]

    fqns = {node: info.fqn for node, info in zip(graph.placeholders, graph.inputs, strict=True)}
    as_found = modules_in_order_of_search(graph.graph.nodes, choices, graph.strategy)

    def roles_of(node: fx.Node, rule: int | None, chosen: Mapping[str, Option]) -> Mapping[str, str] | None:
        """Cuts in sections, and those that leave ranks over, are right in the order in which they were found; then all
        tensors of the op lie so.
        """
        if as_found and is_within(fqns[node].rpartition(".")[0] if node in fqns else fqn_of(node), as_found):
            return None
        places = [place for option in chosen.values() for place in (*option.inputs, *option.outputs)]
        if any(isinstance(place, OuterShard) or (isinstance(place, Shard) and place.sections) for place in places):
            return None
        return {axis: graph.strategy.axis_in(axis, rule) for axis in chosen}

    made: dict[Any, tuple[tuple[DistConfig | None, ...], tuple[DistConfig, ...]]] = {}  # repeated layers share theirs
    for node in graph.graph.nodes:
        if node.op == "placeholder" or is_op(node):
            metas = tensor_metas(node)
            chosen = {axis: choice[node] for axis, choice in choices.items()}
            taken = tuple(tensor_of(operand) for operand in tensor_operands(node))
            rule = node.meta.get("rule")
            roles = roles_of(node, rule, chosen)
            key = (*map(id, chosen.values()), metas, taken, rule, roles is None)
            if key not in made:
                made[key] = (
                    tuple(
                        config(m, {axis: option.outputs[j] for axis, option in chosen.items()}, roles) if m else None
                        for j, m in enumerate(metas)
                    ),
                    tuple(
                        config(m, {axis: option.inputs[i] for axis, option in chosen.items()}, roles)
                        for i, m in enumerate(taken)
                    ),
                )
            dist, node.meta["dist_in"] = made[key]
            node.meta["dist"] = dist if isinstance(whole_meta(node), tuple) else dist[0]
        elif node.op == "call_function" and tensor_metas(node):  # getitem
            source, index = resolve(node)
            node.meta["dist"] = dists_of(source)[index]
    (output,) = graph.graph.find_nodes(op="output")
    by_fqn = {info.fqn: n for n, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "param"}
    output.meta["dist_in"] = tuple(
        _result_config(graph, node, out.kind, by_fqn.get(out.fqn), token)
        for node, out in zip(graph.results, graph.outputs, strict=True)
    )


def _result_config(
    graph: AnnotatedGraph, node: fx.Node, kind: str, param: fx.Node | None, token: sympy.Symbol | None
) -> DistConfig:
    """How a result leaves the body: like its parameter, or partial on axes that are summed up afterwards."""
    made = dist_of(node)
    lies = dist_of(param) if param is not None and kind == "grad" else None
    target = lies or DistConfig.replicated(graph.strategy.mesh, made.ndim, made.dtype)
    if kind in SENT:
        meta = tensor_of(node)
        cut = boundary_placement(meta, token, True)
        axes = graph.strategy.token_axes
        return combine(
            target, meta, dict.fromkeys(axes, cut), token, {a: whole_axis(a) for a in axes}, graph.strategy.bin_axes
        )
    if kind in ("loss", "grad"):
        parts = [atom for atom in graph.strategy.atoms if ":" in atom]
        for axis, op in made.in_parts(parts).partial:
            if target.placement(axis) == R:
                target = target.with_placement(axis, Partial(op))
        target = target.whole(tensor_of(node).shape) if parts else target
    return target


def degrees_product(strategy: Strategy) -> int:
    """What divides by all degrees inside of a replica, also after a cut by each of them."""
    return math.prod(map(strategy.degree, strategy.model_axes)) ** 2


__all__ = ["Annotate", "annotate", "annotate_and_search", "search_placements", "unplaced"]
