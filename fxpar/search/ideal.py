"""What no strategy with rules undercuts, whatever its rules say and whoever looks for them.

Each module takes what its kernels take on one device, shared out without rest over all ranks of a replica: no role of a
module computes less, and none recomputes less than nothing. Transfers and borders are free, memory is as large as one
could want, caches hold everything, and stages are never idle. What ranks do not share is the launch of a kernel:
without stages, every rank launches them all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import of_degrees
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.price import Candidate, Priced

COMPUTED = ("product", "attention", "memory")  # kinds of calls that any strategy has


@dataclass(frozen=True)
class Kernels:
    """Seconds of a micro-batch of the whole model on one device: launches of kernels, and what these do."""

    launches_s: Fraction
    work: Polynomial

    @classmethod
    def of(cls, one: Candidate | None) -> Kernels:
        """Of a strategy that leaves the model whole, from its programs. None: nothing is known, so it takes nothing."""
        if one is None:
            return cls(Fraction(0), Polynomial())
        cluster = _all_cached(one.cluster)
        found = [_of_program(program, cluster) for program in one.programs]
        few, more = found[0], found[-1]
        return few.plus(more.plus(few, -1), one.steps)

    def plus(self, other: Kernels, times: Fraction | int = 1) -> Kernels:
        return Kernels(self.launches_s + other.launches_s * times, self.work + other.work * times)

    def cost(self, world: int, replicas: int, stages: int, shared_by: float) -> GroupCost:
        """Of a replica: all of its ranks work all of the time, and share a parameter's work with all others."""
        ranks = world // replicas
        launches_s = self.launches_s if stages == 1 else self.launches_s / ranks
        fixed_s = launches_s + self.work.c0 / world
        return GroupCost(float(fixed_s), float(self.work.c1 / ranks), float(self.work.c2 / ranks), shared_by=shared_by)


def ideal_seconds(kernels: Kernels, candidates: Collection[Priced], found: Intervals, most: int) -> np.ndarray:
    """[mini-batches, i, j] as `least_seconds`: of any strategy with rules that has the replicas and stages of one of
    the candidates, in micro-batches of at most `most` tokens.
    """
    alone = [one for one in candidates if not one.strategy.teams]
    least = np.full(found.tokens.shape, np.inf)
    for replicas, stages in {(one.strategy.replicas, min(one.strategy.pipeline_size, 2)) for one in alone}:
        world, shared_by = alone[0].strategy.world, alone[0].cluster.sustained.shared_by
        cost = kernels.cost(world, replicas, stages, shared_by)
        strategy = of_degrees(replicas, 1, 1, world // replicas)
        least = np.minimum(least, least_seconds(cost, strategy, [most] * len(found.edges), found))
    return least


def _of_program(program: TrainGraph, cluster: ClusterSpec) -> Kernels:
    assert not isinstance(program, PipelineGraph)
    calls = [one for one in node_costs(program, cluster) if one.kind in COMPUTED]
    launches_s = len(calls) * cluster.sustained.launch_s
    return Kernels(launches_s, sum((one.seconds for one in calls), Polynomial(-launches_s)))


def _all_cached(cluster: ClusterSpec) -> ClusterSpec:
    """Where each tensor is read as fast as those that a cache holds: a part of a tensor may fit where it does not."""
    device = cluster.sustained
    if device.cache_gb_per_s is None:
        return cluster
    return replace(
        cluster, device=replace(device, memory_gb_per_s=device.cache_gb_per_s, cache_mb=None, cache_gb_per_s=None)
    )
