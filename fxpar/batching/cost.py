"""What a micro-batch costs, in three numbers per length group, worked out from the group's ExecGraph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from fxpar.batching.work import Polynomial, body_work, link_crosses_nodes
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import CostModelError, ScheduleOptionError
from fxpar.ir.exec_graph import Program
from fxpar.ir.mesh import Mesh

MEMORY_GB_PER_S = 2000.0
LAUNCH_US = 4.0


@dataclass(frozen=True)
class GroupCost:
    """Seconds of one micro-batch of one replica: fixed + per_token * T + per_square * sum(len**2).

    T is the sum of the lengths of its sequences; attention, which stays inside of a sequence, is quadratic in each.

    With `stages` > 1 a replica is a pipeline of that many ranks, `virtual` stages on each; the numbers are those of the
    slowest ranks, and its micro-batches c_1 >= c_2 >= ... c_m, which start in this order, take

        c_1 + ... + c_m + (stages - 1) / virtual * c_1

    The last term is the time to fill and drain the pipeline (Narayanan et al. 2021, 2.2.1; interleaved: 2.2.2), there
    for equal micro-batches. Of unequal ones the longest counts, not the mean: the ranks are a chain of equal machines,
    where all others wait while the longest passes. That is exact for gpipe; 1f1b takes no more and, in this order,
    hardly less, where the mean would promise up to 2.5 times too little. zb_h1 is faster; interleaved_1f1b is slower
    where micro-batches of one round differ. The latter runs in rounds of `stages`: a last round that is not full is
    filled up with idle micro-batches that cost as much as the last one.

    Raises CostModelError for seconds that are negative or not finite, ScheduleOptionError for a count below 1.
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float
    stages: int = 1
    virtual: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("stages", "virtual"):
                if value < 1:
                    raise ScheduleOptionError(f"{name} is {value}", "It must be 1 or more")
            elif not (math.isfinite(value) and value >= 0):
                raise CostModelError(name, value)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Time of a micro-batch of sequences with these lengths in tokens."""
        squares = sum(length * length for length in lengths)
        return self.fixed_s + self.per_token_s * sum(lengths) + self.per_square_s * squares

    def replica_s(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Time of a replica that runs micro-batches of sequences with these lengths in tokens, bubble included."""
        runs = sorted(map(self.seconds, micro_batches), reverse=True)
        if not runs:
            return 0.0
        idle = -len(runs) % self.stages if self.virtual > 1 else 0
        return sum(runs) + idle * runs[-1] + (self.stages - 1) / self.virtual * runs[0]

    def sequence_s(self, length: int) -> float:
        """What one more sequence of this length adds."""
        return self.per_token_s * length + self.per_square_s * (length * length)


def group_cost(
    program: Program,
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
    per_byte = {axis: seconds_per_byte(program.mesh, axis, cluster) for axis in {t.axis for t in work.traffic}}
    for one in work.traffic:
        total += one.sent_bytes * per_byte[one.axis] + Polynomial(Fraction(cluster.latency_us) / 10**6)
    return GroupCost(float(total.c0), float(total.c1), float(total.c2))


def seconds_per_byte(mesh: Mesh, axis: str, cluster: ClusterSpec) -> Fraction:
    """Of one rank, while all ranks take part in a collective of theirs over `axis`."""
    bandwidth = cluster.intra_gb_per_s
    if link_crosses_nodes(mesh, axis, cluster.node_of):
        shared = cluster.node_gb_per_s
        share = cluster.inter_gb_per_s if shared is None else shared / cluster.devices_per_node
        bandwidth = min(cluster.inter_gb_per_s, share)
    return 1 / (Fraction(bandwidth) * 10**9)
