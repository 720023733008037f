"""`plan_tasks`: waves of a model's tasks on a cluster, from their captured graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.precision import Precision, with_precision
from fxpar.runtime.compiling import as_precision, capture_step
from fxpar.runtime.reading import is_row_of_tokens
from fxpar.runtime.task import Task
from fxpar.tasks.contract import TaskStep, contract
from fxpar.tasks.runs import planned_runs
from fxpar.tasks.times import task_graph
from fxpar.tracer.finish import without_unread
from fxpar.waves import Devices, plan_waves
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


def plan_tasks(tasks: Mapping[str, TaskStep], cluster: ClusterSpec, devices: int | None = None) -> TasksPlan:
    """Plan one training step of all tasks on so many devices of the cluster (None: all). Nothing runs; equal arguments
    give equal plans.

    Raises ClusterError for more devices than the cluster has, TaskGraphError for a task that computes nothing,
    FitsNoDevicesError for one that no strategy can run or that does not fit.
    """
    count = cluster.world if devices is None else devices
    cluster.require(count)
    found = contract(tasks)
    graph, times, layouts = task_graph(tasks, found, cluster, count)
    plan = plan_waves(graph, devices_of(cluster, count))
    chains = (
        replace(one.chain, strategies={width: timed.strategy for width, timed in mine.items()})
        for one, mine in zip(found, times, strict=True)
    )
    return TasksPlan(plan, tuple(chains), planned_runs(tasks, found, layouts, count))


def devices_of(cluster: ClusterSpec, count: int) -> Devices:
    """So many devices of a cluster, as waves are planned on them."""
    memory_gb = cluster.sustained.memory_gb
    within, between = (float(cluster.bytes_per_s(one)) / 1e9 for one in (False, True))
    memory = math.inf if memory_gb is None else memory_gb * 1e9
    return Devices(count, cluster.devices_per_node, within, between, memory)
