"""What `fxpar viz` draws: graphs read for each strategy, the sections of a page, files for other viewers.

Apart from the command, as a page from the cache does without all that draws.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpar.batching import length_groups
from fxpar.cli.commands import VizRequest
from fxpar.cli.request import write_output
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
from fxpar.errors import DrawnRanksError, StageNeedsStrategyError
from fxpar.explain.experts import experts_notes
from fxpar.graph_files import load_graph
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.search.plan_file import Plan
from fxpar.version import __version__
from fxpar.viz.chrome_trace import chrome_trace
from fxpar.viz.document import view_document
from fxpar.viz.graph_view import graph_section
from fxpar.viz.inside import Inside
from fxpar.viz.memory import memory_section
from fxpar.viz.mesh import mesh_section
from fxpar.viz.model_explorer import graph_collection, node_data, shown_parts
from fxpar.viz.timeline import shown_steps, timeline_section
from fxpar.viz.viewed import Viewed

MOST_DRAWN = 2**14  # ranks: so many take 5 CPU seconds and 1 MB of a page


def parameters_of(graph: TrainGraph) -> int:
    """How many its model has, as whole tensors."""
    return sum(math.prod(map(int, info.meta.shape)) for info in graph.inputs if info.kind == "param")


def views_of(
    request: VizRequest, cluster: ClusterSpec | None, plan: Plan | None, say: Callable[[str], object]
) -> list[Viewed]:
    """One for each strategy, or the one of a graph file."""
    budgets = {} if plan is None else _budgets(plan)
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


def _budgets(plan: Plan) -> dict[str, int]:
    """Most tokens of a micro-batch by strategy; of rounds by formation."""
    found: dict[str, int] = {}
    for one in plan.groups:
        groups = length_groups({one.limit: one.strategy}, world=plan.world, token_budget={one.limit: one.token_budget})
        for group in groups:
            name = str(group.strategy)
            found[name] = max(group.token_budget, found.get(name, 0))
    return found


def _check_ranks(strategy: Strategy) -> None:
    """Raises DrawnRanksError."""
    if strategy.world > MOST_DRAWN:
        raise DrawnRanksError(str(strategy), strategy.world, MOST_DRAWN)


def write_graphs(request: VizRequest, views: list[Viewed]) -> list[str]:
    """For Model Explorer; the files that were written, the one asked for first."""
    written = [request.target]
    shown = shown_parts(views)
    write_output(request.target, json.dumps(graph_collection(request.source.model, shown)))
    if request.target != "-":
        for name, data in node_data(shown).items():
            path = str(Path(request.target).with_suffix(f".{name}.json"))
            write_output(path, json.dumps(data))
            written.append(path)
    return written


def write_trace(path: str, views: list[Viewed], insides: Mapping[str, Inside]) -> None:
    """The predicted steps, with what is inside of micro-batches."""
    steps = shown_steps(views, insides)
    write_output(path, json.dumps(chrome_trace({step.title: step.predicted for step in steps}, insides)))


def document_of(
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
