"""`plan_tasks`: waves of a model's tasks on a cluster, from their captured graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import FitsNoDevicesError
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.precision import Precision, with_precision
from fxpar.runtime.compiling import as_precision, capture_step
from fxpar.runtime.reading import is_row_of_tokens
from fxpar.runtime.task import Task
from fxpar.tasks.contract import TaskStep, contract
from fxpar.tasks.held import Home
from fxpar.tasks.runs import planned_runs
from fxpar.tasks.times import task_graph
from fxpar.tracer.finish import without_unread
from fxpar.waves import plan_waves
from fxpar.waves.chains import TasksPlan


def captured(model: nn.Module, task: Task, batches: int = 1, precision: Precision | str | None = None) -> TaskStep:
    """What a task of `fxpar.parallelize(tasks=...)` does with so many batches like its example, in this precision. The
    model may be on the meta device. Raises the errors of `fxpar.capture`, PrecisionSyntaxError.
    """
    if task.compiled is not None:
        return TaskStep(task.compiled.logical, batches)
    logical = without_unread(capture_step(model, task.loss, task.example, task.dynamic, tell_unused=False))
    if is_row_of_tokens(logical):
        logical = packed_if_proved(logical)[0]
    return TaskStep(with_precision(logical, as_precision(precision)), batches)


def plan_tasks(
    tasks: Mapping[str, TaskStep],
    cluster: ClusterSpec,
    devices: int | None = None,
    memory_bytes: float | None = None,
    budget_bytes: float | None = None,
) -> TasksPlan:
    """Plan one training step of all tasks on so many devices of the cluster (None: all), each of which holds
    `memory_bytes`, or `budget_bytes` without states of the optimizer (None: as the cluster says). Nothing runs; equal
    arguments give equal plans.

    What runs holds no more. Where no free plan of pieces does, the result is one that holds more.

    Raises ClusterError for more devices than the cluster has, TaskGraphError for a task that computes nothing,
    FitsNoDevicesError for one that no strategy can run, RunMemoryError where no run of the tasks fits.
    """
    count = cluster.world if devices is None else devices
    cluster.require(count)
    found = contract(tasks)
    graph, times, layouts = task_graph(tasks, found, cluster, count)
    home = Home.of([layouts[name][0].held for name in tasks], cluster, count)
    if budget_bytes is not None and memory_bytes is None:
        memory_bytes = budget_bytes + home.optimizer_bytes
    told = memory_bytes is not None  # so a run has a budget
    if memory_bytes is None:
        memory_bytes = cluster.sustained.memory_bytes or math.inf
    runs = planned_runs(tasks, found, layouts, home, memory_bytes, told)
    free = partial(plan_waves, graph, cluster, count, held_bytes=home.nbytes)
    try:
        plan = free(memory_bytes=memory_bytes)
    except FitsNoDevicesError:
        plan = free(memory_bytes=math.inf)
    chains = (
        replace(one.chain, strategies={width: timed.strategy for width, timed in mine.items()})
        for one, mine in zip(found, times, strict=True)
    )
    return TasksPlan(plan, tuple(chains), runs, memory_bytes)
