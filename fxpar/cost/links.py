"""How fast what a rank sends goes: each collective and message takes a latency, and its bytes over a kind of link."""

from __future__ import annotations

from fractions import Fraction

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import Polynomial, sent_bytes
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph


def crosses_nodes(mesh: Mesh, axis: str, cluster: ClusterSpec) -> bool:
    """Whether any process group of `axis` (axes joined by '.') has ranks on several nodes."""
    return any(len(set(map(cluster.node_of, group))) > 1 for group in mesh.groups(tuple(axis.split("."))))


def seconds_per_byte(mesh: Mesh, axis: str, cluster: ClusterSpec) -> Fraction:
    """Of one rank, while all ranks take part in a collective of theirs over `axis`."""
    return 1 / cluster.bytes_per_s(crosses_nodes(mesh, axis, cluster))


def handed_on_s(program: PipelineGraph, stage: int, kind: str, cluster: ClusterSpec) -> Polynomial:
    """Seconds of the messages with which a rank of `stage` hands a micro-batch to the next stage ("sent") or its
    gradients to the one before ("sent_grad").
    """
    here = program.stages[stage]
    there = program.stages[(stage + (1 if kind == "sent" else -1)) % len(program.stages)]
    pairs = zip(here.mesh.ranks, there.mesh.ranks, strict=True)
    between = any(cluster.node_of(one) != cluster.node_of(other) for one, other in pairs)
    sent = [stored.local for stored in here.given(kind).values()]
    return sent_bytes(here, sent) * (1 / cluster.bytes_per_s(between)) + Polynomial(len(sent) * cluster.latency_s)
