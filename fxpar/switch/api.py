"""`plan_switch`: from two layouts and a cluster to a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch.by_turns import LISTED, TURNS, SwitchByTurns, switch_by_turns, transfers_at_most
from fxpar.switch.layout import ParamLayout
from fxpar.switch.plan import SwitchPlan
from fxpar.switch.planners import run_planner
from fxpar.switch.problem import alike_tensors, problem_of

AnySwitchPlan = SwitchPlan | SwitchByTurns


def plan_switch(
    source: ParamLayout,
    target: ParamLayout,
    cluster: ClusterSpec,
    planner: str = "auto",
    extra_holders: Sequence[ParamLayout] = (),
) -> SwitchPlan:
    """Plan the switch of all tensors of `target`; `extra_holders` are further layouts whose copies are still valid.

    `planner` is first_come, round_robin, hotspa (Algorithm 1), relay, auto (the fastest of them by prediction),
    or one of another package (entry-point group `fxpar.planners`).
    Raises LayoutError, NoOwnerError, ClusterError, PlannerError; PlannerContractError and SwitchPlanError for another
    package's planner that does not do what a planner does.
    """
    begun = time.process_time()
    world, alike = alike_tensors(source, target, cluster, extra_holders)
    problem = problem_of(alike, target, source.name, world, cluster)
    chosen, transfers = run_planner(problem, planner)
    return SwitchPlan(planner, time.process_time() - begun, chosen, problem=problem, transfers=transfers)


def plan_large_switch(
    source: ParamLayout,
    target: ParamLayout,
    cluster: ClusterSpec,
    planner: str = "auto",
    extra_holders: Sequence[ParamLayout] = (),
    listed: int = LISTED,
) -> AnySwitchPlan:
    """`plan_switch`; but with planner "turns", or "auto" and more than `listed` transfers, nobody gets the whole plan.

    Every rank then works out its own part of it, see `by_turns`.
    """
    turns = plan_by_turns(source, target, cluster, extra_holders, planner, listed)
    return turns or plan_switch(source, target, cluster, "auto" if planner == TURNS else planner, extra_holders)


def plan_by_turns(
    source: ParamLayout,
    target: ParamLayout,
    cluster: ClusterSpec,
    extra_holders: Sequence[ParamLayout] = (),
    planner: str = "auto",
    listed: int = LISTED,
) -> SwitchByTurns | None:
    """The plan by turns, as `plan_large_switch` makes it; None where that makes another one: also where only several
    sources together have all slices, or nobody has. Raises LayoutError, ClusterError.
    """
    begun = time.process_time()
    if planner not in ("auto", TURNS):
        return None
    world, alike = alike_tensors(source, target, cluster, extra_holders)
    if planner != TURNS and transfers_at_most(alike, world, cluster) <= listed:
        return None
    problem, legs = switch_by_turns(alike, tuple(target.params), (source.name, target.name), world, cluster)
    if not all(leg.has_owners for leg in legs):
        return None
    return SwitchByTurns(problem, legs, planner, time.process_time() - begun)
