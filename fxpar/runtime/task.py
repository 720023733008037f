"""`Task`, one loss with batches of its own, of several that train one model; `CompiledModel`, what a loss becomes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxpar.batching.lengths import LengthLimits, length_limits
from fxpar.errors import TaskBatchError, TaskError, a_type, nearest
from fxpar.ir.graph import LogicalGraph, Packing
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.written import is_task_name
from fxpar.losses import LossFunction
from fxpar.passes.share_weights import ShareWeights, StoragePass
from fxpar.precision import Precision
from fxpar.tracer.dynamic import Dynamic


@dataclass(frozen=True)
class CompiledModel:
    """A model captured once and lowered for each strategy (by its text); plain data, the same on every rank.

    `logical` is the graph as it was captured, what the model does to one sequence; `precision` says how the programs
    compute. `packing` is that of their rows, None if a row is one sequence; `unpacked` says why, if so. `sharing`
    lays out the weights of all strategies.
    """

    logical: LogicalGraph
    programs: Mapping[str, TrainGraph]
    timings: Mapping[str, float] = field(default_factory=dict)
    precision: Precision = field(default_factory=Precision)
    packing: Packing | None = None
    unpacked: str = ""
    sharing: StoragePass = field(default_factory=ShareWeights)

    @property
    def lengths(self) -> LengthLimits:
        """How long a sequence may be, as the model was captured."""
        return length_limits(self.logical)


@dataclass(frozen=True)
class Task:
    """What a model is trained for beside other tasks (`fxpar.parallelize(tasks=...)`).

    `loss` and `example` are as there. An example that is one row of tokens ([1, T, ...] under all keys) makes
    mini-batches of sequences; any other one makes lists of batches like it, each of which runs alone. `weight`, a
    number above 0, multiplies the mean of its loss. `strategies` and `token_budget`: by default those of `parallelize`.
    `ranks`: consecutive ranks that it runs on, by default all; its strategies are for so many. Tasks on different ranks
    that follow each other run at the same time.
    `dynamic`: which sizes of batches may differ, as in `fxpar.capture`. `compiled`: what `fxpar.compile_task` made.

    Raises TaskError.
    """

    loss: LossFunction
    example: Mapping[str, Tensor] | None = None
    weight: float = 1.0
    strategies: Mapping[int, Strategy | str] | None = None
    token_budget: int | Mapping[int, int] | None = None
    ranks: Sequence[int] | None = None
    dynamic: Dynamic = "auto"
    compiled: CompiledModel | None = None

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise TaskError("", f"has weight={weight!r}, not a number above 0; leave its batch out to skip a task")
        if not callable(self.loss):
            raise TaskError("", f"has loss={self.loss!r}, not a function of a model and a batch")

    def is_alike(self, other: Task) -> bool:
        """Whether the other one becomes the same programs: all but its weight, and whether they are there already."""
        same = all(getattr(self, name) is getattr(other, name) for name in ("loss", "example"))
        settings = ("strategies", "token_budget", "ranks", "dynamic")
        return same and all(getattr(self, name) == getattr(other, name) for name in settings)


def check_ranks(name: str, ranks: Sequence[int], world: int) -> None:
    """Raise TaskError unless they are consecutive ranks of the world."""
    known = list(ranks) if isinstance(ranks, Iterable) else []
    whole = bool(known) and all(type(rank) is int for rank in known)
    if not whole or known != list(range(known[0], known[0] + len(known))) or known[0] < 0 or known[-1] >= world:
        raise TaskError(name, f"has ranks={ranks!r}: give consecutive ones of 0 to {world - 1}, such as range(2, 4)")


def check_tasks(tasks: object) -> None:
    """Raise TaskError for what is no dict from names to tasks."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise TaskError("", f"has a name and is fxpar.Task(loss, example), in a dict; tasks={tasks!r}")
    for name, task in tasks.items():
        if not is_task_name(name):
            raise TaskError(str(name), "is not a name: give a text without ':' and '/'")
        if not isinstance(task, Task):
            raise TaskError(name, f"is {task!r}; give fxpar.Task(loss, example)")


def batches_of(given: object, tasks: Collection[str]) -> dict[str, Any]:
    """The mini-batch of each task that has one: a task may have none, or an empty one.

    Raises TaskBatchError for what is not a dict from tasks to mini-batches, or one in which no task has any.
    """
    if not isinstance(given, Mapping):
        raise TaskBatchError(f"this model is trained for tasks, and was given {a_type(given)}", tasks)
    for name in given:
        if name not in tasks:
            raise TaskBatchError(f"there is no task {name!r}{nearest(str(name), tasks)}", tasks)
    found = {name: one for name, one in given.items() if not isinstance(one, list | tuple) or one}
    if not found:
        raise TaskBatchError("no task has a batch", tasks)
    return found


def denominators_of(given: object, batches: Collection[str], tasks: Collection[str]) -> dict[str, Any]:
    """What the summed loss of tasks is divided by where the user says it. Raises TaskBatchError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TaskBatchError(f"denominator={given!r} is of no task", tasks)
    for name in given:
        if name not in batches:
            why = "has no batch" if name in tasks else f"is none{nearest(str(name), tasks)}"
            raise TaskBatchError(f"denominator= names the task {name!r}, which {why}", tasks)
    return dict(given)
