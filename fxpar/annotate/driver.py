"""Annotate: every value gets a placement, from two small searches (tp, then cp).

Before: the graph of one replica with global shapes, as it was captured. After: the same calls; each node has a
`DistConfig` for its results (`meta["dist"]`) and its operands (`meta["dist_in"]`), which need not agree yet with how
the operands lie: `insert_reshards` sees to that.

    %y = aten.mm(%x, %w)          ->  %y: P(sum)@tp = aten.mm(%x: S(1)@tp, %w: S(0)@tp)

The tensor axis is solved first (it decides how weights lie), then the context axis on sizes local to the tensor axis.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy
from torch import fx

from fxpar.annotate.policy import (
    ContextAxis,
    TensorAxis,
    boundary_placement,
    grad_cost,
    resolve_overrides,
)
from fxpar.annotate.problem import AxisProblem, build
from fxpar.annotate.roles import check_options, context_policy, tensor_policy
from fxpar.annotate.solve import AxisSearch, Demand, Search
from fxpar.errors import NotYetError, warn
from fxpar.flow import padding_hazard, token_symbol
from fxpar.ir.dist_config import DistConfig, OuterShard, P, Partial, Placement, R, Shard
from fxpar.ir.fqn import block_or_module_of, starred
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, dists_of, fqn_of, source_of, tensor_metas, tensor_of, whole_meta
from fxpar.ir.pass_base import Tier, tensor_operands
from fxpar.ir.strategy import Strategy
from fxpar.rules.option import Option
from fxpar.rules.table import REPLICATED_ON_PURPOSE, own, rule_of
from fxpar.rules.view import Sizes, is_op, resolve

Choice = dict[fx.Node, Option]
SENT = ("sent", "sent_grad")


@dataclass(frozen=True)
class Annotate:
    """The first pass of the ladder; another one in its place must leave a placement on every value.

    Raises OverrideError for an override that fits nothing, UnknownRoleError and RoleContractError for a role.
    """

    name: ClassVar[str] = "annotate"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        search_placements(graph)


def annotate(logical: LogicalGraph, strategy: Strategy) -> AnnotatedGraph:
    """A copy of the logical graph with placements on every node. Raises as `unplaced` and `Annotate` do."""
    return annotate_and_search(logical, strategy)[0]


def annotate_and_search(logical: LogicalGraph, strategy: Strategy) -> tuple[AnnotatedGraph, tuple[AxisSearch, ...]]:
    """As `annotate`, and the search of each axis that cuts something; their classes hold nodes of the copy."""
    graph = unplaced(logical, strategy)
    searches = search_placements(graph)
    graph.passes.append(Annotate.name)
    return graph, searches


def unplaced(logical: LogicalGraph, strategy: Strategy) -> AnnotatedGraph:
    """A copy of the logical graph for `strategy`, without placements yet.

    Raises NotYetError for axes that the lowering does not know.
    """
    if strategy.degree("pp") > 1:
        raise NotYetError(
            f"a graph of one mesh for '{strategy}'", "Cut it into stages: fxpar.lowering.pipeline.lower_pipeline."
        )
    if strategy.degree("ep") > 1:
        raise NotYetError(f"axis 'ep' of strategy '{strategy}'", "Use dp, pp, cp and tp.")
    graph = fx.Graph()
    graph.output(graph.graph_copy(logical.gm.graph, {}))
    return AnnotatedGraph(
        graph,
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
    tensor, context = strategy.degree("tp"), strategy.degree("cp")
    sizes = Sizes([d.symbol for d in graph.dims], tensor * tensor * context, token)
    overrides = resolve_overrides(graph, strategy)
    _label_variants(graph, overrides)
    searches: list[AxisSearch] = []
    tp: Choice = {}
    if tensor > 1:
        axis = tensor_policy(strategy, overrides, token)
        problem = build(graph.graph, sizes, tensor, None, 1, axis, token)
        check_options(strategy, "tp", problem)
        searches.append(_search("tp", axis, problem, _demands(graph, problem, token, strategy.sp)))
        tp = _spread(searches[-1])
    cp: Choice = {}
    if context > 1:
        across = context_policy(strategy, token)
        problem = build(graph.graph, sizes, context, tp, tensor, across, token)
        check_options(strategy, "cp", problem)
        searches.append(_search("cp", across, problem, _demands(graph, problem, token, None)))
        cp = _spread(searches[-1])
    _write(graph, tp, cp, token)
    _note_attention(graph, tp, cp)
    _note_missing_rules(graph)
    if token is not None:
        graph.divisors[str(token)] = context * (tensor if strategy.sp else 1)
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


def _demands(graph: AnnotatedGraph, problem: AxisProblem, token: sympy.Symbol | None, sp: bool | None) -> list[Demand]:
    """What the graph's results may be: a gradient lies like its parameter, or stays partial if that is replicated.

    Buffers, values and gradients of the batch leave whole, what goes to another stage as `boundary_placement` says.
    `sp` is None on the context axis.
    """
    tensor_axis, cuts_tokens = sp is not None, sp is not False
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
            nbytes = problem.sizes.nbytes(tensor_metas(source)[index])  # type: ignore[arg-type]
            later = grad_cost(nbytes, P, problem.degree) if tensor_axis else 0.0
            if param in problem.narrow:
                later = 0.0  # heads, not bytes, decide how these lie
            whole = [(R, 0.0, R), (P, later, R)] if R in lies else []  # the gradient's, its cost, the parameter's
            cut = [(p, 0.0, p) for p in lies if p != R]
            terms = [(replace(p, inner=P), later, p) for p in lies if isinstance(p, OuterShard)]
            placements, costs, ties = zip(*whole, *cut, *terms, strict=True)
            demand = Demand(value, placements, costs, param, ties)
        demands[(demand.value, demand.options, demand.tie)] = demand
    return list(demands.values())


def _search(axis: str, policy: TensorAxis | ContextAxis, problem: AxisProblem, demands: list[Demand]) -> AxisSearch:
    search = Search(problem, lambda entry, option: policy.node_cost(problem, entry, option), demands)
    return AxisSearch(axis, policy, search, search.run())


def _spread(found: AxisSearch) -> Choice:
    return {node: found.solution.options[index] for node, index in found.problem.class_of.items()}


def _write(graph: AnnotatedGraph, tp: Choice, cp: Choice, token: sympy.Symbol | None) -> None:
    """Put DistConfigs on all nodes from the two axes' choices."""
    mesh = graph.strategy.mesh

    def config(meta: TensorMeta, on_tp: Placement, on_cp: Placement) -> DistConfig:
        return combine(DistConfig.replicated(mesh, len(meta.shape), meta.dtype), meta, on_tp, on_cp, token)

    for node in graph.graph.nodes:
        if node.op == "placeholder" or is_op(node):
            metas = tensor_metas(node)
            on_tp, on_cp = tp.get(node), cp.get(node)
            dist = tuple(
                config(m, on_tp.outputs[j] if on_tp else R, on_cp.outputs[j] if on_cp else R) if m else None
                for j, m in enumerate(metas)
            )
            node.meta["dist"] = dist if isinstance(whole_meta(node), tuple) else dist[0]
            operands = tensor_operands(node)
            node.meta["dist_in"] = tuple(
                config(
                    tensor_of(operand),
                    on_tp.inputs[i] if on_tp else R,
                    on_cp.inputs[i] if on_cp else R,
                )
                for i, operand in enumerate(operands)
            )
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
        meta, strategy = tensor_of(node), graph.strategy
        on_tp = boundary_placement(meta, token, strategy.sp and strategy.degree("tp") > 1)
        on_cp = boundary_placement(meta, token, strategy.degree("cp") > 1)
        return combine(target, meta, on_tp, on_cp, token)
    if kind in ("loss", "grad"):
        for axis, op in made.partial:
            if target.placement(axis) == R:
                target = target.with_placement(axis, Partial(op))
    return target


