"""The configuration of a run with tasks, planned: read without its strategies and ranks, captured, and written with
those of a plan, as `fxpar train` takes it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import TasksFileError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.ir.written import read
from fxpar.runtime.task import Task
from fxpar.tasks import TaskStep
from fxpar.train.chosen_tasks import captured_tasks, planned_cluster
from fxpar.train.config import parse_config
from fxpar.train.task_source import task_model, tasks_of
from fxpar.waves.runs import RunPlan


@dataclass(frozen=True)
class RunTasks:
    """A configuration as tables, and what it names: nothing is captured yet. `limits` are the longest sequences or
    largest batches that it names.
    """

    tables: Mapping[str, Any]
    module: nn.Module
    tasks: Mapping[str, tuple[Task, int]]  # and how many batches each has in a step
    cluster: ClusterSpec
    precision: str | None
    limits: Mapping[str, int | None]
    budget_bytes: int | None = None  # of a rank, without states of the optimizer

    @property
    def can_train(self) -> bool:
        """Whether each task has data."""
        return all("data" in task for task in self.tables["task"].values())

    def steps(self) -> dict[str, TaskStep]:
        """Captures. Raises the errors of `fxpar.capture`, with the name of the task."""
        return captured_tasks(self.module, self.tasks, self.precision, self.limits)

    def planned(self, plan: RunPlan, steps: Mapping[str, TaskStep], memory_bytes: float = math.inf) -> str:
        """As TOML, tasks in the order of the plan, and the run with this limit of memory."""
        sections = dict(self.tables["task"])
        tasks = {}
        for run in plan.runs:
            limit = self.limits[run.task] or _length(steps[run.task].logical)
            kept = {key: value for key, value in sections[run.task].items() if key not in ("ranks", "strategies")}
            tasks[run.task] = {**kept, "strategies": {str(limit): run.option.strategy}, "ranks": list(run.ranks)}
            if len(run.ranks) == plan.devices:
                del tasks[run.task]["ranks"]
        others = {key: value for key, value in self.tables.items() if key not in ("task", "strategies")}
        others["run"] = {**others.get("run", {}), "ranks": plan.devices}
        if math.isfinite(memory_bytes):  # what the engine counts is without the optimizer
            budget = round(memory_bytes - plan.optimizer_bytes)
            others["engine"] = {**others.get("engine", {}), "memory_budget_bytes": budget}
        return to_toml({**others, "task": tasks})


def read_run_tasks(path: str, devices: int | None, devices_per_node: int) -> RunTasks:
    """A configuration, for so many devices (None: as it says).

    Raises TasksFileError for a file that cannot be read, has one loss, or does not say how many ranks there are, and
    what `fxpar train` raises for a configuration, its model and its functions.
    """
    try:
        tables = read(Path(path).read_text(encoding="utf-8"), "TOML")
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise TasksFileError(path, "", why, "Name a configuration with [task.NAME] sections") from None
    if "task" not in tables:
        raise TasksFileError(path, "task", "this run has one loss", "Plan it with fxpar plan, or add [task.NAME]")
    limits = _limits(tables)
    config = parse_config(to_toml(_unplanned(tables, limits)), path, Path(path).stem)
    count = devices or config.run.ranks
    if count is None:
        raise TasksFileError(path, "run.ranks", "it is missing", "Write it, or --devices N")
    with redirect_stdout(sys.stderr):  # what a user's file prints must not stand in the JSON
        tasks = {name: (task, config.tasks[name].items) for name, task in tasks_of(config).items()}
        module = task_model(config, "meta")
    cluster, budget = planned_cluster(config, count, devices_per_node), config.engine.memory_budget_bytes
    return RunTasks(tables, module, tasks, cluster, config.precision.compute, limits, budget)


def _limits(tables: Mapping[str, Any]) -> dict[str, int | None]:
    """By task the largest key of its strategies, or of those of all."""
    shared = tables.get("strategies")
    found: dict[str, int | None] = {}
    for name, table in tables["task"].items() if isinstance(tables["task"], dict) else ():
        own = table.get("strategies", shared) if isinstance(table, dict) else None
        numbers = [int(key) for key in own if re.fullmatch("[0-9]{1,10}", key)] if isinstance(own, dict) else []
        found[name] = max(numbers, default=None)
    return found


def _unplanned(tables: Mapping[str, Any], limits: Mapping[str, int | None]) -> dict[str, Any]:
    """The tables with one strategy on the ranks of the run for each task: what a plan fills in may be missing, or be
    for others.
    """
    if not isinstance(tables["task"], dict):
        return dict(tables)
    run = tables.get("run")
    ranks = run.get("ranks") if isinstance(run, dict) else None
    strategy = f"{REPLICAS}{ranks if type(ranks) is int and ranks > 0 else 1}"
    tasks = {
        name: {
            **{key: one for key, one in table.items() if key != "ranks"},
            "strategies": {str(limits[name] or 1): strategy},
        }
        if isinstance(table, dict)
        else table
        for name, table in tables["task"].items()
    }
    return {**{key: one for key, one in tables.items() if key != "strategies"}, "task": tasks}


def _length(logical: LogicalGraph) -> int:
    """Of the example: tokens if these may differ, else rows; 1 where nothing may."""
    dims = {dim.name: dim.example for dim in logical.dims}
    return dims.get(TOKENS) or next(iter(dims.values()), 1)


def to_toml(tables: Mapping[str, Any]) -> str:
    """Values first, then a section for each table, and one for each task."""
    lines = [f"{_key(key)} = {_value(one)}" for key, one in tables.items() if not isinstance(one, Mapping)]
    for key, table in tables.items():
        if key == "task" and isinstance(table, Mapping):
            for name, task in table.items():
                if not isinstance(task, Mapping):
                    lines += ["", "[task]", f"{_key(name)} = {_value(task)}"]
                    continue
                lines += ["", f"[task.{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in task.items())]
        elif isinstance(table, Mapping):
            lines += ["", f"[{_key(key)}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines).lstrip() + "\n"


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value) if isinstance(value, str | bool | int | float) else str(value)
