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
from fxpar.switch.transfers import ordered

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
    """The name of the planner that was taken, and its transfers in order. Raises PlannerError."""
    if name not in NAMES:
        raise PlannerError(name, NAMES)
    chosen = list(PLANNERS) if name == "auto" else [name]
    made = {candidate: PLANNERS[candidate](problem) for candidate in chosen}
    best = min(chosen, key=lambda candidate: seconds(problem, made[candidate])) if len(chosen) > 1 else name
    return best, ordered(made[best], problem.world)


__all__ = ["NAMES", "PLANNERS", "Planner", "run_planner"]
