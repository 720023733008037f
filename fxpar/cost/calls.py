"""What each call of a program costs, in program order: the one walk that every predicted time comes from.

Nothing is taken to overlap, so times add up:

    products and attention   operations over what the device sustains in their dtype, plus the bytes of what does not
                             grow with T (weights are read, their gradients written) over its memory
    other kernels            bytes read and written over its memory
    every kernel             the launch
    collectives              bytes sent over the link, plus the latency; an axis whose process groups leave a node takes
                             the links between nodes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.ops import SizesOf, flops, is_kernel, local_metas, touched, touched_bytes
from fxpar.cost.polynomial import Polynomial, Sizes, fitted, sent_bytes
from fxpar.ir.exec_graph import Communication, Part, Program, collective_kind
from fxpar.ir.graph import TensorMeta
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import comm_of, fqn_of, is_backward
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ops.traits import ATTENTION

PER_MICRO_BATCH = ("body", "forward", "backward")  # parts of a program
Kind = Literal["product", "attention", "memory", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COMPUTE = ("product", "attention", "memory")


@dataclass(frozen=True)
class NodeCost:
    """One call: a kernel, or a collective over the mesh axes `axis`, joined by '.'.

    `seconds`, `flops` and `nbytes` are polynomials in the tokens of a replica's micro-batch. A collective's bytes are
    what one rank sends, a kernel's what it reads and writes.
    """

    part: str
    name: str
    fqn: str
    kind: Kind
    axis: str
    backward: bool
    seconds: Polynomial
    nbytes: Polynomial
    flops: Polynomial


def node_costs(program: Program, cluster: ClusterSpec, *, parts: Mapping[str, Part] | None = None) -> list[NodeCost]:
    """The calls of `parts` (by default of those that run per micro-batch) on one rank, in program order."""
    if parts is None:
        parts = {name: part for name, part in program.parts.items() if name in PER_MICRO_BATCH}
    walk = _Walk(program, cluster)
    return [cost for name, part in parts.items() for cost in walk.part(name, part)]


def busy_s(node: fx.Node, shape: SizesOf, cluster: ClusterSpec) -> Fraction:
    """Seconds that one call keeps the device or a link inside a node busy, at these sizes; 0 for a view. Launch and
    latency are left out: they say how a call is made, not what it does.
    """
    if "comm" in node.meta:
        sent: TensorMeta = comm_of(node)[1]
        return math.prod(shape(sent)) * sent.dtype.itemsize / cluster.bytes_per_s(between=False)
    if not is_kernel(node):
        return Fraction(0)
    work = flops(node, shape)
    if work:
        return work / cluster.sustained.flops_per_s(_dtype(node))
    return touched_bytes(node, shape) / cluster.sustained.bytes_per_s


def _dtype(node: fx.Node) -> torch.dtype:
    """What a product computes in."""
    return next(local_metas(node)).dtype


Counts = tuple[Fraction | int, ...]  # at three numbers of tokens


@dataclass
class _Walk:
    """Layers repeat: a polynomial is worked out once for calls with the same counts."""

    program: Program
    cluster: ClusterSpec
    _nbytes: dict[TensorMeta, Counts] = field(default_factory=dict)
    _per_byte: dict[str, Fraction] = field(default_factory=dict)
    _kernels: dict[tuple[Counts, Counts, torch.dtype], tuple[Polynomial, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._samples = [Sizes(self.program, k) for k in (1, 2, 3)]

    def part(self, name: str, part: Part) -> Iterator[NodeCost]:
        for node in part.graph.nodes:
            kind = collective_kind(node)
            if kind is not None:
                yield self._collective(name, node, kind)
            elif is_kernel(node):
                yield self._kernel(name, node)

    def _collective(self, part: str, node: fx.Node, kind: str) -> NodeCost:
        axis, sent = comm_of(node)
        fqn, backward = fqn_of(node), is_backward(node)
        found = Communication(kind, axis, sent, part, fqn, backward)
        if axis not in self._per_byte:
            self._per_byte[axis] = seconds_per_byte(self.program.mesh, axis, self.cluster)
        elements = self._fit([sizes.numel(sent) for sizes in self._samples])
        nbytes = elements * _bytes_per_element(found, self.program.strategy.mesh.degree(axis))
        seconds = nbytes * self._per_byte[axis] + Polynomial(self.cluster.latency_s)
        return NodeCost(part, node.name, fqn, kind, axis, backward, seconds, nbytes, Polynomial())  # type: ignore[arg-type]

    def _kernel(self, part: str, node: fx.Node) -> NodeCost:
        counts = tuple(flops(node, sizes) for sizes in self._samples)
        moved = [self._bytes_of(meta) for meta in touched(node)]
        nbytes = tuple(sum(at) for at in zip(*moved, strict=True))
        key = counts, nbytes, _dtype(node)
        if key not in self._kernels:
            self._kernels[key] = self._kernel_costs(*key)
        seconds, total, work = self._kernels[key]
        kind: Kind = "memory" if not any(counts) else "attention" if node.target in ATTENTION else "product"
        return NodeCost(part, node.name, fqn_of(node), kind, "", is_backward(node), seconds, total, work)

    def _kernel_costs(self, counts: Counts, nbytes: Counts, dtype: torch.dtype) -> tuple[Polynomial, ...]:
        """Seconds, bytes and operations."""
        work, moved, device = self._fit(counts), self._fit(nbytes), self.cluster.sustained
        # Of a product what grows with T hides behind the arithmetic.
        waits = moved if work == Polynomial() else Polynomial(moved.c0)
        computing = work * (1 / device.flops_per_s(dtype))
        return computing + waits * (1 / device.bytes_per_s) + Polynomial(device.launch_s), moved, work

    def _bytes_of(self, meta: TensorMeta) -> Counts:
        if meta not in self._nbytes:
            self._nbytes[meta] = tuple(sizes.numel(meta) * meta.dtype.itemsize for sizes in self._samples)
        return self._nbytes[meta]

    def _fit(self, counts: Sequence[Fraction | int]) -> Polynomial:
        return fitted(counts, self._samples[0].tokens)


def _bytes_per_element(found: Communication, degree: int) -> Fraction:
    """Bytes that a rank sends for each element that it puts in."""
    one = replace(found, sent=TensorMeta((1,), found.sent.dtype))
    return Fraction(one.wire_bytes(degree, {})).limit_denominator(10**9)


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
