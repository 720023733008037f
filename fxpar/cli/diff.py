"""`fxpar diff`: two strategies of a model, two graph files, or a graph after two passes, side by side."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fxpar.cli.commands import DiffRequest
from fxpar.cli.console import show_notes, stdout_console, working
from fxpar.cli.diff_show import show
from fxpar.cli.options import GraphSource
from fxpar.cli.request import check_output, collected_warnings, named_once, write_json
from fxpar.cli.rows import Rows
from fxpar.cli.source import (
    apart,
    check_one_team,
    from_cache,
    placed_words,
    read_graph,
    read_lowered,
    rows_once,
    strategies_of,
)
from fxpar.errors import NoModuleError, SidesError, nearest
from fxpar.graph_diff import Digest, compare, digest
from fxpar.ir.graph import LogicalGraph
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
    if request.other is None and len(strategies) == 2:
        show_notes(named_once(strategies)[1])
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
    wanted = [*strategies, *strategies][:2] if strategies else [None, None]
    if request.other is None:
        rows = rows_once(source)  # one capture for both
        return [_side(source, strategy, request.fqn, rows) for strategy in wanted]
    sources = [source, replace(source, model=request.other)]
    sides = [_side(*each, request.fqn, rows_once(each[0])) for each in zip(sources, wanted, strict=True)]
    return [
        replace(side, title=f"{each.model} ({side.title})") if each.is_file else side
        for side, each in zip(sides, sources, strict=True)
    ]


def _side(source: GraphSource, strategy: Strategy | None, only: str | None, rows: Rows) -> Digest:
    """The digest of what a source and a strategy give; kept, as a graph takes seconds to read."""

    def build() -> dict[str, Any]:
        whole = strategy is None or source.is_file
        graph = read_graph(source, None, strategy) if whole else read_lowered(source, strategy, rows)
        if not isinstance(graph, LogicalGraph):
            check_one_team("fxpar diff", [graph.strategy])  # a file's
        return digest(graph, only=only).to_json()

    placed = {"precision": source.precision} if strategy is None else placed_words(source, strategy)
    what = {"kind": "digest", "only": only, **placed}
    return Digest.from_json(from_cache(source, what, build, *([strategy] if strategy else []), answer=True))


def _check_glob(old: Digest, new: Digest, glob: str | None) -> None:
    """Raises NoModuleError for a glob that nothing in either graph matches."""
    if glob is not None and not any(side.ops or side.params for side in (old, new)):
        names = [*old.shapes, *new.shapes]
        known = {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}
        raise NoModuleError(glob, nearest(glob, known))
