"""`fxpar diff`: two strategies of a model, two graph files, or a graph after two passes, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fxpar.cli.commands import DiffRequest
from fxpar.cli.console import stdout_console, working
from fxpar.cli.diff_show import show
from fxpar.cli.request import check_output, collected_warnings, write_json
from fxpar.cli.source import apart, check_one_team, read_graph, strategies_of
from fxpar.errors import NoModuleError, SidesError, nearest
from fxpar.graph_diff import Digest, compare, digest
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.printer import AnyGraph
from fxpar.ir.strategy import Strategy


def run_diff(request: DiffRequest) -> bool:
    """Do it; False if the graphs differ and the exit status is to say so. Raises FxparError."""
    begun = time.process_time()
    strategies = strategies_of(request.source, request.strategy_texts)
    strategies = apart(strategies) if any(one.teams for one in strategies) else strategies
    check_output(request.json)
    notes: list[str] = []
    with working() as status, collected_warnings(notes):
        status.update(f"reading {request.source.model}")
        of_passes = request.passes or request.before or request.after
        old, new = _passes(request, strategies) if of_passes else _graphs(request, strategies)
    _check_glob(old, new, request.fqn)
    diff = compare(old, new)
    timings = {"total_cpu_s": time.process_time() - begun}
    if write_json(request.json, {**diff.to_json(), "timings": timings}):
        show(stdout_console(), diff, nodes=not request.brief, text=request.text)
    return not (diff.differs and request.exit_code)


def _passes(request: DiffRequest, strategies: list[Strategy]) -> list[Digest]:
    """A graph after two passes."""
    if len(strategies) != 1 or request.other is not None:
        raise SidesError("passes are compared within the lowering of one model", "Give one MODEL and one strategy")
    from fxpar.cli.after_pass import after_passes, steps_of

    steps = steps_of(request.passes, request.before, request.after)
    return after_passes(request.source, strategies[0], steps, request.fqn)


def _graphs(request: DiffRequest, strategies: list[Strategy]) -> list[Digest]:
    """Of two strategies, two models (or files), or both."""
    source = request.source
    if len(strategies) > 2:
        raise SidesError(f"{len(strategies)} strategies are given", "Give two")
    if request.other is None and len(strategies) < 2:
        raise SidesError(
            "there is only one side", "Give a second strategy with -s, a second graph file, or a pass with --after"
        )
    sources = [source, replace(source, model=request.other or source.model)]
    graphs: Sequence[AnyGraph]
    if request.other is None and not source.cache and not source.is_file:
        from fxpar.cli.after_pass import lowered_alike

        graphs = lowered_alike(source, strategies)  # one capture for both
    else:
        wanted = [*strategies, *strategies][:2] if strategies else [None, None]
        graphs = [read_graph(each, None, strategy) for each, strategy in zip(sources, wanted, strict=True)]
    check_one_team("fxpar diff", [each.strategy for each in graphs if not isinstance(each, LogicalGraph)])
    files = [each.model if each.is_file and request.other else "" for each in sources]
    return [digest(g, _title(g, file), only=request.fqn) for g, file in zip(graphs, files, strict=True)]


def _title(graph: AnyGraph, file: str) -> str:
    """The strategy, and the file if there are two."""
    strategy = "logical" if isinstance(graph, LogicalGraph) else str(graph.strategy)
    return f"{file} ({strategy})" if file else strategy


def _check_glob(old: Digest, new: Digest, glob: str | None) -> None:
    """Raises NoModuleError for a glob that nothing in either graph matches."""
    if glob is not None and not any(side.ops or side.params for side in (old, new)):
        names = [*old.shapes, *new.shapes]
        known = {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}
        raise NoModuleError(glob, nearest(glob, known))
