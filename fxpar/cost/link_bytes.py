"""Bytes that all ranks together send in a micro-batch, inside of nodes and between them.

They are those that predicted times come from (`fxpar.cost.calls`): of each collective what a rank sends, over the links
of its ring or its pairs (`fxpar.cost.links`), and the messages between pipeline stages. What a rank has itself is not
sent. Bytes of switches and reductions are those of their plans, which count the same (`fxpar.switch.predict`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.links import sending
from fxpar.cost.polynomial import Polynomial, fitted, sent_bytes, sizes_of
from fxpar.ir.axes import REPLICAS
from fxpar.ir.exec_graph import Program, Stored
from fxpar.ir.handover import Handover
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph

Pair = tuple[int, int]  # who sends, and who receives


@dataclass(frozen=True)
class LinkBytes:
    """What all ranks send over the links inside of nodes, and over those between nodes."""

    intra_node: float = 0.0
    inter_node: float = 0.0

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.intra_node + other.intra_node, self.inter_node + other.inter_node)

    def __mul__(self, factor: float) -> LinkBytes:
        return LinkBytes(self.intra_node * factor, self.inter_node * factor)

    def to_json(self) -> dict[str, Any]:
        """Whole bytes, with the keys of a switch."""
        return {"intra_node_bytes": round(self.intra_node), "inter_node_bytes": round(self.inter_node)}


@dataclass(frozen=True)
class ReplicaBytes:
    """`LinkBytes` of the ranks of one replica in a micro-batch, by its tokens."""

    inside: Polynomial = field(default_factory=Polynomial)
    between: Polynomial = field(default_factory=Polynomial)

    def __add__(self, other: ReplicaBytes) -> ReplicaBytes:
        return ReplicaBytes(self.inside + other.inside, self.between + other.between)

    def __mul__(self, factor: Fraction | int) -> ReplicaBytes:
        return ReplicaBytes(self.inside * factor, self.between * factor)

    def over(self, lengths: Sequence[int]) -> LinkBytes:
        """For a micro-batch of sequences with these lengths; without any, as where a replica runs idle beside others,
        what is sent for any number of tokens.
        """
        return LinkBytes(float(self.inside.over(lengths)), float(self.between.over(lengths)))


ByReplica = tuple[ReplicaBytes, ...]


def added(parts: Iterable[ByReplica]) -> ByReplica:
    """Sums by replica."""
    return tuple(sum(mine, ReplicaBytes()) for mine in zip(*parts, strict=True))


def grown(samples: Sequence[ByReplica], counts: Sequence[Fraction | int]) -> ByReplica:
    """The first of the samples, and as many times as `counts` say what each of the others has more than it."""
    first, *others = samples
    more = list(zip(counts, others, strict=True))
    return tuple(
        sum(((other[number] + own * -1) * count for count, other in more), own) for number, own in enumerate(first)
    )


def sent_by_position(program: Program, cluster: ClusterSpec) -> list[ByReplica]:
    """What the ranks of each mesh of `program` send in a micro-batch, in the order of `fxpar.cost.group.rank_costs`: of
    a pipeline by position, with all of its stages and what these hand on.
    """
    found: dict[Mesh, list[ByReplica]] = defaultdict(list)
    for placed in program.placed:
        found[placed.mesh].append(_by_collectives(placed, cluster))
    if isinstance(program, PipelineGraph):
        for mesh, sent in _between_stages(program, cluster):
            found[mesh].append(sent)
    return [added(parts) for parts in found.values()]


def _by_collectives(program: Program, cluster: ClusterSpec) -> ByReplica:
    mesh, replica_of = program.mesh, _replica_of(program.mesh)
    totals: dict[tuple[str, bool], Polynomial] = defaultdict(Polynomial)
    for cost in node_costs(program, cluster):
        if cost.axis:
            totals[cost.axis, cost.kind == "all_to_all"] += cost.nbytes
    parts = [(ReplicaBytes(),) * mesh.degree(REPLICAS)]
    for (axis, to_all), nbytes in totals.items():
        message = nbytes * Fraction(1, max(1, mesh.degree(axis) - 1)) if to_all else nbytes
        messages = Counter(
            (replica_of[source], level) for source, level in _levels(sending(mesh, axis, to_all), cluster)
        )
        parts.append(
            tuple(
                ReplicaBytes(message * messages[number, False], message * messages[number, True])
                for number in range(mesh.degree(REPLICAS))
            )
        )
    return added(parts)


def _levels(pairs: Iterable[Pair], cluster: ClusterSpec) -> Iterable[tuple[int, bool]]:
    """(who sends, whether to another node) of what is sent at all."""
    return ((a, cluster.node_of(a) != cluster.node_of(b)) for a, b in pairs if a != b)


def _replica_of(mesh: Mesh) -> dict[int, int]:
    """The replica of each rank."""
    if REPLICAS not in mesh.names:
        return dict.fromkeys(mesh.ranks, 0)
    return {rank: number for number in range(mesh.degree(REPLICAS)) for rank in mesh.at(REPLICAS, number).ranks}


def _between_stages(program: PipelineGraph, cluster: ClusterSpec) -> Iterator[tuple[Mesh, ByReplica]]:
    """Each value on its way to another stage, with the mesh that sends it."""
    if program.strategy.by_stage:
        for each in program.handovers:
            here, there = each.given.dist.mesh, each.taken.dist.mesh
            # Without looking at each message, of which a thousand ranks have many.
            sent = _to_one_each(program, each.given, there, cluster) if each.alike else _cut(program, each, cluster)
            yield here, sent
        return
    # Stages that one stands for (`fxpar.search.repeated`) have names of values that do not meet.
    for stage, (kind, step) in itertools.product(program.stages, (("sent", 1), ("sent_grad", -1))):
        there = program.stages[(stage.index + step) % len(program.stages)].mesh
        for given in stage.given(kind).values():
            yield stage.mesh, _to_one_each(program, given, there, cluster)


def _to_one_each(program: PipelineGraph, given: Stored, there: Mesh, cluster: ClusterSpec) -> ByReplica:
    """Each rank sends all that it has to the one at its place of the mesh `there`."""
    here = given.dist.mesh
    nbytes, replica_of = sent_bytes(program, [given.local]), _replica_of(here)
    pairs = _levels(zip(here.ranks, there.ranks, strict=True), cluster)
    counts = Counter((replica_of[source], level) for source, level in pairs)
    numbers = range(here.degree(REPLICAS))
    return tuple(ReplicaBytes(nbytes * counts[n, False], nbytes * counts[n, True]) for n in numbers)


def _cut(program: PipelineGraph, handed: Handover, cluster: ClusterSpec) -> ByReplica:
    """Ranks send what pieces of the two stages have in common."""
    here, samples = handed.given.dist.mesh, sizes_of(program)
    itemsize = handed.given.local.dtype.itemsize
    found = []
    for replica in range(here.degree(REPLICAS)):
        sums: list[Counter[bool]] = []
        for sizes in samples:
            sums.append(Counter())
            for message in handed.messages(sizes.dims, replica):
                for _, between in _levels([(message.source, message.target)], cluster):
                    sums[-1][between] += message.numel * itemsize
        inside, between = (
            fitted([one[level] for one in sums], samples[0].tokens, samples[0].most) for level in (False, True)
        )
        found.append(ReplicaBytes(inside, between))
    return tuple(found)


__all__ = ["ByReplica", "LinkBytes", "ReplicaBytes", "added", "grown", "sent_by_position"]
