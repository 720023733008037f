"""`64 = "auto"` for tasks: strategies and ranks of a run's tasks, as `fxpar tasks plan` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import muted_warnings, naming_task
from fxpar.runtime.planned import on_rank_0
from fxpar.runtime.task import Task
from fxpar.search.chosen import of_ranks
from fxpar.tasks import TaskStep, captured, plan_tasks
from fxpar.train.config import TrainConfig, config_from_json, described_cluster
from fxpar.train.task_source import task_model, tasks_of
from fxpar.waves.runs import RunPlan, TaskRun

DEVICES_PER_NODE = 8  # where nobody describes the cluster


def planned_cluster(config: TrainConfig, ranks: int, devices_per_node: int = DEVICES_PER_NODE) -> ClusterSpec:
    """So many devices that tasks are planned on: as the configuration says, or usual ones of the kind that is here."""
    kind = "cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu"
    return of_ranks(described_cluster(config.engine) or usual_cluster(ranks, devices_per_node, kind), ranks)


def captured_tasks(
    module: nn.Module, tasks: Mapping[str, tuple[Task, int]], precision: str | None, limits: Mapping[str, int | None]
) -> dict[str, TaskStep]:
    """A step of each task with so many items; `limits` are the longest sequences or largest batches. Raises the errors
    of `fxpar.capture`, with the name of the task.
    """
    found = {}
    for name, (task, items) in tasks.items():
        with naming_task(name):
            found[name] = replace(captured(module, task, items, precision), tokens=limits[name] or 0)
    return found


def choose_tasks(config: TrainConfig) -> tuple[TrainConfig, str]:
    """The run with the strategies and ranks of the shortest step, and in words what that is. Nothing is allocated.

    Raises what functions of tasks, `fxpar.capture` and `plan_tasks` raise.
    """
    limits = {name: task.by_length(config.strategies)[-1][0] for name, task in config.tasks.items()}
    tasks = {name: (task, config.tasks[name].items) for name, task in tasks_of(config).items()}
    with muted_warnings():  # ranks tell them
        steps = captured_tasks(task_model(config, "meta"), tasks, config.precision.compute, limits)
        cluster, budget = planned_cluster(config, config.world), config.engine.memory_budget_bytes
        found = plan_tasks(steps, cluster, budget_bytes=budget)
    plan = found.runs
    assert plan is not None
    if plan.needs_budget and budget is None:
        budget = round(found.memory_bytes - plan.optimizer_bytes)
    chosen = {
        run.task: replace(
            config.tasks[run.task],
            strategies={str(limits[run.task]): run.option.strategy},
            ranks=None if len(run.ranks) == plan.devices else list(run.ranks),
        )
        for run in plan.runs
    }
    engine = replace(config.engine, memory_budget_bytes=budget)
    return replace(config, tasks=chosen, strategies=(), engine=engine), _in_words(plan)


def choose_on_rank_0(config: TrainConfig) -> tuple[TrainConfig, str]:
    """`choose_tasks` of rank 0, on all ranks. Raises as `on_rank_0` does."""

    def choose() -> tuple[dict[str, Any], str]:
        chosen, words = choose_tasks(config)
        return chosen.to_json(), words

    data, words = on_rank_0(choose)
    return config_from_json(data), words


def _in_words(plan: RunPlan) -> str:
    tasks = ", ".join(_shown(run) for run in plan.runs)
    step, after = plan.ms / 1e3, plan.sequential_ms / 1e3
    return f"chosen {tasks}: {step:.3g} s per step predicted, one after the other {after:.3g} s"


def _shown(run: TaskRun) -> str:
    ranks = f"ranks {run.ranks[0]}-{run.ranks[-1]}" if len(run.ranks) > 1 else f"rank {run.ranks[0]}"
    return f"{run.task} {run.option.strategy} on {ranks}"
