"""A TOML file of a model and its tasks, read and captured: what `fxpar tasks plan` plans from a model."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.errors import TasksFileError, naming_task, nearest
from fxpar.ir.dtype_names import dtype_of_short
from fxpar.ir.written import brief, is_task_name, read
from fxpar.losses import LossFunction
from fxpar.models.load import load
from fxpar.models.loaders import is_function
from fxpar.models.user_function import call, find_function, unpack
from fxpar.runtime.task import Task
from fxpar.search.chosen import of_ranks
from fxpar.tasks import TaskStep, captured

_KEYS = {"model": str, "tasks": dict, "cluster": str, "devices": int, "precision": str}
_TASK_KEYS = {"loss": str, "example": dict | str, "batches": int, "dynamic": dict}
_TENSOR = re.compile(r"\s*(\w+)\s*\[((?:\s*\d{1,18}\s*,)*(?:\s*\d{1,18})?)\s*\]\s*")
_MOST_ELEMENTS = 2**40  # of a tensor of an example: what a model makes of it has sizes that do not overflow


@dataclass(frozen=True)
class Model:
    """A model, and what it brings: a loss and a batch, or None."""

    module: nn.Module
    loss: LossFunction | None = None
    example: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class ModelTasks:
    """A file, read: nothing is captured yet."""

    path: str
    model: Model
    tasks: Mapping[str, tuple[Task, int]]  # and how many batches each has in a step
    cluster: ClusterSpec
    precision: str | None

    def steps(self) -> dict[str, TaskStep]:
        """Captures. Raises the errors of `fxpar.capture`, with the name of the task."""
        found = {}
        for name, (task, batches) in self.tasks.items():
            with naming_task(name):
                found[name] = captured(self.model.module, task, batches, self.precision)
        return found


def read_model_tasks(path: str, devices: int | None, devices_per_node: int) -> ModelTasks:
    """A file for so many devices (None: as it says); `read_run_tasks` reads the configuration of a run.

    Raises TasksFileError that names file, key and value, what loading the model raises, and ClusterError.
    """
    try:
        data = read(Path(path).read_text(encoding="utf-8"), "TOML")
    except OSError as error:
        raise TasksFileError(path, "", f"it cannot be read: {error.strerror or error}", "Name a TOML file") from None
    except ValueError as error:
        raise TasksFileError(path, "", str(error), "Write model = ..., and a table [tasks.NAME] for each") from None
    if isinstance(data.get("model"), dict):
        raise TasksFileError(path, "task", "this run has one loss", "Plan it with fxpar plan, or add [task.NAME]")
    check_keys(path, data)
    count = data.get("devices", 1) if devices is None else devices
    if count < 1:
        raise TasksFileError(path, "devices", f"{count} is no number of devices", "Write 1 or more")
    with redirect_stdout(sys.stderr):  # what a user's file prints must not stand in the JSON
        model = _model(data["model"])
        tasks = {name: _task(path, name, one, model) for name, one in data["tasks"].items()}
    cluster = ClusterSpec.from_file(data["cluster"]) if "cluster" in data else usual_cluster(count, devices_per_node)
    return ModelTasks(path, model, tasks, of_ranks(cluster, count), data.get("precision"))


def check_keys(path: str, data: object) -> None:
    """Raises TasksFileError for keys that no such file has, or values of another kind."""
    _check(path, "", data, _KEYS, ("model", "tasks"))
    assert isinstance(data, dict)
    if not data["tasks"]:
        raise TasksFileError(path, "tasks", "there is none", "Write a table [tasks.NAME] for each")
    for name, one in data["tasks"].items():
        if not is_task_name(name):
            why = f"{name!r} is no name of a task"
            raise TasksFileError(path, "tasks", why, "Give a text without ':' and '/'")
        _check(path, f"tasks.{name}", one, _TASK_KEYS, ())


def _model(spec: str) -> Model:
    """What a function returns, without arguments: a module, or what `fxpar.models.load` takes; or a model by name."""
    if not is_function(spec):
        found = load(spec, device="meta")
        return Model(found.model, found.loss_fn, found.example_batch)
    result = call(spec, _function(spec), {}, "meta", 0)
    if isinstance(result, nn.Module):
        return Model(result)
    module, loss, example, *_ = unpack(spec, result)
    return Model(module, loss, example)


def _function(spec: str) -> Callable[..., Any]:
    place, _, name = spec.rpartition(":")
    return find_function(spec, place, name)


def _task(path: str, name: str, data: Mapping[str, Any], model: Model) -> tuple[Task, int]:
    where = f"tasks.{name}"
    loss = _function(data["loss"]) if "loss" in data else model.loss
    if loss is None:
        raise TasksFileError(path, where, "it has no loss, nor has the model", 'Write loss = "file.py:function"')
    example = model.example
    if isinstance(data.get("example"), str):
        example = call(data["example"], _function(data["example"]), {}, "cpu", 0)
        if not isinstance(example, Mapping) or not all(isinstance(one, Tensor) for one in example.values()):
            raise TasksFileError(
                path, f"{where}.example", f"it returned {type(example).__name__}", "Return tensors by key"
            )
    elif "example" in data:
        example = {key: _tensor(path, f"{where}.example.{key}", text) for key, text in data["example"].items()}
    batches = data.get("batches", 1)
    if batches < 1:
        raise TasksFileError(path, f"{where}.batches", f"{batches} is no number of batches", "Write 1 or more")
    dynamic = _dynamic(path, f"{where}.dynamic", data["dynamic"]) if "dynamic" in data else "auto"
    return Task(loss, example, dynamic=dynamic), batches


def _tensor(path: str, where: str, text: object) -> Tensor:
    """One like `f32[8, 3, 16, 16]`, without memory: a capture reads no values."""
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    dtype = dtype_of_short(match[1]) if match else None
    if match is None or dtype is None:
        why = f"{brief(text)[:60]} is no tensor"
        raise TasksFileError(path, where, why, 'Write its dtype and shape, such as "f32[8, 3, 16, 16]" or "i64[1, 64]"')
    sizes = [int(size) for size in match[2].split(",") if size.strip()]
    if not sizes or min(sizes) < 1:
        raise TasksFileError(path, where, f"{text!r} has a size below 1, or none", "Write sizes of 1 or more")
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise TasksFileError(path, where, f"{text!r} has more than 2**40 elements", "Write smaller sizes")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _dynamic(path: str, where: str, data: Mapping[str, object]) -> dict[str, dict[int, str]]:
    """{"pixels": {"0": "B"}} with numbers for dims."""
    found: dict[str, dict[int, str]] = {}
    for key, dims in data.items():
        if not isinstance(dims, dict) or not all(d.isdecimal() and isinstance(one, str) for d, one in dims.items()):
            why = f"{brief(dims)[:60]} are no dims with names"
            raise TasksFileError(path, f"{where}.{key}", why, 'Write {0 = "B"} for the first one')
        found[key] = {int(dim): name for dim, name in dims.items()}
    return found


def _check(path: str, where: str, data: object, known: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise TasksFileError(path, where, f"it is {brief(data)[:60]}, no table", f"Write [{where}]")
    for key, value in data.items():
        place = f"{where}.{key}" if where else key
        if key not in known:
            raise TasksFileError(path, place, f"this key is unknown{nearest(key, known)}", "Delete or rename it")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            what = {str: "a text", int: "a number", dict: "a table"}.get(known[key], "a table or a text")
            raise TasksFileError(path, place, f"{brief(value)[:60]} is not {what}", "Correct it")
    for key in needed:
        if key not in data:
            raise TasksFileError(path, key, "it is missing", "Add it: docs/tasks.md says what it is")
