"""Which links the ranks of a process group send over, and what a byte of a collective takes on them.

An all-to-all sends to all others, each part over its own link. Other collectives go round in a ring, in the order of
the ranks (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", 3): all bytes pass its slowest link.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.mesh import Mesh


@dataclass(frozen=True)
class Loads:
    """Messages of equal size that are under way at the same time: of a rank those to its own node and those to others,
    of a node those to others; each the most there are.
    """

    inside: int
    between: int
    of_node: int

    def byte_s(self, cluster: ClusterSpec) -> Fraction:
        """Seconds for a byte of each message: links inside of nodes, those between, and each node's way to the network
        carry at the same time.
        """
        inside, between = (10**9 * Fraction(one) for one in (cluster.intra_gb_per_s, cluster.inter_gb_per_s))
        found = max(self.inside / inside, self.between / between)
        if cluster.node_gb_per_s is None:
            return found
        return max(found, self.of_node / (10**9 * Fraction(cluster.node_gb_per_s)))


@functools.lru_cache(maxsize=1024)  # a thousand ranks have many process groups
def exchange(mesh: Mesh, axis: str, cluster: ClusterSpec) -> Loads:
    """Where each rank of a process group of `axis` (axes joined by '.') sends to each other."""
    nodes = [Counter(map(cluster.node_of, group)) for group in _groups(mesh, axis)]
    leaving = Counter[int]()
    for one in nodes:
        leaving.update({node: count * (one.total() - count) for node, count in one.items()})
    inside = max(max(one.values()) for one in nodes) - 1
    return Loads(inside, max(one.total() - min(one.values()) for one in nodes), max(leaving.values()))


@functools.lru_cache(maxsize=1024)
def ring(mesh: Mesh, axis: str, cluster: ClusterSpec) -> Loads:
    """Where each rank sends to the next one of its process group."""
    return one_each(sending(mesh, axis, to_all=False), cluster)


def sending(mesh: Mesh, axis: str, to_all: bool) -> Iterator[tuple[int, int]]:
    """(sender, receiver) of the messages in all process groups of `axis`: from each rank to all others, or to the next
    one in the ring.
    """
    for group in _groups(mesh, axis):
        yield from itertools.permutations(group, 2) if to_all else zip(group, (*group[1:], group[0]), strict=True)


def one_each(pairs: Iterable[tuple[int, int]], cluster: ClusterSpec) -> Loads:
    """Where the first rank of each pair sends to the second, and to no other."""
    nodes = [(cluster.node_of(one), cluster.node_of(other)) for one, other in pairs if one != other]
    leaving = Counter(one for one, other in nodes if one != other)
    inside = any(one == other for one, other in nodes)
    return Loads(int(inside), int(bool(leaving)), max(leaving.values(), default=0))


def crosses_nodes(mesh: Mesh, axis: str, cluster: ClusterSpec) -> bool:
    """Whether any process group of `axis` has ranks on several nodes."""
    return ring(mesh, axis, cluster).between > 0


def _groups(mesh: Mesh, axis: str) -> Sequence[Sequence[int]]:
    return mesh.groups(tuple(axis.split(".")))
