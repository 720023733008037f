"""From [task.NAME] sections to `fxpar.Task`s and their mini-batches, by the user's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import fxpar.models
from fxpar.batching import LengthGroup, length_groups
from fxpar.batching.lengths import LengthLimits, length_limits
from fxpar.batching.planner import by_group
from fxpar.errors import (
    ConfigError,
    ModelLengthError,
    ResumeError,
    SequenceTooLongError,
    TaskDataError,
    muted_warnings,
    naming_task,
)
from fxpar.ir.dtype_names import dtype_of_short
from fxpar.ir.teams import formations
from fxpar.losses import next_token_labels
from fxpar.models.loaded import LoadedModel, cast_batch
from fxpar.models.loaders import is_function
from fxpar.models.user_function import find_function, load_module
from fxpar.precision.precision import parse_dtype
from fxpar.runtime.compiling import capture_step, lower_task
from fxpar.runtime.reading import Reading, reading_of
from fxpar.runtime.task import Task
from fxpar.tracer.finish import without_unread
from fxpar.train.config import TrainConfig, described_cluster
from fxpar.train.model import freeze, texts_of
from fxpar.train.tasks import example_of, function_place

Item = Tensor | Mapping[str, Tensor]
Items = Callable[[int], Item]


def task_model(config: TrainConfig, device: str = "cpu") -> nn.Module:
    """The model with random weights from `run.seed`: the same on every rank. On "meta" nothing is allocated.

    Raises what `fxpar.models.load` raises, TrainedParametersError.
    """
    name, options, dtype = config.model.name, texts_of(config), parse_dtype(config.precision.parameters)
    if is_function(name):
        model = load_module(name, options, dtype=dtype, device=device, seed=config.run.seed)
    else:
        model = _by_name(config, device).model
    freeze(model, config.model.train)
    return model


def _by_name(config: TrainConfig, device: str = "meta") -> LoadedModel:
    """A model by name, with the loss and the batch that it brings."""
    name, options, dtype = config.model.name, texts_of(config), parse_dtype(config.precision.parameters)
    return fxpar.models.load(name, options=options, dtype=dtype, device=device, seed=config.run.seed, noise=False)


def tasks_of(config: TrainConfig) -> dict[str, Task]:
    """What `fxpar.parallelize` is given. Item 0 of a task is its example. Raises ModelFunctionError, TaskDataError."""
    found = {}
    for name, task in config.tasks.items():
        found[name] = Task(
            loss=_by_name(config).loss_fn if task.loss is None else _function(config, task.loss),
            example=_example_batch(config, name),
            weight=task.weight,
            strategies=dict(task.by_length(())) or None,
            token_budget=task.token_budget,
            ranks=task.ranks,
            dynamic=task.dims or "auto",
        )
    return found


def items_of(config: TrainConfig, name: str) -> Items:
    """The function of a task's items: floating-point tensors are in the dtype of the model.

    Raises ModelFunctionError, and ConfigError for a task without data; the function raises TaskDataError for an item
    that is none.
    """
    data = config.tasks[name].data
    if data is None:
        raise ConfigError(config.name, [f"task.{name}.data is missing: without it a task is planned, and not trained"])
    function, place = _function(config, data), function_place(data, config.model.name)
    dtype = parse_dtype(config.precision.parameters)

    def item(number: int) -> Item:
        try:
            found = function(number)
        except Exception as error:
            raise TaskDataError(name, place, number, f"raised {type(error).__name__}: {error}") from error
        if isinstance(found, Tensor) and found.dim() == 1 and found.dtype == torch.int64 and found.numel():
            return found
        if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
            raise TaskDataError(name, place, number, f"returned {_in_words(found)}")
        if empty := [key for key, value in found.items() if not value.numel()]:
            raise TaskDataError(name, place, number, f"returned {empty[0]!r} without an element")
        return cast_batch(found, dtype)

    return item


def check_tasks(config: TrainConfig) -> None:
    """Capture each task on a model without values, see that its first items can be run, and lower it: ranks would find
    it out too. Raises as these do; messages name the task.
    """
    model, cluster = task_model(config, "meta"), described_cluster(config.engine)
    for name, task in tasks_of(config).items():
        with naming_task(name), muted_warnings():
            logical = capture_step(model, task.loss, task.example, task.dynamic, tell_unused=False)
            strategies = dict(config.tasks[name].by_length(config.strategies))
            world = formations(list(strategies.values())[-1])[0].world
            reading = reading_of(without_unread(logical), of_task=True)
            groups = length_groups(strategies, world=world, token_budget=task.token_budget, unit=reading.unit)
            _check_items(_first_items(config, name), reading, length_limits(logical), groups)
            lower_task(logical, replace(task, strategies=strategies), config.precision.compute, cluster=cluster)


def _first_items(config: TrainConfig, name: str) -> list[Item]:
    """Those of the first step."""
    task, items = config.tasks[name], items_of(config, name)
    return [items(number) for number in range(task.validation, task.validation + task.items)]


def _check_items(items: list[Item], reading: Reading, limits: LengthLimits, groups: Sequence[LengthGroup]) -> None:
    reading.check(items)
    lengths = reading.lengths(items)
    for index, length in enumerate(lengths):
        if not limits.hold(length):
            raise ModelLengthError(index, length, str(limits))
    try:
        by_group(lengths, groups)
    except SequenceTooLongError as error:
        raise reading.retold(error) from None


def _in_words(found: object) -> str:
    """What is no item."""
    return f"a tensor {found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__


def _function(config: TrainConfig, text: str) -> Callable[..., Any]:
    spec = function_place(text, config.model.name)
    place, _, name = spec.rpartition(":")
    return find_function(spec, place, name)


def _example_batch(config: TrainConfig, name: str) -> Mapping[str, Tensor]:
    """What a task is captured with: item 0, or tensors like its example, without memory, or the batch of the model."""
    task = config.tasks[name]
    if task.data is not None:
        return _example(items_of(config, name)(0))
    if task.example is None:
        return _by_name(config).example_batch
    found = {}
    for key, text in task.example.items():
        dtype, sizes = example_of(text)
        found[key] = torch.empty(sizes, dtype=dtype_of_short(dtype), device="meta")
    return found


def _example(item: Item) -> Mapping[str, Tensor]:
    """A sequence as a row, with labels if it is ids alone; a batch as it is."""
    if isinstance(item, Tensor):
        return {"input_ids": item[None], "labels": next_token_labels(item[None])}
    ids = item.get("input_ids")
    return {key: value[None] for key, value in item.items()} if ids is not None and ids.dim() == 1 else item


OF_ONE_LOSS = (
    "it was written by a run without tasks, on text, and this configuration has tasks. Start another run from these "
    "weights: fxpar export, then model.weights"
)


def given_counts(state: object) -> Mapping[str, int] | None:
    """How many items each task was given, from the state of a `TaskLoader`; None of another loader's."""
    counts = state.get("tasks") if isinstance(state, Mapping) else None
    return counts if isinstance(counts, Mapping) else None


