"""What each call of a program costs: the terms of `group_cost`, one by one and in program order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from torch import fx

from fxpar.batching.cost import LAUNCH_US, MEMORY_GB_PER_S, seconds_per_byte
from fxpar.batching.work import (
    PER_MICRO_BATCH,
    Polynomial,
    Sizes,
    bytes_per_element,
    fitted,
)
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.ops import flops, is_kernel, touched_bytes
from fxpar.ir.exec_graph import Communication, Part, Program, collective_kind
from fxpar.ops.traits import ATTENTION

Kind = Literal["product", "attention", "memory", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COMPUTE = ("product", "attention", "memory")


@dataclass(frozen=True)
class Rates:
    """What times are predicted with: the cluster's links, and what a device sustains (as in `group_cost`)."""

    cluster: ClusterSpec
    device_tflops: float
    memory_gb_per_s: float = MEMORY_GB_PER_S
    launch_us: float = LAUNCH_US


@dataclass(frozen=True)
class NodeCost:
    """One call: a kernel, or a collective over the mesh axes `axis`, joined by '.'.

    `seconds` and `nbytes` are polynomials in the tokens of a replica's micro-batch. A collective's bytes are what one
    rank sends, a kernel's what it reads and writes.
    """

    part: str
    name: str
    fqn: str
    kind: Kind
    axis: str
    backward: bool
    seconds: Polynomial
    nbytes: Polynomial


def node_costs(program: Program, rates: Rates, *, parts: Mapping[str, Part] | None = None) -> list[NodeCost]:
    """The calls of `parts` (by default of those that run per micro-batch) on one rank, in program order.

    Over the parts that run per micro-batch their seconds add up to `group_cost`.
    """
    if parts is None:
        parts = {name: part for name, part in program.parts.items() if name in PER_MICRO_BATCH}
    walk = _Walk(program, rates)
    return [cost for name, part in parts.items() for cost in walk.part(name, part)]


@dataclass
class _Walk:
    """Layers repeat: a polynomial is worked out once for calls with the same counts."""

    program: Program
    rates: Rates
    _fitted: dict[tuple[Fraction, ...], Polynomial] = field(default_factory=dict)
    _per_byte: dict[str, Fraction] = field(default_factory=dict)
    _costs: dict[tuple[Polynomial, Polynomial], Polynomial] = field(default_factory=dict)

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
        axis, sent = node.meta["comm"]
        fqn, backward = node.meta.get("fqn", ""), bool(node.meta.get("backward"))
        found = Communication(kind, axis, sent, part, fqn, backward)
        if axis not in self._per_byte:
            self._per_byte[axis] = seconds_per_byte(self.program.mesh, axis, self.rates.cluster)
        elements = self._fit([Fraction(sizes.numel(sent)) for sizes in self._samples])
        nbytes = elements * bytes_per_element(found, self.program.strategy.mesh.degree(axis))
        seconds = nbytes * self._per_byte[axis] + Polynomial(Fraction(self.rates.cluster.latency_us) / 10**6)
        return NodeCost(part, node.name, fqn, kind, axis, backward, seconds, nbytes)  # type: ignore[arg-type]

    def _kernel(self, part: str, node: fx.Node) -> NodeCost:
        work = self._fit([flops(node, sizes) for sizes in self._samples])
        touched = self._fit([Fraction(touched_bytes(node, sizes)) for sizes in self._samples])
        # Of an op that is limited by arithmetic only what does not grow with T counts.
        moved = touched if work == Polynomial() else Polynomial(touched.c0)
        kind: Kind = "memory" if work == Polynomial() else "attention" if node.target in ATTENTION else "product"
        fqn, backward = node.meta.get("fqn", ""), bool(node.meta.get("backward"))
        return NodeCost(part, node.name, fqn, kind, "", backward, self._seconds(work, moved), touched)

    def _seconds(self, flops: Polynomial, moved: Polynomial) -> Polynomial:
        if (flops, moved) not in self._costs:
            rates = self.rates
            self._costs[flops, moved] = (
                flops * (1 / (Fraction(rates.device_tflops) * 10**12))
                + moved * (1 / (Fraction(rates.memory_gb_per_s) * 10**9))
                + Polynomial(Fraction(rates.launch_us) / 10**6)
            )
        return self._costs[flops, moved]

    def _fit(self, values: Sequence[Fraction]) -> Polynomial:
        key = tuple(values)
        if key not in self._fitted:
            self._fitted[key] = fitted(list(values), self._samples[0].tokens)
        return self._fitted[key]
