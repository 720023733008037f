"""What each pass needs of the graph that it is given, and which pass makes it so.

Passes change an annotated graph in place, and most hold only at one point of the lowering: `global_to_local` on a graph
that has local shapes already would divide them again. The graph itself is looked at, not the names of what has run: so
another pass may stand in for one of these, and a graph may come from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fxpar.annotate.experts import is_of_experts
from fxpar.errors import VerifyError
from fxpar.flow.expert_rows import experts_axis
from fxpar.ir.axes import REPLICAS
from fxpar.ir.collectives import is_collective, reshard
from fxpar.ir.dist_config import DistConfig, Partial
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.graph import AnnotatedGraph, Output
from fxpar.ir.markers import vary
from fxpar.ir.node_meta import comm_of, dist_of, is_on_host, is_size, phase_of, tensor_of
from fxpar.lowering.verify import misfit
from fxpar.ops.copies import copies, within_capacity
from fxpar.rules.view import ring_of
from fxpar.torch_api.schemas import writes


@dataclass(frozen=True)
class Need:
    """`what` must hold; `lack` says what is there where it does not. `maker` is the pass that makes it so; without one
    nothing does: it is too late. `holds` is asked of the nodes that are new since it held, or of all.
    """

    what: str
    lack: str
    holds: Callable[[AnnotatedGraph, Iterable[fx.Node]], bool]
    maker: str | None = None


def _calls(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    return (n for n in nodes if n.op == "call_function" and not is_size(n))


def _none(is_bad: Callable[[fx.Node], bool]) -> Callable[[AnnotatedGraph, Iterable[fx.Node]], bool]:
    """Whether no call is bad."""
    return lambda graph, nodes: not any(map(is_bad, _calls(nodes)))


def _is_reduced(graph: AnnotatedGraph, nodes: Iterable[fx.Node]) -> bool:
    def sums(node: fx.Node) -> bool:
        moves = node.target is reshard or is_collective(node) or collective_kind(node) is not None
        late = moves and phase_of(node) == "epilogue"
        return late or node.target is vary or str(node.meta.get("bucket", "")).startswith("grads/")

    return bool(graph.deferred) or any(map(sums, _calls(nodes)))


def _is_zero_sharded(graph: AnnotatedGraph) -> bool:
    pairs = zip(graph.placeholders, graph.inputs, strict=True)
    return any(
        set(graph.strategy.data_axes_of(info.fqn).split(".")) & set(axis.split("."))
        for node, info in pairs
        if info.kind == "param" and not is_of_experts(node)  # which ep cuts
        for axis in dist_of(node).shard_axes
    )


def _is_padded(node: fx.Node) -> bool:
    dist, meta = node.meta.get("dist"), node.meta.get("tensor")
    return isinstance(dist, DistConfig) and meta is not None and bool(dist.padded_dims(meta.shape))


FITS = Need(
    "operands that are placed as their users need them",
    "some are not",
    lambda graph, nodes: not misfit(graph, nodes),
    "insert_reshards",
)
STEPS = Need(
    "a graph without reshards",
    "there are some",
    _none(lambda node: node.target is reshard),
    "reshard_to_collectives",
)
LOCAL = Need("local shapes", "these are global", lambda graph, _: graph.is_local, "global_to_local")
RINGS = Need(
    "steps in place of attention over a ring",
    "some has tokens cut over one",
    lambda graph, nodes: not any(ring_of(node, graph.strategy) for node in _calls(nodes)),
    "ring_attention",
)
EXCHANGED = Need(
    "tokens at their experts",
    "some products by expert are of a rank's own tokens, and ep cuts their experts",
    lambda graph, nodes: not any(experts_axis(node, graph.strategy) for node in _calls(nodes)),
    "exchange_tokens",
)
ROWS = Need(
    "experts that see every row",
    "compress_dispatch has run",
    _none(lambda node: node.target is torch.ops.fxpar.cluster_rows.default),
)
UNLIMITED = Need(
    "experts that get every row",
    "limit_experts has run",
    _none(lambda node: node.target is within_capacity),
)
AT_HOME = Need(
    "tokens where they are from",
    "exchange_tokens has run",
    _none(lambda node: node.target is copies),
)
TOGETHER = Need(
    "tokens that travel all at once",
    "chunk_experts has run",
    _none(lambda node: "ep_chunk" in node.meta),
)
UNSORTED = Need(
    "rows in the order of tokens",
    "sort_rows has run",
    _none(lambda node: node.target is torch.ops.fxpar.route_rows.default),
)
LOWERED = Need(
    "collectives that are calls of process groups",
    "some are not yet",
    _none(is_collective),
    "lower_collectives",
)
# Zeros do not show in a graph; without uneven dims there is nothing to make zero.
MASKED = Need(
    "zeros in the padding of dims that do not divide",
    "nothing has put them there",
    lambda graph, nodes: "mask_padding" in graph.passes or not any(map(_is_padded, nodes)),
    "mask_padding",
)
GLOBAL = Need("global shapes", "these are local: global_to_local has run", lambda graph, _: not graph.is_local)
UNREDUCED = Need(
    "gradients of one replica", "reduce_gradients has run", lambda graph, nodes: not _is_reduced(graph, nodes)
)
UNSHARDED = Need(
    "parameters that every replica has", "zero_shard has run", lambda graph, _: not _is_zero_sharded(graph)
)
BODY = Need(
    "the body of a step alone",
    "there is a prologue or an epilogue",
    _none(lambda node: phase_of(node) != "body"),
)
_LATE = (FITS, STEPS, LOCAL, LOWERED)
FUNCTIONAL = Need(
    "ops that write over nothing",
    "some write in place",
    _none(writes),
)
UNCHUNKED = Need(
    "a loss of all tokens at once",
    "chunk_loss has run",
    _none(lambda node: "chunk" in node.meta),
)
ON_DEVICE = Need(
    "values that are all on the device",
    "offload has run",
    _none(is_on_host),
)
UNPLACED = Need(
    "a graph without placements",
    "it has them",
    lambda graph, _: all("dist" not in node.meta for node in graph.placeholders),
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
    "ring_attention": (FITS, STEPS, LOCAL),
    "limit_experts": (FITS, STEPS, LOCAL, UNSORTED, ROWS, AT_HOME, UNLIMITED, TOGETHER),
    "compress_dispatch": (FITS, STEPS, LOCAL, UNSORTED, ROWS, TOGETHER),
    "chunk_experts": (FITS, STEPS, LOCAL, UNSORTED, AT_HOME, TOGETHER),
    "exchange_tokens": (FITS, STEPS, LOCAL),
    "sort_rows": (FITS, STEPS, LOCAL, EXCHANGED),
    "lower_collectives": (FITS, STEPS, LOCAL, RINGS, EXCHANGED),
    "chunk_loss": (*_LATE, FUNCTIONAL, UNCHUNKED),
    "rematerialize": (*_LATE, FUNCTIONAL),
    "bucket_collectives": (*_LATE, FUNCTIONAL),
    "reuse_buffers": _LATE,
    "hoist_collectives": (*_LATE, FUNCTIONAL),
    "sink_waits": _LATE,
    "prefetch_gathers": _LATE,
    "hide_reductions": _LATE,
    "offload": (*_LATE, ON_DEVICE),
    "write_in_place": _LATE,
    "accumulate_gradients": (*_LATE, BODY),
}
"""By name; a pass that is not here (another package's) is run as it is."""

END = (*_LATE, MASKED, RINGS, EXCHANGED)
"""What a program needs."""


def lacking(name: str, graph: AnnotatedGraph) -> Need | None:
    """The first thing that the pass called `name` needs and the graph lacks."""
    return next((need for need in NEEDS.get(name, ()) if not need.holds(graph, graph.graph.nodes)), None)


def verify_needs(graph: AnnotatedGraph, name: str) -> None:
    """Raises VerifyError for a pass that runs too early or too late, or for a second time. What is kept was looked at
    behind the last pass.
    """
    asked = (need for need in NEEDS.get(name, ()) if not _is_kept(need, graph))
    need = next((need for need in asked if not need.holds(graph, graph.graph.nodes)), None)
    if need is not None:
        do = f"Run {need.maker} before it" if need.maker else "Run it once, in its place of the ladder"
        raise VerifyError(f"pass {name!r} needs {need.what}; in this graph {need.lack}. {do}")


def verify_kept(graph: AnnotatedGraph, after: str, nodes: Iterable[fx.Node]) -> None:
    """What a pass has made holds from then on; `nodes` are those that have changed since it was looked at behind the
    pass before. Raises VerifyError for a pass that undoes it.
    """
    for need in _LATE:
        asked = graph.graph.nodes if need.maker == after else nodes
        if _is_kept(need, graph) and not need.holds(graph, asked):
            found = misfit(graph) or f"{need.maker} has left {need.what}; now {need.lack}"
            raise VerifyError(f"after pass {after!r}: {found}")


def _is_kept(need: Need, graph: AnnotatedGraph) -> bool:
    """Whether its pass has run, so that `verify_kept` asks for it behind every pass."""
    return need in _LATE and need.maker in graph.passes


def verify_end(graph: AnnotatedGraph) -> None:
    """Raises VerifyError for a ladder that leaves work undone."""
    for need in END:
        if not _is_kept(need, graph) and not need.holds(graph, graph.graph.nodes):
            raise VerifyError(f"at the end of the ladder: a program needs {need.what}; {need.lack}. Run {need.maker}")
    spread = _spread(graph)
    for node, out in zip(graph.results, graph.outputs, strict=True):
        why = _undone(node, out, graph, spread)
        if why:
            raise VerifyError(f"at the end of the ladder: the {out.kind} {out.fqn!r} (%{node.name}) {why}")


def _undone(node: fx.Node, out: Output, graph: AnnotatedGraph, spread: dict[fx.Node, bool]) -> str:
    """What is left to be done for a result, or ""."""
    dist = dist_of(node)
    deferred = graph.deferred.get(out.fqn) if out.kind == "grad" else None
    if deferred is not None:
        terms = dist.with_placement(REPLICAS, Partial()) if graph.strategy.replicas > 1 else dist
        if deferred != terms:
            return f"is to be summed as {deferred}, but is placed as {dist}"
        return "" if spread.get(node, True) else "is summed over dp already, and would be summed again as deferred"
    if dist.partial:
        return f"is a partial sum that is never reduced: {dist}"
    if out.kind in ("loss", "buffer", "value", "input_grad") and any(dist.dims):
        return f"must be whole on every rank of a replica, but is placed as {dist}"
    if out.kind in ("loss", "grad", "buffer") and spread.get(node) and not _is_flag(node, out):
        return "is that of one replica. Run reduce_gradients once, or sum it over dp"
    return ""


def _is_flag(node: fx.Node, out: Output) -> bool:
    """A boolean buffer has no mean over replicas: each keeps its own."""
    return out.kind == "buffer" and tensor_of(node).dtype == torch.bool


def _spread(graph: AnnotatedGraph) -> dict[fx.Node, bool]:
    """Of what depends on the batch: whether each replica has its own value, as it is not summed over dp (or is mixed
    with what is not). Empty if there is one replica.
    """
    found: dict[fx.Node, bool] = {}
    if graph.strategy.replicas == 1:
        return found
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        if info.kind in ("batch", "tangent", "received", "received_grad"):
            found[node] = True
    for node in graph.graph.nodes:
        operands = [found[o] for o in node.all_input_nodes if o in found]
        if operands:
            sums = collective_kind(node) in ("all_reduce", "reduce_scatter")
            whole = sums and graph.strategy.mesh.covers(comm_of(node)[0], REPLICAS)
            found[node] = any(operands) and not whole
    return found