@dataclass
class TaskLoader:
    """Mini-batches without end: of each task its next `items`, by number. The first `validation` numbers are held out.

    Its state has how many items each task was given, so that tasks may join and leave a run that goes on.
    """

    config: TrainConfig
    given: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[dict[str, list[Item]]]:
        items = {name: items_of(self.config, name) for name in self.config.tasks}
        while True:
            batch = {}
            for name, task in self.config.tasks.items():
                first = task.validation + self.given.get(name, 0)
                batch[name] = [items[name](number) for number in range(first, first + task.items)]
                self.given[name] = self.given.get(name, 0) + task.items
            yield batch

    def held_out(self) -> dict[str, list[Item]]:
        """The items that are not trained, of tasks that have some."""
        return {
            name: list(map(items_of(self.config, name), range(task.validation)))
            for name, task in self.config.tasks.items()
            if task.validation
        }

    def lines(self) -> Iterator[str]:
        """What each task runs under, and how much of it makes a mini-batch."""
        for name, task in self.config.tasks.items():
            chosen = ", ".join(f"<={limit} {text}" for limit, text in task.by_length(self.config.strategies))
            where = f" on ranks {task.ranks[0]}-{task.ranks[-1]}" if task.ranks else ""
            yield f"task {name}: weight {task.weight:g}, {task.items} items per step; strategies {chosen}{where}"

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": dict(self.given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ResumeError for the state of another loader."""
        counts = given_counts(state)
        if counts is None:
            raise ResumeError(str(self.config.checkpoints), OF_ONE_LOSS)
        self.given = {str(name): int(count) for name, count in counts.items()}
