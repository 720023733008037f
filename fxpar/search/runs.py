"""What is found of a group that is planned, beside the seconds that its plan says."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.batching import GroupPlan
from fxpar.cost.group import simulated_s
from fxpar.cost.group_cost import Cost, TeamsCost
from fxpar.search.price import Priced


def simulated_run_s(one: Priced, group: GroupPlan, batch: Sequence[int]) -> float:
    """Of the slowest replica, by the schedule of its stages. As planned where there are no stages, or several on a
    rank, where a micro-batch is in bins, and where ranks take turns on a core.
    """
    strategy, positions = one.strategy, one.by_position
    plain = strategy.pipeline.virtual == strategy.bins == 1 and one.cluster.sustained.shared_by == 1
    if len(positions) < 2 or not plain:
        return group.predicted_s
    runs = [[[batch[i] for i in micro.sequences] for micro in replica] for replica in group.replicas]
    return max(simulated_s(positions, strategy.pipeline.schedule, each) for each in runs)


def busy_s(cost: Cost, group: GroupPlan, batch: Sequence[int]) -> float:
    """How long micro-batches keep a replica busy, in the mean; of teams side by side all of the time."""
    if isinstance(cost, TeamsCost):
        return group.predicted_s
    return sum(cost.seconds([batch[i] for i in m.sequences]) for m in group.micro_batches()) / len(group.replicas)
