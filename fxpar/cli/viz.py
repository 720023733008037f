"""`fxpar viz`: a page that shows a model under one or several strategies, or files for other viewers."""

from __future__ import annotations

import functools
import json
import math
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpar.cli.commands import VizRequest
from fxpar.cli.console import human_seconds, stdout_console, working
from fxpar.cli.request import check_output, collected_warnings, named_once, to_json, write_output
from fxpar.cli.source import (
    apart,
    check_one_team,
    from_cache,
    placed_words,
    read_for_store,
    read_lowered,
    rows_once,
    strategies_of,
)
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import micro_batch_sizes
from fxpar.errors import (
    DrawnRanksError,
    OpenStdoutError,
    PlanFileError,
    PlanOptionError,
    SameOutputError,
    StageNeedsStrategyError,
)
from fxpar.explain.experts import experts_notes
from fxpar.graph_files import load_graph
from fxpar.ir.columns import human_bytes
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.printer import without_folders
from fxpar.ir.strategy import Strategy
from fxpar.search.plan_file import Plan, read_plan
from fxpar.version import __version__
from fxpar.viz import Viewed, page_html, view_document
from fxpar.viz.chrome_trace import chrome_trace
from fxpar.viz.graph_view import graph_section
from fxpar.viz.inside import Inside
from fxpar.viz.memory import memory_section
from fxpar.viz.mesh import mesh_section
from fxpar.viz.model_explorer import graph_collection, node_data, open_model_explorer, shown_parts
from fxpar.viz.timeline import inside_of, shown_steps, timeline_section

MOST_DRAWN = 2**14  # ranks: so many take 5 CPU seconds and 1 MB of a page


def run_viz(request: VizRequest) -> None:
    """Do it. Raises FxparError."""
    if request.open and request.target == "-":
        raise OpenStdoutError()
    if request.trace is not None and Path(request.trace).resolve() == Path(request.target).resolve():
        raise SameOutputError(request.target)
    for path in (request.target, request.trace):
        check_output(path)
    model = request.source.model
    request, plan = _planned(request)
    cluster = ClusterSpec.from_file(request.cluster) if request.cluster else None
    strategies = strategies_of(request.source, request.strategy_texts)
    notes = named_once(strategies)[1] if plan is None else _said(plan)
    with working() as status, collected_warnings(notes):

        def views() -> list[Viewed]:
            found = _views(request, cluster, plan, status.update)
            if plan is not None:
                plan.check_module(model, _parameters(found[0].graph), None)
            status.update("drawing")
            return found

        if request.form == "model-explorer" or request.trace is not None:
            written = _write(request, views(), notes)
        else:
            _write_document(request, _kept_document(request, cluster, plan, notes, views))
            written = [request.target]
    if request.target != "-":
        console = stdout_console()
        for path in written:
            console.print(f"{path}: {human_bytes(Path(path).stat().st_size)}", markup=False)
        for note in notes:
            console.print(f"note: {without_folders(note)}", markup=False)
    if request.open:
        _open(request, written)


def _planned(request: VizRequest) -> tuple[VizRequest, Plan | None]:
    """Where MODEL is a plan file: what to draw, and the plan. Raises PlanFileError, PlanOptionError."""
    source = request.source
    if not source.is_plan:
        return request, None
    from fxpar.models.loaders import is_function  # with the compiler, which a page from the cache does without

    plan = read_plan(source.model)
    for option, given in (("--set", source.options), ("--strategy", request.strategies)):
        if given:
            raise PlanOptionError(option, " ".join(given), f"{source.model} says it: edit the plan, or name its model")
    if is_function(plan.model) and not request.trust_plan:
        why = f"its model, {plan.model}, is a Python function, which would be imported and called"
        raise PlanFileError(source.model, why, "If you know the function, and who wrote the plan, add --trust-plan")
    plan.check(source.model, plan.model, plan.options, source.world)
    source = replace(source, model=plan.model, options=plan.options)
    return replace(request, source=source, strategies=tuple(group.strategy for group in plan.groups)), plan


def _parameters(graph: TrainGraph) -> int:
    """How many its model has, as whole tensors."""
    return sum(math.prod(map(int, info.meta.shape)) for info in graph.inputs if info.kind == "param")


def _said(plan: Plan) -> list[str]:
    """What a plan says beside its strategies."""
    took = f", {human_seconds(plan.predicted_s)} predicted" if plan.predicted_s else ""
    lines = [f"planned for {plan.tokens_per_step:,} tokens per mini-batch{took}"]
    for group in plan.groups:
        took = f", {human_seconds(group.seconds)} of a mean mini-batch" if group.seconds else ""
        micro = f"micro-batches of up to {group.token_budget:,} tokens"
        lines.append(f"sequences of up to {group.limit:,} tokens: {group.strategy}, {micro}{took}")
    return lines


