"""What each call of a program costs, in program order: the one walk that every predicted time comes from.

Times add up; of what a transfer takes, only what kernels wait for, where the device has kernels run beside transfers
(`fxpar.cost.overlap`):

    products and attention   operations over what the device sustains in their dtype, plus the bytes of what does not
                             grow with T (weights are read, their gradients written) and of what no cache holds
    other kernels            bytes read and written over its memory, or over its cache: each tensor by its size at
                             NOMINAL_TOKENS
    copies to the host       bytes over its link
    every kernel             the launch
    collectives              bytes sent over the slowest link of the ring, plus the latency; of an all-to-all each part
                             over its own link (`fxpar.cost.links`)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.cost.links import crosses_nodes, exchange, one_each, ring
from fxpar.cost.ops import SizesOf, flops, in_backward, is_kernel, is_plain, local_metas, touched, touched_bytes
from fxpar.cost.overlap import Link, exposed_s
from fxpar.cost.polynomial import Polynomial, fitted, sent_bytes, sizes_of
from fxpar.ir.exec_graph import Communication, Part, Program, collective_kind
from fxpar.ir.graph import TensorMeta
from fxpar.ir.handover import Handover
from fxpar.ir.node_meta import comm_of, fqn_of, is_backward, is_gradient, local_meta, wanted_dists
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ops.traits import ADDED_PRODUCTS, ATTENTION, HOST_COPIES, READS_ROWS, SWEEPS, is_attention

NOMINAL_TOKENS = 4096  # of a micro-batch, where something depends on the length that is not known yet
PER_MICRO_BATCH = ("body", "forward", "backward")  # parts of a program
Kind = Literal[
    "product", "attention", "memory", "host", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"
]
_NOTHING = Polynomial()
COMPUTE = ("product", "attention", "memory", "host")


@dataclass(frozen=True)
class NodeCost:
    """One call: a kernel, or a collective over the mesh axes `axis`, joined by '.'.

    `seconds`, `flops` and `nbytes` are polynomials in the tokens of a replica's micro-batch. A collective's bytes are
    what one rank sends, a kernel's what it reads and writes. `exposed` is by how much it makes its rank later: all of
    the seconds of a kernel, and the share of a transfer's that nothing hides in a micro-batch of NOMINAL_TOKENS.
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
    exposed: Polynomial


def node_costs(program: Program, cluster: ClusterSpec, *, parts: Mapping[str, Part] | None = None) -> list[NodeCost]:
    """The calls of `parts` (by default of those that run per micro-batch) on one rank, in program order."""
    walk, parts = _Walk(program, cluster), _repeated(program) if parts is None else parts
    return [one.of_part(name) for name, part in parts.items() for one in walk.calls(part)]


def exposed_costs(program: Program, cluster: ClusterSpec) -> list[Polynomial]:
    """`exposed` of all `node_costs` of a program."""
    walk = _Walk(program, cluster)
    return [one.exposed for part in _repeated(program).values() for one in walk.calls(part)]


def computed_s(program: Program, cluster: ClusterSpec, nodes: Iterable[fx.Node]) -> Polynomial:
    """Seconds of what computes among these nodes of a program."""
    walk = _Walk(program, cluster)
    return sum((walk.kernel(node).seconds for node in nodes if is_kernel(node)), Polynomial())


def _repeated(program: Program) -> dict[str, Part]:
    """What runs per micro-batch."""
    return {name: part for name, part in program.parts.items() if name in PER_MICRO_BATCH}


def busy_s(node: fx.Node, shape: SizesOf, cluster: ClusterSpec) -> Fraction:
    """Seconds that one call keeps the device or a link inside a node busy, at these sizes; 0 for a view. Launch and
    latency are left out: they say how a call is made, not what it does. What an op goes over several times counts once.
    """
    if "comm" in node.meta:
        sent: TensorMeta = comm_of(node)[1]
        return math.prod(shape(sent)) * sent.dtype.itemsize / cluster.bytes_per_s(between=False)
    if not is_kernel(node):
        return Fraction(0)
    work, device = flops(node, shape), _device(node, cluster)
    if work:
        dtype = _dtype(node)
        return work / (device.attention_flops_per_s(dtype) if is_attention(node.target) else device.flops_per_s(dtype))
    return touched_bytes(node, shape) / device.bytes_per_s


