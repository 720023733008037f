"""What a micro-batch costs on the slowest ranks of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from fxpar.batching.cost import LAUNCH_US, MEMORY_GB_PER_S, GroupCost, group_cost
from fxpar.batching.work import sent_bytes
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph

NOMINAL_TOKENS = 4096  # which stage is slowest may depend on the length


def pipeline_cost(
    program: PipelineGraph,
    cluster: ClusterSpec,
    device_tflops: float,
    *,
    memory_gb_per_s: float = MEMORY_GB_PER_S,
    launch_us: float = LAUNCH_US,
) -> GroupCost:
    """Predicted cost of one micro-batch on the slowest ranks, all of their stages and what these send included;
    arguments and errors as in `group_cost`. A group takes that per micro-batch, and longer by the bubble.
    """
    ranks, virtual = program.strategy.degree("pp"), program.strategy.pipeline.virtual
    totals: dict[Mesh, list[GroupCost]] = defaultdict(list)
    for stage in program.stages:
        cost = group_cost(stage, cluster, device_tflops, memory_gb_per_s=memory_gb_per_s, launch_us=launch_us)
        totals[stage.mesh] += [cost, _messages(program, stage.index, cluster)]
    sums = [
        tuple(sum(getattr(cost, name) for cost in costs) for name in ("fixed_s", "per_token_s", "per_square_s"))
        for costs in totals.values()
    ]
    slowest = max(sums, key=lambda one: GroupCost(*one).seconds([NOMINAL_TOKENS]))
    return GroupCost(*slowest, stages=ranks, virtual=virtual)


def _messages(program: PipelineGraph, stage: int, cluster: ClusterSpec) -> GroupCost:
    """What the rank of a stage sends to its neighbours for a micro-batch."""
    found = sent_bytes(program.stages[stage], [meta for index, _, meta in program.transfers if index == stage])
    count = sum(index == stage for index, _, _ in program.transfers)
    others = (program.stages[other % len(program.stages)] for other in (stage - 1, stage, stage + 1))
    here = {cluster.node_of(other.mesh.offset) for other in others}
    bandwidth = cluster.intra_gb_per_s if len(here) == 1 else cluster.inter_gb_per_s
    per_byte = 1 / (Fraction(bandwidth) * 10**9)
    fixed = found.c0 * per_byte + count * Fraction(cluster.latency_us) / 10**6
    return GroupCost(float(fixed), float(found.c1 * per_byte), 0.0)
