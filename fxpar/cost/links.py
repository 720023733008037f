"""Which links the ranks of a process group send over, and what an exchange takes: each part goes over its own link."""

from __future__ import annotations

import functools
from collections import Counter
from fractions import Fraction

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.mesh import Mesh


@functools.lru_cache(maxsize=1024)  # a thousand ranks have many process groups
def peers(mesh: Mesh, axis: str, cluster: ClusterSpec) -> tuple[int, int]:
    """How many others of its process group of `axis` (axes joined by '.') a rank has at most: on its node, and on other
    nodes.
    """
    found = [Counter(map(cluster.node_of, group)) for group in mesh.groups(tuple(axis.split(".")))]
    inside = max(max(nodes.values()) for nodes in found) - 1
    return inside, max(nodes.total() - min(nodes.values()) for nodes in found)


def crosses_nodes(mesh: Mesh, axis: str, cluster: ClusterSpec) -> bool:
    """Whether any process group of `axis` has ranks on several nodes."""
    return peers(mesh, axis, cluster)[1] > 0


def exchange_byte_s(mesh: Mesh, axis: str, cluster: ClusterSpec) -> Fraction:
    """Seconds in which each rank of a process group sends one byte to each other: what stays on a node goes over the
    links inside of it while the rest goes between nodes.
    """
    inside, between = peers(mesh, axis, cluster)
    return max(inside / cluster.bytes_per_s(between=False), between / cluster.bytes_per_s(between=True))


__all__ = ["crosses_nodes", "exchange_byte_s", "peers"]
