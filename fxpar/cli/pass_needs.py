"""What each pass needs of the graph that it is given, and which pass makes it so.

Passes change an annotated graph in place, and most hold only at one point of the lowering: `global_to_local` on a graph
that has local shapes already would divide them again. The lowering has its order from `fxpar.lowering.ladder`; here
somebody picks a graph and a pass by hand, so the graph itself is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from fxpar.cli.after_pass import FIRST
from fxpar.errors import PassNeedsError
from fxpar.ir.collectives import is_collective, reshard
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.markers import vary
from fxpar.ir.pass_base import tensor_operands
from fxpar.lowering.ladder import default_passes


@dataclass(frozen=True)
class Need:
    """`what` must hold; `lack` says what is there where it does not. `maker` is the pass that makes it so; without one
    nothing does: it is too late.
    """

    what: str
    lack: str
    holds: Callable[[AnnotatedGraph], bool]
    maker: str | None = None


def _calls(graph: AnnotatedGraph) -> Iterable[fx.Node]:
    return (n for n in graph.graph.nodes if n.op == "call_function" and "sym" not in n.meta)


def _fits(graph: AnnotatedGraph) -> bool:
    for node in graph.graph.nodes:
        wanted = node.meta.get("dist_in") or ()
        if any(o.meta.get("dist") != w for o, w in zip(tensor_operands(node), wanted, strict=False)):
            return False
    return True


def _is_local(graph: AnnotatedGraph) -> bool:
    return any("local" in node.meta for node in graph.placeholders)


def _is_reduced(graph: AnnotatedGraph) -> bool:
    marks = (n.target is vary or n.meta.get("phase") == "epilogue" for n in _calls(graph))
    return any(marks) or any(str(n.meta.get("bucket", "")).startswith("grads/") for n in graph.graph.nodes)


def _is_zero_sharded(graph: AnnotatedGraph) -> bool:
    data = set(graph.strategy.data_axes)
    pairs = zip(graph.placeholders, graph.inputs, strict=True)
    axes = [axis for node, info in pairs if info.kind == "param" for axis in node.meta["dist"].shard_axes]
    return any(data & set(axis.split(".")) for axis in axes)


FITS = Need("operands that lie as their users want them", "some do not", _fits, "insert_reshards")
STEPS = Need(
    "a graph without reshards",
    "there are some",
    lambda graph: not any(n.target is reshard for n in _calls(graph)),
    "reshard_to_collectives",
)
LOCAL = Need("local shapes", "these are global", _is_local, "global_to_local")
LOWERED = Need(
    "collectives that are calls of process groups",
    "some are not yet",
    lambda graph: not any(is_collective(n) for n in _calls(graph)),
    "lower_collectives",
)
GLOBAL = Need("global shapes", "these are local: global_to_local has run", lambda graph: not _is_local(graph))
UNREDUCED = Need("gradients of one replica", "reduce_gradients has run", lambda graph: not _is_reduced(graph))
UNSHARDED = Need("parameters that every replica has", "zero_shard has run", lambda graph: not _is_zero_sharded(graph))
BODY = Need(
    "the body of a step alone",
    "there is a prologue or an epilogue",
    lambda graph: not any(n.meta.get("phase", "body") != "body" for n in _calls(graph)),
)
_LATE = (FITS, STEPS, LOCAL, LOWERED)

UNPLACED = Need(
    "a graph without placements",
    "it has them",
    lambda graph: all("dist" not in node.meta for node in graph.placeholders),
)
NEEDS: dict[str, tuple[Need, ...]] = {
    "annotate": (UNPLACED,),
    "insert_reshards": (GLOBAL,),
    "zero_shard": (FITS, GLOBAL, UNSHARDED, UNREDUCED),
    "casts": (FITS, GLOBAL),
    "reduce_gradients": (FITS, GLOBAL, UNREDUCED),
    "narrow_gradients": (FITS, GLOBAL),
    "reshard_to_collectives": (FITS, GLOBAL),
    "mask_padding": (FITS, STEPS, GLOBAL),
    "cleanup": (),
    "global_to_local": (FITS, STEPS, GLOBAL),
    "lower_collectives": (FITS, STEPS, LOCAL),
    "rematerialize": _LATE,
    "bucket_collectives": _LATE,
    "reuse_buffers": _LATE,
    "sink_waits": _LATE,
    "write_in_place": _LATE,
    "accumulate_gradients": (*_LATE, BODY),
}
"""By name; a pass that is not here (another package's) is run as it is."""


def check_needs(name: str, graph: AnnotatedGraph) -> None:
    """Raises PassNeedsError for the first thing that the graph lacks."""
    for need in NEEDS.get(name, ()):
        if not need.holds(graph):
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


__all__ = ["NEEDS", "Need", "check_needs"]
