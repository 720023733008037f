"""The configuration of a run with tasks, planned: read without its strategies and ranks, and written with those of a
plan, as `fxpar train` takes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpar.cli.tasks_file import Model, ModelTasks
from fxpar.errors import TasksFileError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.ir.written import read
from fxpar.tasks import TaskStep
from fxpar.waves.runs import RunPlan


@dataclass(frozen=True)
class RunTasks:
    """A configuration as tables, and its tasks. `limits` are the longest sequences or largest batches that it names."""

    tables: Mapping[str, Any]
    tasks: ModelTasks
    limits: Mapping[str, int | None]

    def planned(self, plan: RunPlan, steps: Mapping[str, TaskStep]) -> str:
        """As TOML, tasks in the order of the plan."""
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
        return to_toml({**others, "task": tasks})


def is_run(path: str) -> bool:
    """Whether a TOML file is the configuration of a run with tasks; what is wrong with it is left to who reads it."""
    try:
        return "task" in read(Path(path).read_text(encoding="utf-8"), "TOML")
    except (OSError, ValueError):
        return False


def read_run_tasks(path: str, devices: int | None, devices_per_node: int) -> RunTasks:
    """Raises TasksFileError for one that does not say how many ranks there are, and what `fxpar train` raises for a
    configuration, its model and its functions.
    """
    import torch

    from fxpar.cost.cluster import usual_cluster
    from fxpar.search.chosen import of_ranks
    from fxpar.train.config import described_cluster, parse_config
    from fxpar.train.task_source import task_model, tasks_of

    tables = read(Path(path).read_text(encoding="utf-8"), "TOML")
    limits = _limits(tables)
    config = parse_config(to_toml(_unplanned(tables, limits)), path, Path(path).stem)
    count = devices or config.run.ranks
    if count is None:
        raise TasksFileError(path, "run.ranks", "it is missing", "Write it, or --devices N")
    kind = "cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu"
    cluster = described_cluster(config.engine) or usual_cluster(count, devices_per_node, kind)
    tasks = {name: (task, config.tasks[name].items) for name, task in tasks_of(config).items()}
    model = Model(task_model(config, "meta"))
    read_tasks = ModelTasks(path, model, tasks, of_ranks(cluster, count), config.precision.compute)
    return RunTasks(tables, read_tasks, limits)


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