def _device(node: fx.Node, cluster: ClusterSpec) -> Device:
    """What computes a call, as its half of a step has it."""
    return cluster.sustained.in_backward if in_backward(node) else cluster.sustained


def _dtype(node: fx.Node) -> torch.dtype:
    """What a product computes in."""
    return next(local_metas(node)).dtype


Counts = tuple[Fraction | int, ...]  # at four numbers of tokens


class _Call(NamedTuple):
    """What a `NodeCost` is made of."""

    node: fx.Node
    kind: Kind
    axis: str
    seconds: Polynomial
    nbytes: Polynomial
    flops: Polynomial
    exposed: Polynomial

    def of_part(self, part: str) -> NodeCost:
        node, kind, axis, *costs = self
        return NodeCost(part, node.name, fqn_of(node), kind, axis, is_backward(node), *costs)


@dataclass
class _Known:
    """What does not depend on a program but by its samples of sizes: layers repeat, and so do programs of a search."""

    nbytes: dict[TensorMeta, Counts] = field(default_factory=dict)
    alike: dict[tuple[Any, ...], tuple[Kind, tuple[Polynomial, ...]]] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def _known(cluster: ClusterSpec, samples: tuple[Any, ...]) -> _Known:
    return _Known()


@dataclass
class _Walk:
    """What a call costs is worked out once for those with the same operands."""

    program: Program
    cluster: ClusterSpec
    _links: dict[tuple[str, str, TensorMeta], tuple[Polynomial, Polynomial]] = field(default_factory=dict)
    _nominal: dict[int, float] = field(default_factory=dict)
    _shares: dict[tuple[int, float], Polynomial] = field(default_factory=dict)
    _ways: dict[Any, _Way] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._samples = sizes_of(self.program)
        self._known = _known(self.cluster, tuple((one.tokens, one.most, *one.dims.items()) for one in self._samples))

    def calls(self, part: Part) -> Collection[_Call]:
        """In program order."""
        costs, links = dict[fx.Node, _Call](), dict[fx.Node, Link]()
        for node in part.graph.nodes:
            kind = collective_kind(node)
            if kind is not None:
                costs[node] = found = self._collective(node, kind)
                links[node] = "between" if crosses_nodes(self.program.mesh, found.axis, self.cluster) else "inside"
            elif is_kernel(node):
                costs[node] = found = self.kernel(node)
                if found.kind == "host":
                    links[node] = "host"
        slowdown = self.cluster.sustained.overlap_slowdown
        if slowdown is not None and links:
            alone = {node: self._nominal_s(cost.seconds) for node, cost in costs.items()}
            for node, waited in exposed_s(part.graph.nodes, alone, links.get, slowdown).items():
                costs[node] = costs[node]._replace(exposed=self._exposed(costs[node].seconds, alone[node], waited))
        return costs.values()

    def _nominal_s(self, seconds: Polynomial) -> float:
        """In a micro-batch of NOMINAL_TOKENS. Calls that are alike share their polynomial, which their costs keep."""
        if id(seconds) not in self._nominal:
            self._nominal[id(seconds)] = float(seconds.at(NOMINAL_TOKENS))
        return self._nominal[id(seconds)]

    def _exposed(self, seconds: Polynomial, alone: float, waited: float) -> Polynomial:
        """What is waited for of a transfer that takes `alone`. Those that are alike share what they are made of."""
        if (id(seconds), waited) not in self._shares:
            share = Fraction(waited / alone).limit_denominator(1000) if alone else Fraction(1)
            self._shares[id(seconds), waited] = seconds * share
        return self._shares[id(seconds), waited]

    def _collective(self, node: fx.Node, kind: str) -> _Call:
        axis, sent = comm_of(node)
        if (kind, axis, sent) not in self._links:
            self._links[kind, axis, sent] = self._link_costs(kind, axis, sent)
        seconds, nbytes = self._links[kind, axis, sent]
        return _Call(node, kind, axis, seconds, nbytes, _NOTHING, seconds)  # type: ignore[arg-type]

    def _link_costs(self, kind: str, axis: str, sent: TensorMeta) -> tuple[Polynomial, Polynomial]:
        """Seconds, and bytes that a rank sends."""
        mesh, degree = self.program.mesh, self.program.strategy.mesh.degree(axis)
        loads = (exchange if kind == "all_to_all" else ring)(mesh, axis, self.cluster)
        latency_s, per_byte_s = self.cluster.collective_s(kind, loads.between > 0)
        if loads.between:  # what a rank sends is one message in a ring, in an exchange one for each other rank
            per_byte_s = loads.byte_s(self.cluster) / (degree - 1 if kind == "all_to_all" else 1)
        one = Communication(kind, axis, TensorMeta((1,), sent.dtype), "", "", False)
        each = Fraction(one.wire_bytes(degree, {})).limit_denominator(10**9)  # bytes for an element that it puts in
        nbytes = self._fit([sizes.numel(sent) for sizes in self._samples]) * each
        return nbytes * per_byte_s + Polynomial(latency_s), nbytes

    def kernel(self, node: fx.Node) -> _Call:
        """Of one call that computes on the device."""
        way = self._ways.get(node.target) or self._ways.setdefault(node.target, _Way.of(node.target))
        looks = _looks(node, way) if way.is_plain else None
        found = None if looks is None else self._known.alike.get(looks)
        if found is None:
            found = self._called(node)
            if looks is not None:
                self._known.alike[looks] = found
        kind, (seconds, total, work) = found
        return _Call(node, kind, "", seconds, total, work, seconds)

    def _called(self, node: fx.Node) -> tuple[Kind, tuple[Polynomial, ...]]:
        """The kind of a kernel; its seconds, bytes and operations."""
        device = _device(node, self.cluster)
        counts = tuple(flops(node, sizes) for sizes in self._samples)
        kind: Kind = "memory" if not any(counts) else "attention" if is_attention(node.target) else "product"
        kind = "host" if node.target in HOST_COPIES else kind
        if kind == "attention" and (block := device.attention_block_of(_dtype(node))):
            counts = tuple(flops(node, sizes, block) for sizes in self._samples)
        moved = tuple(self._bytes_of(meta) for meta in touched(node))
        dtype, first = _dtype(node), self._samples[0]
        rate = device.attention_flops_per_s(dtype) if kind == "attention" else device.flops_per_s(dtype)
        sweeps, bins, exposed = SWEEPS.get(node.target, 1), _bins(node), device.exposed_traffic_of(dtype)
        return kind, _kernel_costs(kind, counts, moved, sweeps, bins, device, rate, exposed, first.tokens, first.most)

    def _bytes_of(self, meta: TensorMeta) -> Counts:
        known = self._known.nbytes
        if meta not in known:
            known[meta] = tuple(sizes.numel(meta) * meta.dtype.itemsize for sizes in self._samples)
        return known[meta]

    def _fit(self, counts: Sequence[Fraction | int]) -> Polynomial:
        return fitted(counts, self._samples[0].tokens, self._samples[0].most)


