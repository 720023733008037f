"""`fxpar diff`: two strategies of a model, two graph files, or a graph after two passes, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fxpar.cli.after_pass import FIRST, step_name
from fxpar.cli.console import stderr_console, stdout_console
from fxpar.cli.diff_show import show
from fxpar.cli.request import check_output, collected_warnings, to_json, write_output
from fxpar.cli.source import Source, read_graph, read_logical
from fxpar.errors import NoModuleError, SidesError, nearest
from fxpar.graph import AnnotatedGraph
from fxpar.graph_diff import Digest, GraphDiff, compare, digest, joined
from fxpar.ladder import default_passes
from fxpar.lowering import lower
from fxpar.models.load import parse_dtype
from fxpar.printer import AnyGraph
from fxpar.strategy import Strategy


@dataclass(frozen=True)
class DiffRequest:
    """The words of the command line. `source` is the first MODEL with all options, `other` the second one. `passes`
    are names or steps; `before` and `after` the pass before which, and after which, the graph is looked at.
    """

    source: Source
    other: str | None = None
    strategies: tuple[str, ...] = ()
    passes: tuple[str, str] | None = None
    before: str | None = None
    after: str | None = None
    fqn: str | None = None
    text: bool = False
    brief: bool = False
    json: str | None = None


def run_diff(request: DiffRequest) -> bool:
    """Do it; whether the graphs differ. Raises FxparError."""
    begun = time.process_time()
    strategies = request.source.strategies(request.strategies)
    if request.json is not None:
        check_output(request.json)
    notes: list[str] = []
    with stderr_console().status("") as status, collected_warnings(notes):
        status.update(f"reading {request.source.model}")
        steps = pass_names(request)
        old, new = _passes(request, strategies, steps) if steps else _graphs(request, strategies)
    _check_glob(old, new, request.fqn)
    diff = compare(old, new)
    if request.json is not None:
        document = diff.to_json()
        document["timings"] = {"total_cpu_s": time.process_time() - begun}
        write_output(request.json, to_json(document))
    if request.json != "-":
        show(stdout_console(), diff, nodes=not request.brief, text=request.text)
    return diff.differs


def pass_names(request: DiffRequest) -> tuple[str, str] | None:
    """The passes after which the graph is compared: none if two graphs are. `before` alone, or `after` alone, is what
    this one pass does. Raises UnknownPassError, SidesError.
    """
    if request.passes is not None:
        return step_name(request.passes[0]), step_name(request.passes[1])
    first, last = request.before or request.after, request.after or request.before
    if first is None or last is None:
        return None
    names = [FIRST, *(step.name for step in default_passes())]
    at = names.index(step_name(first))
    if at == 0:
        raise SidesError(f"there is nothing before {FIRST!r}", "Name a pass of `fxpar passes`")
    return names[at - 1], step_name(last)


def _graphs(request: DiffRequest, strategies: list[Strategy]) -> tuple[Digest, Digest]:
    """Of two strategies, two models (or files), or both."""
    if len(strategies) > 2:
        raise SidesError(f"{len(strategies)} strategies are named", "Name two")
    if request.other is None and len(strategies) < 2:
        raise SidesError(
            "there is one side only", "Name a second strategy with -s, a second graph file, or a pass with --after"
        )
    sources = [request.source, replace(request.source, model=request.other or request.source.model)]
    wanted = [*strategies, *strategies][:2] if strategies else [None, None]
    if request.other is None and not request.source.cache and not request.source.is_file:
        logical = read_logical(request.source)  # one capture for both
        storage = parse_dtype(request.source.storage) if request.source.storage else None
        graphs: list[AnyGraph] = [lower(logical, s, storage=storage) for s in wanted if s is not None]
    else:
        graphs = [read_graph(source, None, strategy) for source, strategy in zip(sources, wanted, strict=True)]
    names = [source.model if source.is_file else "" for source in sources] if request.other else ["", ""]
    old, new = (digest(g, _title(g, name), only=request.fqn) for g, name in zip(graphs, names, strict=True))
    return old, new


def _title(graph: AnyGraph, file: str) -> str:
    """The strategy, and the file if there is one."""
    strategy = getattr(graph, "strategy", None) or "logical"
    return f"{file} ({strategy})" if file else str(strategy)


def _passes(request: DiffRequest, strategies: list[Strategy], steps: tuple[str, str]) -> tuple[Digest, Digest]:
    """One lowering, seen after two passes. A pass changes the graph in place, so what it has is noted on the way."""
    if len(strategies) != 1 or request.other is not None:
        raise SidesError("passes are compared in the lowering of one model", "Name one MODEL and one strategy")
    strategy = strategies[0]
    seen: dict[str, list[Digest]] = {step: [] for step in steps}

    def look(name: str, graph: AnnotatedGraph) -> None:
        if name in seen:
            seen[name].append(digest(graph, only=request.fqn))

    storage = parse_dtype(request.source.storage) if request.source.storage else None
    logical = read_logical(request.source)
    lower(logical, strategy, storage=storage, on_pass=look)
    old, new = (joined(seen[step], logical.name, strategy, f"{strategy} after {step}") for step in steps)
    return old, new


def _check_glob(old: Digest, new: Digest, glob: str | None) -> None:
    """Raises NoModuleError for a glob that nothing in either graph matches."""
    if glob is not None and not any(side.ops or side.params for side in (old, new)):
        names = [*old.shapes, *new.shapes]
        known = {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}
        raise NoModuleError(glob, nearest(glob, known))


__all__ = ["DiffRequest", "GraphDiff", "pass_names", "run_diff"]