def combine(
    base: DistConfig, meta: TensorMeta, on_tp: Placement, on_cp: Placement, token: sympy.Symbol | None
) -> DistConfig:
    """Both axes on one tensor. On a token dim cp cuts first (its piece is a run of tokens), elsewhere tp."""
    order: tuple[tuple[str, Placement], ...] = (("tp", on_tp), ("cp", on_cp))
    if isinstance(on_tp, Shard) and isinstance(on_cp, Shard) and on_tp.dim == on_cp.dim:
        size = meta.shape[on_tp.dim]
        if not isinstance(size, int) and token in size.free_symbols:
            order = (("cp", on_cp), ("tp", on_tp))
    for axis, placement in order:
        if placement != R:
            base = base.with_placement(axis, placement)
    return base


def _note_attention(graph: AnnotatedGraph, tp: Choice, cp: Choice) -> None:
    """Say where heads did not divide and what was done instead."""
    for axis, choice in (("tp", tp), ("cp", cp)):
        places = defaultdict(list)
        for node, option in choice.items():
            if node.target is own.attention.default and not any(isinstance(p, Shard) for p in option.inputs):
                heads = tuple(tensor_of(node.args[i]).shape[1] for i in (0, 1))  # type: ignore[union-attr]
                places[(starred(fqn_of(node)), heads)].append(node)
        for (fqn, (heads, kv_heads)), nodes in places.items():
            graph.notes.append(
                f"{len(nodes)} attention op(s) in {fqn or 'the root'}: {heads} query / {kv_heads} key-value heads do "
                f"not divide by {axis}={graph.strategy.degree(axis)}; attention runs whole on each {axis} rank"
            )


def _note_missing_rules(graph: AnnotatedGraph) -> None:
    """Warn of ops that run replicated only because nobody wrote their rule."""
    if graph.strategy.degree("tp") * graph.strategy.degree("cp") == 1:
        return
    missing = defaultdict(list)
    for node in graph.graph.nodes:
        if is_op(node) and rule_of(node.target) is None and node.target not in REPLICATED_ON_PURPOSE:
            missing[str(node.target)].append(node)
    for name, nodes in missing.items():
        where = source_of(nodes[0]) or fqn_of(nodes[0]) or "the model"
        note = f"op {name} ({len(nodes)}x, first at {where}) has no sharding rule: it runs replicated"
        graph.notes.append(note)
        warn(note)


__all__ = ["Annotate", "annotate", "annotate_and_search", "combine", "search_placements", "unplaced"]