@functools.lru_cache(maxsize=4096)  # strategies, and graphs that are priced again, have the same kernels
def _kernel_costs(
    kind: Kind,
    counts: Counts,
    moved: tuple[Counts, ...],
    sweeps: int,
    bins: int,
    device: Device,
    rate: Fraction,
    exposed: Fraction,
    tokens: int,
    most: int,
) -> tuple[Polynomial, ...]:
    """Seconds, bytes and operations of a kernel whose arithmetic runs at `rate`, with an `exposed` share of what it
    moves. A document lies in one of `bins`, so
    of T tokens it has not T * T / bins**2 pairs on a rank: it has all of them on one, and none on the others.
    """
    work = fitted(counts, tokens, most)
    work, tensors = replace(work, c2=work.c2 * bins), [fitted(one, tokens, most) for one in moved]
    rates = [device.bytes_per_s_of(one.at(NOMINAL_TOKENS)) for one in tensors]
    total = sum(tensors, Polynomial()) * sweeps
    seconds = Polynomial(device.launch_s)
    if kind == "host":  # each tensor is on one side of the link
        crossing = total * Fraction(1, 2)
        return seconds + crossing * (1 / device.host_bytes_per_s), crossing, work
    if kind == "memory":
        again = total * Fraction(sweeps - 1, sweeps) * (1 / device.bytes_per_s_of(0))
        each = (one * (1 / per_s) for one, per_s in zip(tensors, rates, strict=True))
        return sum(each, seconds + again), total, work
    for one, per_s in zip(tensors, rates, strict=True):
        # What grows with T hides behind the arithmetic, but for the exposed share, and what is larger than a cache.
        spills = device.cache_mb is not None and per_s == device.bytes_per_s
        share = max(exposed, Fraction(spills))
        seconds += Polynomial(one.c0, one.c1 * share, one.c2 * share) * (1 / per_s)
    return seconds + work * (1 / rate), total, work


