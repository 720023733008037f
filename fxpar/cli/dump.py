"""`fxpar dump`: the graph of a model at one stage, as text or JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fxpar.annotate import annotate
from fxpar.cli.console import stderr_console
from fxpar.cli.graph_json import graph_document
from fxpar.cli.request import (
    capture_model,
    check_output,
    collected_warnings,
    load_model,
    parse_strategies,
    to_json,
    write_output,
)
from fxpar.graph import LogicalGraph
from fxpar.lowering import lower
from fxpar.models.load import parse_dtype
from fxpar.printer import AnyGraph, format_graph
from fxpar.strategy import Strategy


@dataclass(frozen=True)
class DumpRequest:
    """The words of the command line; `strategy` is None for the logical stage."""

    model: str
    strategy: str | None
    stage: str
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


def run_dump(request: DumpRequest) -> None:
    """Do it. Raises FxparError."""
    begun = time.process_time()
    texts = () if request.strategy is None else (request.strategy,)
    strategies = parse_strategies(texts, request.overrides, request.world)
    check_output(request.output)
    notes: list[str] = []
    with stderr_console().status("") as status, collected_warnings(notes):
        status.update(f"capturing {request.model}")
        model = load_model(request.model, request.options, request.dtype, request.tokens, device="meta")
        logical = capture_model(model)
        status.update(f"lowering to {request.strategy}")
        graph = at_stage(logical, request.stage, strategies, request.storage)
    if request.as_json:
        document = graph_document(graph, request.stage)
        document["timings"]["total_cpu_s"] = time.process_time() - begun
        text = to_json(document)
    else:
        text = format_graph(graph, fold=request.fold, nodes=not request.brief)
    write_output(request.output, text)


def at_stage(logical: LogicalGraph, stage: str, strategies: list[Strategy], storage: str | None) -> AnyGraph:
    """The graph after capture, after annotate, or after all passes."""
    if stage == "logical":
        return logical
    if stage == "annotated":
        return annotate(logical, strategies[0])
    return lower(logical, strategies[0], storage=parse_dtype(storage) if storage else None)
