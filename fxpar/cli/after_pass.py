"""The graph as it is behind one pass of the lowering."""

from __future__ import annotations

from contextlib import suppress

import torch

from fxpar.errors import UnknownPassError
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.lowering.ladder import default_passes

FIRST = "annotate"


class _ReachedError(Exception):
    """Ends the lowering; not an error of the user."""


def step_name(text: str) -> str:
    """The pass of the ladder that `text` names, or has as its number in `fxpar passes`. Raises UnknownPassError."""
    names = [step.name for step in default_passes()]
    if text.isascii() and text.isdigit() and int(text) < len(names):
        return names[int(text)]
    if text not in names:
        raise UnknownPassError(text, names)
    return text


def graph_after(
    logical: LogicalGraph, strategy: Strategy, name: str, stage: int = 0, storage: torch.dtype | None = None
) -> AnnotatedGraph:
    """The graph after the pass `name`, of a pipeline that of `stage`, which it has.

    Raises UnknownPassError and what `lower` raises.
    """
    wanted = step_name(name)
    found: list[AnnotatedGraph] = []

    def look(step: str, graph: AnnotatedGraph) -> None:
        if step == wanted:
            found.append(graph)
            if len(found) > stage:
                raise _ReachedError

    with suppress(_ReachedError):
        lower(logical, strategy, storage=storage, on_pass=look)
    return found[-1]
