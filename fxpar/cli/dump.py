"""`fxpar dump`: the graph of a model at one stage, as text or JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fxpar.annotate import annotate
from fxpar.cli.console import stderr_console
from fxpar.cli.graph_json import graph_document, schedule_document
from fxpar.cli.request import (
    capture_model,
    check_output,
    collected_warnings,
    in_precision,
    load_model,
    parse_strategies,
    to_json,
    write_output,
)
from fxpar.errors import NoScheduleError, StageIndexError
from fxpar.graph import LogicalGraph
from fxpar.lowering import lower
from fxpar.memory import schedule_of
from fxpar.models.load import parse_dtype
from fxpar.pipeline_graph import PipelineGraph
from fxpar.printer import AnyGraph, format_graph
from fxpar.schedule import Action, Costs, Timeline, chart, simulate
from fxpar.strategy import Strategy


@dataclass(frozen=True)
class DumpRequest:
    """The words of the command line; `strategy` is None for the logical stage, `pipeline_stage` for all of them.

    `schedule`: of the pipeline, in place of the graph.
    """

    model: str
    strategy: str | None
    stage: str
    pipeline_stage: int | None = None
    schedule: bool = False
    micro_batches: int | None = None
    as_json: bool = False
    output: str = "-"
    fold: bool = True
    brief: bool = False
    dtype: str = "float32"
    storage: str | None = None
    tokens: str | None = None
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    world: int | None = None
    precision: str | None = None


def run_dump(request: DumpRequest) -> None:
    """Do it. Raises FxparError."""
    begun = time.process_time()
    texts = () if request.strategy is None else (request.strategy,)
    strategies = parse_strategies(texts, request.overrides, request.world)
    for strategy in strategies:
        _check_stages(request, strategy)
    check_output(request.output)
    notes: list[str] = []
    with stderr_console().status("") as status, collected_warnings(notes):
        status.update(f"capturing {request.model}")
        model = load_model(request.model, request.options, request.dtype, request.tokens, device="meta")
        logical = in_precision(capture_model(model), request.precision)
        status.update(f"lowering to {request.strategy}")
        graph = at_stage(logical, request.stage, strategies, request.storage)
    if request.schedule and isinstance(graph, PipelineGraph):
        timeline = planned(graph, request.micro_batches)
        document: dict[str, Any] = schedule_document(graph, timeline)
        text = schedule_text(graph, timeline)
    else:
        document = graph_document(graph, request.stage, request.pipeline_stage) if request.as_json else {}
        text = format_graph(graph, fold=request.fold, nodes=not request.brief, stage=request.pipeline_stage)
    if request.as_json:
        document.setdefault("timings", {})["total_cpu_s"] = time.process_time() - begun
        text = to_json(document)
    write_output(request.output, text)


def at_stage(logical: LogicalGraph, stage: str, strategies: list[Strategy], storage: str | None) -> AnyGraph:
    """The graph after capture, after annotate, or after all passes."""
    if stage == "logical":
        return logical
    if stage == "annotated":
        return annotate(logical, strategies[0])
    return lower(logical, strategies[0], storage=parse_dtype(storage) if storage else None)


def planned(graph: PipelineGraph, micro_batches: int | None) -> Timeline:
    """The schedule run on paper, by default with one micro-batch per pipeline rank. Each stage takes as long as its
    forward has FLOPs, all of a rank's together 1 ms on average, and twice of it for the backward. Raises
    MicroBatchCountError.
    """
    mean = sum(graph.flops) / graph.strategy.degree("pp") or 1.0

    def forward_ms(action: Action) -> float:
        return graph.flops[action.stage] / mean

    plan = schedule_of(graph, micro_batches or graph.strategy.degree("pp"))
    return simulate(plan, Costs(forward_ms=forward_ms, backward_ms=lambda action: 2 * forward_ms(action)))


def schedule_text(graph: PipelineGraph, timeline: Timeline) -> str:
    """The chart under a line that says what a millisecond stands for."""
    head = f"{graph.name} under {graph.strategy}; 1 ms stands for the forward of a rank's mean share of the model"
    return f"{head}\n{chart(timeline)}\n"


def _check_stages(request: DumpRequest, strategy: Strategy) -> None:
    """Raises StageIndexError, NoScheduleError."""
    if request.schedule and strategy.degree("pp") == 1:
        raise NoScheduleError(str(strategy))
    index = request.pipeline_stage
    if index is not None and (strategy.degree("pp") == 1 or index >= strategy.stages):
        raise StageIndexError(index, str(strategy), strategy.stages)
