"""The way of tokens to their experts: from rank to rank in one exchange, or to each node once and on inside of it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.links import crosses_nodes, exchange
from fxpar.ir.mesh import Mesh, sub_axis
from fxpar.ops.copies import mean_copies


def hops_to_experts(
    mesh: Mesh, axis: str, cluster: ClusterSpec | None, slots: int, experts: int, sent_bytes: int
) -> tuple[str, ...]:
    """The axes of the exchanges, one after the other, that bring tokens to the ranks of `axis` that have their experts:
    `axis` itself, or a part of it between nodes and the rest inside of them, where what the links between nodes carry
    less is predicted to save more than a second exchange takes. `sent_bytes` are those of a rank's own tokens, each for
    `slots` of the experts. Without a cluster all ranks are on one node.
    """
    if cluster is None:
        return (axis,)
    inside = (split for split in _splits(mesh, axis) if not crosses_nodes(mesh, split[1], cluster))
    ways: list[tuple[str, ...]] = [(axis,), *inside]
    return min(ways, key=lambda way: _seconds(mesh, way, cluster, slots, experts, sent_bytes))


def exchange_s(mesh: Mesh, axis: str, cluster: ClusterSpec, slots: int, experts: int, sent_bytes: int) -> Fraction:
    """Seconds of bringing tokens there, by the way that `hops_to_experts` says."""
    way = hops_to_experts(mesh, axis, cluster, slots, experts, sent_bytes)
    return _seconds(mesh, way, cluster, slots, experts, sent_bytes)


def between_nodes(mesh: Mesh, axis: str, cluster: ClusterSpec) -> str:
    """The outer part of `axis` whose places are nodes, or the axis itself where none of its parts stays on a node; ""
    where all of it does.
    """
    if not crosses_nodes(mesh, axis, cluster):
        return ""
    return next((outer for outer, inner in _splits(mesh, axis) if not crosses_nodes(mesh, inner, cluster)), axis)


def _splits(mesh: Mesh, axis: str) -> Iterator[tuple[str, str]]:
    """An axis in two, with the inner part as large as can be first; joined axes, between two of them."""
    parts = axis.split(".")
    if len(parts) > 1:
        yield from ((".".join(parts[:at]), ".".join(parts[at:])) for at in range(1, len(parts)))
        return
    degree = mesh.degree(axis)
    for outer in range(2, degree):
        if degree % outer == 0:
            yield sub_axis(axis, 1, outer), sub_axis(axis, outer, degree // outer)


def _seconds(
    mesh: Mesh, way: tuple[str, ...], cluster: ClusterSpec, slots: int, experts: int, sent_bytes: int
) -> Fraction:
    """Of balanced routes; a rank's own copies stay."""
    total, ranks = Fraction(0), 1
    for axis in way:
        ranks *= mesh.degree(axis)
        sent = mean_copies(slots, experts, ranks) * sent_bytes / mesh.degree(axis)  # to each rank
        total += cluster.latency_s + sent * exchange(mesh, axis, cluster).byte_s(cluster)
    return total


__all__ = ["between_nodes", "exchange_s", "hops_to_experts"]
