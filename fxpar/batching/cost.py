"""What a micro-batch costs, in three numbers per length group, worked out from the group's ExecGraph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from fxpar.batching.work import Polynomial, body_work, link_crosses_nodes
from fxpar.cluster import ClusterSpec
from fxpar.errors import CostModelError
from fxpar.exec_graph import ExecGraph

MEMORY_GB_PER_S = 2000.0
LAUNCH_US = 4.0


@dataclass(frozen=True)
class GroupCost:
    """Seconds of one micro-batch of one replica: fixed + per_token * T + per_square * sum(len**2).

    T is the sum of the lengths of its sequences; attention, which stays inside of a sequence, is quadratic in each.
    Raises CostModelError for a number that is negative or not finite.
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise CostModelError(name, value)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Time of a micro-batch of sequences with these lengths in tokens."""
        squares = sum(length * length for length in lengths)
        return self.fixed_s + self.per_token_s * sum(lengths) + self.per_square_s * squares

    def sequence_s(self, length: int) -> float:
        """What one more sequence of this length adds."""
        return self.per_token_s * length + self.per_square_s * (length * length)


def group_cost(
    program: ExecGraph,
    cluster: ClusterSpec,
    device_tflops: float,
    *,
    memory_gb_per_s: float = MEMORY_GB_PER_S,
    launch_us: float = LAUNCH_US,
) -> GroupCost:
    """Predicted cost of one micro-batch of `program` on `cluster`; nothing runs, all ranks find the same.

    `device_tflops` (1e12 operations per second) and `memory_gb_per_s` (1e9 bytes per second) are what a device
    sustains; `launch_us` is paid by every kernel. Terms add up, so nothing is taken to overlap:

        products and attention   operations / device_tflops, plus their weights' bytes over the memory
        other ops                bytes read and written / memory_gb_per_s
        collectives              bytes sent / bandwidth of the link, plus latency_us; an axis whose process groups
                                 leave a node takes `inter_gb_per_s`, any other `intra_gb_per_s`

    Raises ClusterError (fewer devices than ranks), CostModelError (a rate that is not positive and finite).
    """
    cluster.require(program.strategy.world)
    rates = {"device_tflops": device_tflops, "memory_gb_per_s": memory_gb_per_s}
    for name, value in rates.items():
        if not (math.isfinite(value) and value > 0):
            raise CostModelError(name, value)
    if not (math.isfinite(launch_us) and launch_us >= 0):
        raise CostModelError("launch_us", launch_us)
    work = body_work(program)
    total = work.flops * (1 / (Fraction(device_tflops) * 10**12))
    total += work.memory_bytes * (1 / (Fraction(memory_gb_per_s) * 10**9))
    total += Polynomial(work.kernels * Fraction(launch_us) / 10**6)
    seconds_per_byte = {axis: _seconds_per_byte(program, axis, cluster) for axis in {t.axis for t in work.traffic}}
    for one in work.traffic:
        total += one.sent_bytes * seconds_per_byte[one.axis] + Polynomial(Fraction(cluster.latency_us) / 10**6)
    return GroupCost(float(total.c0), float(total.c1), float(total.c2))


def _seconds_per_byte(program: ExecGraph, axis: str, cluster: ClusterSpec) -> Fraction:
    """Of one rank, while all ranks take part in a collective of theirs over `axis`."""
    bandwidth = cluster.intra_gb_per_s
    if link_crosses_nodes(program, axis, cluster.node_of):
        shared = cluster.node_gb_per_s
        share = cluster.inter_gb_per_s if shared is None else shared / cluster.devices_per_node
        bandwidth = min(cluster.inter_gb_per_s, share)
    return 1 / (Fraction(bandwidth) * 10**9)