def _views(
    request: VizRequest, cluster: ClusterSpec | None, plan: Plan | None, say: Callable[[str], object]
) -> list[Viewed]:
    """One for each strategy, or the one of a graph file."""
    budgets: dict[str, int] = {}
    for group in plan.groups if plan else ():
        name = str(Strategy.parse(group.strategy))
        budgets[name] = max(group.token_budget, budgets.get(name, 0))
    source = request.source
    strategies = apart(strategies_of(source, request.strategy_texts))
    for strategy in strategies:
        _check_ranks(strategy)
        if cluster:
            cluster.require(strategy.world)
    held = load_graph(source.model) if source.is_file else None
    pairs: list[tuple[TrainGraph, TrainGraph | None]] = []
    if held is not None and not isinstance(held, LogicalGraph):
        pairs = [(read_lowered(source, strategy), None) for strategy in strategies or [None]]
    elif not strategies:
        raise StageNeedsStrategyError("exec")
    else:
        rows = rows_once(source)
        for strategy in strategies:
            say(f"lowering {source.model} to {strategy}")
            by_itself = read_lowered(source, strategy, rows)
            pairs.append((by_itself, read_for_store(source, strategy, rows=rows)))
    views = []
    check_one_team("fxpar viz", [graph.strategy for graph, _ in pairs])
    for graph, stored in pairs:
        _check_ranks(graph.strategy)
        if cluster:
            cluster.require(graph.strategy.world)
        text = str(graph.strategy)
        tokens = request.tokens or budgets.get(text)
        sizes = None if tokens is None else micro_batch_sizes(graph, tokens)
        view = Viewed(text, graph, stored=stored, cluster=cluster, sizes=sizes, micro_batches=request.micro_batches)
        views.append(replace(view, tflops=request.tflops))
    return views


def _check_ranks(strategy: Strategy) -> None:
    """Raises DrawnRanksError."""
    if strategy.world > MOST_DRAWN:
        raise DrawnRanksError(str(strategy), strategy.world, MOST_DRAWN)


def _kept_document(
    request: VizRequest,
    cluster: ClusterSpec | None,
    plan: Plan | None,
    notes: Sequence[str],
    views: Callable[[], list[Viewed]],
) -> dict[str, Any]:
    """The page of `views()`, from the cache if it was drawn before."""
    source = request.source
    strategies = strategies_of(source, request.strategy_texts)
    what = {
        "kind": "page",
        "strategies": [placed_words(source, strategy) for strategy in strategies],
        "cluster": repr(cluster),
        "plan": repr(plan),
        "notes": list(notes),
        "tokens": request.tokens,
        "micro_batches": request.micro_batches,
        "tflops": request.tflops,
    }

    def build() -> dict[str, Any]:
        found = views()
        return _document(request, found, inside_of(found), notes)

    return from_cache(source, what, build, *strategies, answer=True)


def _write_document(request: VizRequest, document: dict[str, Any]) -> None:
    write_output(request.target, page_html(document) if request.form == "html" else to_json(document))


def _write(request: VizRequest, views: list[Viewed], notes: Sequence[str]) -> list[str]:
    """The files that were written, the one asked for first."""
    written = [request.target]
    insides = inside_of(views)
    if request.form == "model-explorer":
        shown = shown_parts(views)
        collection = graph_collection(request.source.model, shown)
        write_output(request.target, json.dumps(collection))
        if request.target != "-":
            for name, data in node_data(shown).items():
                path = str(Path(request.target).with_suffix(f".{name}.json"))
                write_output(path, json.dumps(data))
                written.append(path)
    else:
        _write_document(request, _document(request, views, insides, notes))
    if request.trace is not None:
        write_output(request.trace, json.dumps(_trace(views, insides)))
        written.append(request.trace)
    return written


def _document(
    request: VizRequest, views: list[Viewed], insides: Mapping[str, Inside], notes: Sequence[str]
) -> dict[str, Any]:
    sections = {
        "graph": graph_section(views),
        "mesh": mesh_section(views),
        "timeline": timeline_section(views, insides=insides),
        "memory": memory_section(views, insides, functools.partial(_kept, request)),
    }
    said = [*notes, *(f"{view.strategy}: {text}" for view in views for text in experts_notes(view.graph))]
    return view_document(request.source.model, views, sections, made_with=f"fxpar {__version__}", notes=said)


def _kept(request: VizRequest, view: Viewed, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Memory over time, from the cache if the same page was drawn before."""
    strategy = view.graph.strategy
    asked = {
        "sizes": dict(view.sizes or {}),
        "micro_batches": view.micro_batches,
        "cluster": repr(view.cluster),
        "tflops": view.tflops,
    }
    what = {"kind": "memory over time", **asked, **placed_words(request.source, strategy)}
    return from_cache(request.source, what, build, strategy)


def _trace(views: list[Viewed], insides: Mapping[str, Inside]) -> dict[str, Any]:
    """The predicted steps, with what is inside of micro-batches."""
    steps = shown_steps(views, insides)
    return chrome_trace({step.title: step.predicted for step in steps}, insides)


def _open(request: VizRequest, written: Sequence[str]) -> None:
    if request.form == "model-explorer":
        open_model_explorer(request.target, [path for path in written[1:] if path != request.trace])
    else:
        webbrowser.open(Path(request.target).resolve().as_uri())
