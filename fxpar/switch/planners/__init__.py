"""Planners by name: from a SwitchProblem to its transfers. `auto` takes the plan with the least predicted time.

Other packages add planners through the entry-point group `fxpar.planners`; `auto` does not try these.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fxpar.errors import PlannerContractError, PlannerError
from fxpar.ir.registry import Registry
from fxpar.switch.planners.hotspa import hotspa
from fxpar.switch.planners.relay import relay
from fxpar.switch.planners.simple import first_come, least_seconds, round_robin
from fxpar.switch.predict import seconds
from fxpar.switch.problem import SwitchProblem
from fxpar.switch.transfers import TRANSFER, ordered
from fxpar.switch.verify import verify

Planner = Callable[[SwitchProblem], np.ndarray]

# `auto` prefers the earlier one of two plans that take equally long.
PLANNERS: dict[str, Planner] = {
    "hotspa": hotspa,
    "relay": relay,
    "round_robin": round_robin,
    "first_come": first_come,
}
PLAIN = ("round_robin", "first_come")  # they relay nothing
NAMES = (*PLANNERS, "auto")
# "turns" is no planner of this kind: nobody makes its whole plan, see `fxpar.switch.by_turns`.
_ELSEWHERE = {"auto": f"{__name__}:run_planner", "turns": "fxpar.switch.by_turns:switch_by_turns"}
_BUILTIN = {name: f"{planner.__module__}:{planner.__name__}" for name, planner in PLANNERS.items()} | _ELSEWHERE
REGISTRY = Registry("planner", "fxpar.planners", _BUILTIN, PlannerError)


def planner_names() -> tuple[str, ...]:
    """What `run_planner` takes: fxpar's own, then those of other packages. Raises DuplicateNameError."""
    return (*NAMES, *REGISTRY.installed())


def run_planner(problem: SwitchProblem, name: str) -> tuple[str, np.ndarray]:
    """The name of the planner that was taken, and its transfers in order.

    The plan of a planner from another package is verified. Raises PlannerError, PlannerContractError, SwitchPlanError,
    DuplicateNameError, EntryLoadError.
    """
    if name not in NAMES:
        return name, _run_installed(problem, name)
    best, made = _fastest(problem) if name == "auto" else (name, PLANNERS[name](problem))
    return best, ordered(made, problem.world)


def _fastest(problem: SwitchProblem) -> tuple[str, np.ndarray]:
    best, made, took_s = "", np.empty(0, TRANSFER), float("inf")
    for name, planner in PLANNERS.items():
        if name in PLAIN and took_s <= least_seconds(problem):
            continue
        found = planner(problem)
        if (found_s := seconds(problem, found)) < took_s:
            best, made, took_s = name, found, found_s
    return best, made


def _run_installed(problem: SwitchProblem, name: str) -> np.ndarray:
    names = planner_names()
    if name not in names:
        raise PlannerError(name, names)
    made = REGISTRY.get(name)(problem)
    if not isinstance(made, np.ndarray) or made.dtype != TRANSFER:
        what = f"an array of {made.dtype}" if isinstance(made, np.ndarray) else type(made).__name__
        raise PlannerContractError(name, what)
    transfers = ordered(made, problem.world)
    verify(problem, transfers)
    return transfers


__all__ = ["NAMES", "PLANNERS", "Planner", "planner_names", "run_planner"]
