"""What no plan of a switch undercuts, from what nodes and ranks must receive: no sender is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch.api import plan_by_turns
from fxpar.switch.by_turns import SwitchByTurns
from fxpar.switch.layout import ParamLayout
from fxpar.switch.planners.groups import has_local_holder
from fxpar.switch.problem import SwitchProblem, alike_tensors, problem_of


def least_seconds(
    source: ParamLayout, target: ParamLayout, cluster: ClusterSpec, extra_holders: Sequence[ParamLayout] = ()
) -> float:
    """Seconds that a plan of `fxpar.switch.plan_large_switch` takes at least, with these sources or some of them.

    What a node lacks enters it once at least, and what a rank lacks reaches it. Raises LayoutError, NoOwnerError,
    ClusterError.
    """
    turns = plan_by_turns(source, target, cluster, extra_holders)
    if turns is not None:
        return of_turns(turns)
    world, alike = alike_tensors(source, target, cluster, extra_holders)
    return _of_problem(problem_of(alike, target, source.name, world, cluster))


def of_turns(plan: SwitchByTurns) -> float:
    """Of a plan by turns, whose sources are those with the fewest bytes between nodes: of the mean rank, as nobody
    knows those of all.
    """
    world = plan.problem.world
    return _seconds(plan.inter_node_bytes / plan.problem.nodes, plan.total_bytes / world, plan.problem.cluster)


def _of_problem(problem: SwitchProblem) -> float:
    """Of the node that lacks most, and the rank that does."""
    starts = np.arange(0, problem.world, problem.cluster.devices_per_node)
    by_node, by_rank = np.zeros(len(starts)), np.zeros(problem.world)
    for cls in problem.classes:
        nbytes = len(cls.members) * cls.nbytes
        far = cls.missing & ~has_local_holder(problem, cls)
        by_node += nbytes @ np.logical_or.reduceat(far, starts, axis=1)
        by_rank += nbytes @ cls.missing
    return _seconds(float(by_node.max()), float(by_rank.max()), problem.cluster)


def _seconds(entering: float, received: float, cluster: ClusterSpec) -> float:
    """For bytes that enter a node, through all of its devices, and that a rank receives, over whatever links."""
    inside, between = (float(cluster.bytes_per_s(one)) for one in (False, True))
    over_all = inside if cluster.nodes == 1 else inside + float(cluster.inter_gb_per_s) * 1e9
    enters_s = entering / (cluster.devices_per_node * between)
    return max(enters_s, received / over_all) + float(cluster.latency_s) * (received > 0)
