"""`plan_switch`: from two layouts and a cluster to a SwitchPlan."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch.layout import ParamLayout
from fxpar.switch.plan import SwitchPlan
from fxpar.switch.planners import run_planner
from fxpar.switch.problem import switch_problem


def plan_switch(
    source: ParamLayout,
    target: ParamLayout,
    cluster: ClusterSpec,
    planner: str = "auto",
    extra_holders: Sequence[ParamLayout] = (),
) -> SwitchPlan:
    """Plan the switch of all tensors of `target`; `extra_holders` are further layouts whose copies are still valid.

    `planner` is first_come, round_robin, hotspa (Algorithm 1), relay, or auto (the fastest of them by prediction).
    Raises LayoutError, NoOwnerError, ClusterError, PlannerError.
    """
    begun = time.process_time()
    problem = switch_problem(source, target, cluster, extra_holders)
    chosen, transfers = run_planner(problem, planner)
    return SwitchPlan(planner, time.process_time() - begun, chosen, problem=problem, transfers=transfers)
