"""Planners by name: from a SwitchProblem to its transfers. `auto` takes the plan with the least predicted time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fxpar.errors import PlannerError
from fxpar.switch.planners.hotspa import hotspa
from fxpar.switch.planners.relay import relay
from fxpar.switch.planners.simple import first_come, round_robin
from fxpar.switch.predict import seconds
from fxpar.switch.problem import SwitchProblem

Planner = Callable[[SwitchProblem], np.ndarray]

# `auto` prefers the earlier one of two plans that take equally long.
PLANNERS: dict[str, Planner] = {
    "hotspa": hotspa,
    "relay": relay,
    "round_robin": round_robin,
    "first_come": first_come,
}
NAMES = (*PLANNERS, "auto")


def run_planner(problem: SwitchProblem, name: str) -> tuple[str, np.ndarray]:
    """Transfers by the planner `name`, and the name of the planner that made them. Raises PlannerError."""
    if name not in NAMES:
        raise PlannerError(name, NAMES)
    if name != "auto":
        return name, PLANNERS[name](problem)
    made = {candidate: plan(problem) for candidate, plan in PLANNERS.items()}
    best = min(made, key=lambda candidate: seconds(problem, made[candidate]))
    return best, made[best]


__all__ = ["NAMES", "PLANNERS", "Planner", "run_planner"]
