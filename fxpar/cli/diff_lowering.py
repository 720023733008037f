"""The sides of `fxpar diff` that it lowers itself: a graph after two passes, or two strategies without the cache.

Imported when one of these is asked for: a graph in the cache needs none of the lowering.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.cli.after_pass import FIRST, step_name
from fxpar.cli.options import GraphSource
from fxpar.cli.source import read_rows, storage_dtype
from fxpar.errors import SidesError
from fxpar.graph_diff import Digest, digest, joined
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.lowering.ladder import default_passes


def steps_of(passes: tuple[str, str] | None, before: str | None, after: str | None) -> tuple[str, str]:
    """The passes after which the graph is compared. `before` alone, or `after` alone, is what this one pass does.

    Raises UnknownPassError, SidesError.
    """
    if passes is not None:
        return step_name(passes[0]), step_name(passes[1])
    first, last = before or after or FIRST, after or before or FIRST
    names = [step.name for step in default_passes()]
    at = names.index(step_name(first))
    if at == 0:
        raise SidesError(f"there is nothing before {FIRST!r}", "Name a pass of `fxpar passes`")
    return names[at - 1], step_name(last)


def after_passes(source: GraphSource, strategy: Strategy, steps: tuple[str, str], only: str | None) -> list[Digest]:
    """One lowering, seen after two passes. A pass changes the graph in place, so what it has is noted on the way."""
    seen: dict[str, list[Digest]] = {step: [] for step in steps}

    def look(name: str, graph: AnnotatedGraph) -> None:
        if name in seen:
            seen[name].append(digest(graph, only=only))

    logical = read_rows(source)
    lower(logical, strategy, storage=storage_dtype(source), on_pass=look)
    return [joined(seen[step], logical.name, strategy, f"{strategy} after {step}") for step in steps]


def lowered_alike(source: GraphSource, strategies: Sequence[Strategy]) -> list[TrainGraph]:
    """The same capture under each strategy."""
    logical = read_rows(source)
    return [lower(logical, strategy, storage=storage_dtype(source)) for strategy in strategies]