def _bins(node: fx.Node) -> int:
    """In how many parts attention cuts tokens: documents are packed so that it may."""
    wanted = wanted_dists(node) if node.target in ATTENTION else ()
    return wanted[ATTENTION[node.target]].degrees(2) if wanted else 1  # type: ignore[bad-index]


@dataclass(frozen=True)
class _Way:
    """How a kernel is looked at: whether its cost is in its tensors alone, in those of its result and of so many first
    operands; whether it reads rows, not all of its operands.
    """

    is_plain: bool
    first: int
    reads_rows: bool

    @classmethod
    def of(cls, target: Any) -> _Way:
        return cls(is_plain(target), 2 if target in ADDED_PRODUCTS else 1, target in READS_ROWS)


def _looks(node: fx.Node, way: _Way) -> tuple[Any, ...]:
    """What the cost of a kernel follows from that `is_plain`."""
    first = [local_meta(one) for one in node.args[: way.first] if isinstance(one, fx.Node)]
    others = () if way.reads_rows else node.all_input_nodes
    return node.target, is_gradient(node), len(first), *first, local_meta(node), *map(local_meta, others)


def handed_on_s(program: PipelineGraph, stage: int, kind: str, cluster: ClusterSpec) -> Polynomial:
    """Seconds of the messages with which a rank of `stage` hands a micro-batch to the next stage ("sent") or its
    gradients to the one before ("sent_grad").
    """
    if program.strategy.by_stage:
        handed = [one for one in program.handovers if (one.stage, one.kind) == (stage, kind)]
        return sum((_handover_s(program, one, cluster) for one in handed), Polynomial())
    here = program.stages[stage]
    there = program.stages[(stage + (1 if kind == "sent" else -1)) % len(program.stages)]
    byte_s = one_each(zip(here.mesh.ranks, there.mesh.ranks, strict=True), cluster).byte_s(cluster)
    sent = [stored.local for stored in here.given(kind).values()]
    return sent_bytes(here, sent) * byte_s + Polynomial(len(sent) * cluster.latency_s)


def _handover_s(program: PipelineGraph, handed: Handover, cluster: ClusterSpec) -> Polynomial:
    """Seconds of one value between stages that lie otherwise: of the rank that sends or receives most of it."""
    samples = sizes_of(program)
    nbytes = [max(handed.bytes_of_busiest(one.dims, received=side) for side in (False, True)) for one in samples]
    pairs = handed.messages(samples[0].dims)
    between = any(cluster.node_of(one.source) != cluster.node_of(one.target) for one in pairs)
    latency_s = handed.most_messages(samples[0].dims) * cluster.latency_s
    return fitted(nbytes, samples[0].tokens, samples[0].most) * (1 / cluster.bytes_per_s(between)) + Polynomial(
        latency_s
    )
