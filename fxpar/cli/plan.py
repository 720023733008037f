"""`fxpar plan`: the strategies that train a model fastest on a cluster, from shapes only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console

from fxpar.cli.console import Work, human_bytes, human_seconds, print_table, stdout_console, working
from fxpar.cli.options import GraphSource
from fxpar.cli.plan_commands import PlanRequest
from fxpar.cli.plan_galvatron import GalvatronRequest, run_import_galvatron, run_plan_galvatron
from fxpar.cli.request import collected_warnings, write_json, write_output
from fxpar.cli.source import read_rows
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import PlanOptionError
from fxpar.ir.exec_graph import Outline
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower, outline
from fxpar.models.depth import layer_option
from fxpar.models.options import parse_assignments
from fxpar.passes.pack_documents import DOCUMENTS
from fxpar.search.driver import Found, Problem, find_plan
from fxpar.search.lengths import mini_batches, read_lengths
from fxpar.search.plan_file import Plan, PlanGroup
from fxpar.search.price import Depth
from fxpar.search.pricing import PricedSet
from fxpar.search.space import shapes

BAR = 24  # columns of the longest bar


def run_plan(request: PlanRequest) -> None:
    """Do it. Raises FxparError."""
    if request.imported is not None:
        run_import_galvatron(request.imported, request.devices, request.json)
    elif request.cost == "galvatron":
        run_plan_galvatron(_galvatron(request))
    else:
        _run(request)


def _galvatron(request: PlanRequest) -> GalvatronRequest:
    return GalvatronRequest(
        request.profiles or "",
        request.devices or 1,
        request.batch or 1,
        request.seq_len or 1,
        request.memory or "",
        request.uniform,
        request.micro_batches,
        layers=request.layers,
        hidden=request.hidden,
        json=request.json,
    )


def _run(request: PlanRequest) -> None:
    lengths = read_lengths(request.lengths or "", request.seed)
    tokens = request.tokens_per_step or 1
    cluster = _cluster(request)
    memory = request.memory_bytes or _memory_of(cluster)
    with working() as status, collected_warnings([]):
        status.update(f"capturing {request.source.model}")
        at_depth, depth = _depth(request.source)
        example = read_rows(at_depth(depth.samples(1)[0]))
        if "input_ids" not in {info.fqn for info in example.inputs}:
            why = "its batch has no input_ids, and a plan is for sequences of tokens"
            raise PlanOptionError("MODEL", request.source.model, why)
        problem = Problem(
            shapes=_shapes(cluster, depth),
            cluster=cluster,
            batches=mini_batches(lengths, tokens, request.samples, request.seed),
            longest=int(lengths.max()),
            memory_bytes=memory,
            max_strategies=request.max_strategies,
            depth=depth,
            packed=DOCUMENTS in {info.fqn for info in example.inputs},
            overlap=request.overlap,
            keep=request.best,
        )
        found = _search(problem, at_depth, status)
    plan = _plan(request, cluster, found.plans[0], found, memory)
    if request.output is not None:
        write_output(request.output, plan.to_toml(_remarks(found, request.output)))
    if write_json(request.json, document(found)):
        _show(stdout_console(), request, found, problem)


def _search(problem: Problem, at_depth: Callable[[int], GraphSource], status: Work) -> Found:
    @functools.cache
    def rows(layers: int) -> LogicalGraph:
        return read_rows(at_depth(layers))

    @functools.cache
    def outlined(strategy: Strategy, layers: int) -> Outline:
        return outline(rows(layers), strategy)

    def lowered(strategy: Strategy, layers: int) -> TrainGraph:
        return lower(rows(layers), strategy, for_store=True)

    return find_plan(problem, lowered, outlined, status.update)


def _cluster(request: PlanRequest) -> ClusterSpec:
    """Raises ClusterError."""
    world = request.source.world
    if request.cluster is None:
        return usual_cluster(world or 1)
    cluster = ClusterSpec.from_file(request.cluster)
    if world is not None:
        cluster.require(world)
        local = min(world, cluster.devices_per_node)
        cluster = replace(cluster, nodes=-(-world // local), devices_per_node=local)
    return cluster


def _memory_of(cluster: ClusterSpec) -> int | None:
    gb = cluster.sustained.memory_gb
    return None if gb is None else int(gb * 1e9)


def _depth(source: GraphSource) -> tuple[Callable[[int], GraphSource], Depth]:
    """The source of the model with so many layers, and how deep it is."""
    option = layer_option(source.model, parse_assignments(source.options))
    if option is None:
        return lambda _: source, Depth(1, whole=True)

    def at_depth(layers: int) -> GraphSource:
        return (
            source if layers == option.layers else replace(source, options=(*source.options, f"{option.name}={layers}"))
        )

    return at_depth, Depth(option.layers, option.period)


def _shapes(cluster: ClusterSpec, depth: Depth) -> tuple[Strategy, ...]:
    return tuple(shapes(cluster.world, cluster.devices_per_node, depth.layers))


def _plan(request: PlanRequest, cluster: ClusterSpec, best: PricedSet, found: Found, memory: int | None) -> Plan:
    groups = tuple(PlanGroup(g.limit, g.strategy, g.token_budget, g.seconds) for g in best.groups)
    return Plan(
        model=request.source.model,
        world=cluster.world,
        tokens_per_step=request.tokens_per_step or 1,
        groups=groups,
        options=tuple(request.source.options),
        memory_budget_bytes=0 if memory is None else memory - best.optimizer_bytes,
        predicted_s=best.predicted_s,
        lower_bound_s=found.lower_bound_s,
    )


def _remarks(found: Found, path: str) -> list[str]:
    static = found.best_static
    faster = f"predicted: {found.speedup:.2f} times as fast as the best single strategy, {static.strategies[0]}"
    alone = f"predicted: no set of strategies is faster than {static.strategies[0]} alone"
    use = f"train with it: fxpar train run.toml --plan {path}"
    return [alone if len(found.plans[0].strategies) == 1 else faster, use]


def document(found: Found) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "plans": [_plan_json(plan, found) for plan in found.plans],
        "best_static": {"strategy": found.best_static.strategies[0], "predicted_s": found.best_static.predicted_s},
        "speedup": found.speedup,
        "search_cpu_s": found.search_cpu_s,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "planned_sets": found.planned_sets,
        "refused": found.refused,
    }


def _plan_json(plan: PricedSet, found: Found) -> dict[str, Any]:
    return {
        "groups": [vars(group) for group in plan.groups],
        "predicted_s": plan.predicted_s,
        "lower_bound_s": found.lower_bound_s,
        "memory_bytes": dict(plan.memory_bytes),
        "switch_s": plan.switch_s,
        "reduce_s": plan.reduce_s,
        "exposed_s": plan.exposed_s,
        "optimizer_s": plan.optimizer_s,
    }


def _show(console: Console, request: PlanRequest, found: Found, problem: Problem) -> None:
    best = found.plans[0]
    tokens = sum(map(sum, problem.batches)) / len(problem.batches)
    asked = request.tokens_per_step or 1
    whole = f" (the mean: as many whole sequences as fit into {asked:,})" if round(tokens) != asked else ""
    console.print(
        f"{request.source.model} on {problem.cluster.world} devices, {tokens:,.0f} tokens per mini-batch{whole}, "
        f"longest sequence {problem.longest:,}; predicted for "
        f"{request.cluster or 'usual GPUs'} ({problem.cluster.sustained})",
        markup=False,
    )
    for number, plan in enumerate(found.plans, 1):
        slower = (
            ""
            if number == 1
            else f", {plan.predicted_s / best.predicted_s - 1:.1%} slower, because of {_why(plan, best)}"
        )
        console.print(f"\nplan {number}: {human_seconds(plan.predicted_s)} per mini-batch{slower}", markup=False)
        _print_groups(console, plan, tokens)
    static = found.best_static
    gain = "; plan 1 is just that" if len(best.strategies) == 1 else f"; plan 1 is {found.speedup:.2f} times as fast"
    console.print(
        f"\nbest single strategy: {static.strategies[0]}, {human_seconds(static.predicted_s)}{gain}", markup=False
    )
    console.print(
        f"no set takes less than {human_seconds(found.lower_bound_s)} (gap {found.gap:.1%}); {found.evaluated} "
        f"strategies priced, {found.pruned} pruned, {len(found.refused)} refused, {found.planned_sets} sets planned in "
        f"{found.search_cpu_s:.1f} CPU s",
        markup=False,
    )
    if request.output is not None:
        console.print(f"plan 1 is in {request.output}", markup=False)


def _print_groups(console: Console, plan: PricedSet, tokens: float) -> None:
    longest = max(group.seconds for group in plan.groups)
    rows = [
        (
            f"up to {group.limit:,}",
            group.strategy,
            f"{group.token_budget:,}",
            f"{group.tokens / tokens:.1%}",
            human_seconds(group.seconds),
            human_bytes(plan.memory_bytes[group.strategy]),
            "#" * round(BAR * group.seconds / longest) if longest else "",
        )
        for group in plan.groups
    ]
    rows.append(("borders", "", "", "", human_seconds(plan.exposed_s), "", ""))
    rows.append(("optimizer", "", "", "", human_seconds(plan.optimizer_s), "", ""))
    titles = ("lengths", "strategy", "micro-batch", "tokens", "seconds", "memory", "")
    print_table(console, titles, rows, right=(0, 2, 3, 4, 5))


def _why(plan: PricedSet, best: PricedSet) -> str:
    """Where a plan loses most against the best one."""
    parts = {
        "its groups": sum(g.seconds for g in plan.groups) - sum(g.seconds for g in best.groups),
        "its switches and reductions": plan.exposed_s - best.exposed_s,
    }
    return max(parts, key=lambda name: parts[name])
