"""Whether a graph that somebody picked by hand is what a pass needs; `fxpar.lowering.needs` says what that is."""

from __future__ import annotations

from fxpar.cli.after_pass import FIRST
from fxpar.errors import PassNeedsError
from fxpar.ir.graph import AnnotatedGraph
from fxpar.lowering.ladder import default_passes
from fxpar.lowering.needs import Need, lacking


def check_needs(name: str, graph: AnnotatedGraph) -> None:
    """Raises PassNeedsError for the first thing that the graph lacks."""
    need = lacking(name, graph)
    if need is not None:
        raise PassNeedsError(name, need.what, need.lack, _advice(name, need))


def _advice(name: str, need: Need) -> str:
    """What to do: run the pass that makes it so, or dump the graph as it is right before the pass."""
    ladder = [step.name for step in default_passes()]
    if name == FIRST:
        return "Give the model and --strategy instead of a file, or the graph that was captured to fxpar.lower"
    if name not in ladder:
        return f"Run {need.maker} first" if need.maker else "The runtime runs it on the body of a step"
    place = f"ump the model with --after {ladder[ladder.index(name) - 1]}, which comes before it"
    return f"Run {need.maker} first, or d{place}" if need.maker else f"D{place}"
