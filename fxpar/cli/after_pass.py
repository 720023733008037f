"""Graphs as they are behind a pass of the lowering: one, or two that `fxpar diff` compares.

Imported when one is asked for: a graph in the cache needs none of the lowering.
"""

from __future__ import annotations

from itertools import islice

import torch

from fxpar.cli.options import GraphSource
from fxpar.cli.source import read_rows, storage_dtype
from fxpar.errors import PassStepError, SidesError, UnknownPassError
from fxpar.graph_diff import Digest, digest, joined
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.pass_names import PASSES, SHARING
from fxpar.ir.strategy import Strategy
from fxpar.lowering import graphs_after, lower
from fxpar.lowering.ladder import default_passes

FIRST = "annotate"


def step_name(text: str) -> str:
    """The pass of the ladder that `text` names, or has as its number in `fxpar passes`. Raises UnknownPassError,
    PassStepError.
    """
    names = [step.name for step in default_passes()]
    if text.isascii() and text.isdigit() and int(text) < len(names):
        return names[int(text)]
    if text in PASSES.available() and text not in names:
        show = f"dump MODEL -s A,B --after {SHARING}" if text == SHARING else f"passes {text}"
        raise PassStepError(text, f"fxpar {show}")
    if text not in names:
        raise UnknownPassError(text, names)
    return text


def graph_after(
    logical: LogicalGraph, strategy: Strategy, name: str, stage: int = 0, storage: torch.dtype | None = None
) -> AnnotatedGraph:
    """The graph after the pass `name`, of a pipeline that of `stage`, which it has.

    Raises UnknownPassError and what `lower` raises.
    """
    return next(islice(graphs_after(logical, strategy, step_name(name), default_passes(storage)), stage, None))


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
            seen[name].append(digest(graph, only=only, inputs=logical.inputs))

    logical = read_rows(source)
    lower(logical, strategy, storage=storage_dtype(source), on_pass=look)
    return [joined(seen[step], logical.name, strategy, f"{strategy} after {step}") for step in steps]
