"""The [task.NAME] sections of a configuration: what is trained beside other tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxpar.batching import length_groups
from fxpar.batching.groups import SIZES
from fxpar.errors import FxparError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.dtype_names import SHORT_DTYPES
from fxpar.ir.teams import formations
from fxpar.ir.written import is_task_name, read
from fxpar.train.schema import from_table, shown
from fxpar.train.strategies import AUTO, STATIC, read_strategies

Strategies = tuple[tuple[int, str], ...]
_TENSOR = re.compile(r"\s*(\w+)\s*\[((?:\s*\d{1,18}\s*,)*(?:\s*\d{1,18})?)\s*\]\s*")
_MOST_ELEMENTS = 2**40  # of a tensor of an example: what a model makes of it has sizes that do not overflow


@dataclass(frozen=True)
class TaskConfig:
    """One task. `loss` and `data` are functions, `FILE.py:NAME` or `NAME` in the file of the model: the loss of a model
    and a batch, and the item of a number, a sequence (ids [T]) or a batch. A mini-batch has `items` of them. Those of
    the first `validation` numbers are held out. The rest is as in `fxpar.Task`; `strategies` is as in [strategies], and
    has none where the task runs under these.

    A model by name brings a loss and a batch, for tasks that name none. A task without `data` can be planned and not
    trained: its batch is like `example`, dtype and shape by key (`f32[8, 3, 16, 16]`).
    """

    items: int = field(metadata={"least": 1})
    loss: str | None = None
    data: str | None = None
    example: dict[str, Any] | None = None
    weight: float = field(default=1.0, metadata={"above": 0})
    strategies: dict[str, Any] = field(default_factory=dict)
    token_budget: int | None = field(default=None, metadata={"least": 1})
    ranks: list[int] | None = None
    dynamic: dict[str, Any] | None = None
    validation: int = field(default=0, metadata={"least": 0})

    def by_length(self, others: Strategies) -> Strategies:
        """Ascending; those of `others` if it has none of its own."""
        return tuple(sorted((int(limit), text) for limit, text in self.strategies.items())) or others

    @property
    def dims(self) -> dict[str, dict[int, str]] | None:
        """Which sizes may differ, in the form of `fxpar.capture`."""
        if self.dynamic is None:
            return None
        return {key: {int(dim): name for dim, name in dims.items()} for key, dims in self.dynamic.items()}


Tasks = Mapping[str, TaskConfig]


def read_tasks(sections: Any, problems: list[str]) -> dict[str, TaskConfig]:
    """By name, in the order of the file; what is wrong is appended to `problems`."""
    if not isinstance(sections, dict) or not sections:
        problems.append(f"task = {shown(sections)} must be sections: [task.NAME]")
        return {}
    found = {}
    for name, table in sections.items():
        where = f"task.{name}"
        if not isinstance(table, dict):
            problems.append(f"{where} = {shown(table)} must be a section: [{where}]")
        elif not is_task_name(name):
            problems.append(f"[{where}] is not a name for a task: give a text without ':' and '/'")
        else:
            task = from_table(TaskConfig, table, where, problems)
            if task is not None and _fits(task, where, problems):
                found[name] = task
    return found


def read_tables(tables: dict[str, Any], problems: list[str]) -> tuple[dict[str, TaskConfig], Strategies]:
    """The tasks of a file, which are taken out of its tables, and the strategies of those that have none of their own;
    what is wrong is appended to `problems`.
    """
    tasks = read_tasks(tables.pop("task"), problems)
    problems += one_loss_problems(tables)
    given = tables.get("strategies", {})
    return tasks, read_by_length(given, problems) if isinstance(given, dict) and given else ()


def one_loss_problems(tables: Mapping[str, Any]) -> list[str]:
    """What stands beside tasks, but is for one loss that is trained on text."""
    strategies, problems = tables.get("strategies", {}), []
    if "data" in tables:
        problems.append("[data] is for one loss: each [task.NAME] has data of its own")
    if not isinstance(strategies, dict) or STATIC in strategies:
        problems.append(
            '"auto" and static are for one loss: give tasks strategies by length or rows, such as 64 = "dp2" or "auto"'
        )
    of_one_loss = {"engine": ("order", "gradients", "token_budgets"), "plan": ("drift", "residual", "exact_steps")}
    for section, key in ((section, key) for section, keys in of_one_loss.items() for key in keys):
        table = tables.get(section)
        if isinstance(table, dict) and table.get(key) not in (None, "home"):
            problems.append(f"{section}.{key} is for one loss, and there are tasks: leave it out")
    return problems


def task_problems(tasks: Tasks, model: str, strategies: Strategies, ranks: int | None) -> list[str]:
    """What is wrong with tasks, the strategies beside them, and the number of ranks, if it is said."""
    found = _function_problems(tasks, model)
    if chooses(tasks, strategies):
        return found + _choice_problems(tasks, strategies, ranks)
    world = world_of(tasks, strategies, ranks)
    for name, task in tasks.items():
        own = task.by_length(strategies)
        if not own:
            found.append(f'task.{name} has no strategies: give it some, such as {{ 64 = "dp2" }}, or [strategies]')
            continue
        many = task.ranks or range(world)
        if list(many) != list(range(many[0], many[0] + len(many))) or many[0] < 0 or many[-1] >= world:
            found.append(f"task.{name}.ranks = {many} must be consecutive ones of 0 to {world - 1}")
            continue
        try:
            length_groups(dict(own), world=len(many), token_budget=task.token_budget, unit=SIZES)
        except FxparError as error:
            found.append(f"task.{name}: {error}")
    return found


def read_by_length(table: Mapping[str, Any], problems: list[str], where: str = "strategies") -> Strategies:
    """Ascending (limit, strategy), where a strategy may be "auto"; what is wrong is appended to `problems`."""
    plain = {key: f"{REPLICAS}1" if text == AUTO else text for key, text in table.items()}
    chosen = {int(key) for key, text in table.items() if text == AUTO and key.isdecimal()}
    return tuple(
        (limit, AUTO if limit in chosen else text) for limit, text in read_strategies(plain, None, problems, where)
    )


def chooses(tasks: Tasks, strategies: Strategies) -> bool:
    """Whether strategies of tasks are yet to be chosen."""
    return any(text == AUTO for task in tasks.values() for _, text in task.by_length(strategies))


def _choice_problems(tasks: Tasks, strategies: Strategies, ranks: int | None) -> list[str]:
    """What strategies and ranks of tasks cannot be chosen beside."""
    found = [] if ranks else ['"auto" needs run.ranks, or --ranks N: how many to choose for']
    for name, task in tasks.items():
        own = task.by_length(strategies)
        if [text for _, text in own] != [AUTO]:
            found.append(f'task.{name}: if one task is "auto", each must have it as its only strategy: 64 = "auto"')
        if task.ranks is not None:
            found.append(f"task.{name}.ranks are chosen with its strategy: leave them out")
    return found


def _function_problems(tasks: Tasks, model: str) -> list[str]:
    """What a model by name brings, and a function does not."""
    from fxpar.models.loaders import is_function

    if not is_function(model):
        return []
    found = [f"task.{name}.loss is missing (a text)" for name, task in tasks.items() if task.loss is None]
    return found + [
        f"task.{name}.data is missing (a text), or, for a plan alone, an example"
        for name, task in tasks.items()
        if task.data is None and task.example is None
    ]


def world_of(tasks: Tasks, strategies: Strategies, ranks: int | None) -> int:
    """How many ranks they need, unless it is said: as many as strategies on all ranks do, or as tasks have ranks of
    their own.
    """
    if ranks is not None:
        return ranks
    everywhere = [task.by_length(strategies) for task in tasks.values() if task.ranks is None]
    wide = [formations(own[-1][1])[0].world for own in everywhere if own]
    return max([*wide, *(max(task.ranks) + 1 for task in tasks.values() if task.ranks)], default=1)


def texts_of(tasks: Tasks, strategies: Strategies) -> list[str]:
    """Each strategy that tasks run under, once; without tasks those of the one loss."""
    groups = [task.by_length(strategies) for task in tasks.values()] or [strategies]
    return list(dict.fromkeys(text for one in groups for _, text in one))


def _fits(task: TaskConfig, where: str, problems: list[str]) -> bool:
    """Whether its tables are what they should be."""
    before = len(problems)
    for key in (AUTO, STATIC):
        if key in task.strategies:
            problems.append(f"{where}.strategies.{key} is for one loss: give lengths or rows, such as 64")
            return False
    if task.strategies:
        read_by_length(task.strategies, problems, f"{where}.strategies")
    if task.ranks == []:
        problems.append(f"{where}.ranks = [] must name ranks, such as [0, 1]")
    for key, dims in (task.dynamic or {}).items():
        fits = isinstance(dims, dict) and all(dim.isdecimal() and isinstance(one, str) for dim, one in dims.items())
        if not fits:
            problems.append(f'{where}.dynamic.{key} = {shown(dims)} must name dims by number, such as {{ 0 = "B" }}')
    for key in ("loss", "data"):
        text = getattr(task, key)
        if text is not None and (not text.strip() or text.endswith(":")):
            problems.append(f"{where}.{key} = {shown(text)} must name a function: FILE.py:NAME, or NAME")
    if task.data is not None and task.example is not None:
        problems.append(f"{where}.example is for a task without data: item 0 is the example of this one")
    for key, text in (task.example or {}).items():
        if why := _no_tensor(text):
            problems.append(f'{where}.example.{key} = {shown(text)} {why}, such as "f32[8, 3, 16, 16]" or "i64[1, 64]"')
    return len(problems) == before


def example_of(text: str) -> tuple[str, list[int]]:
    """Dtype and sizes of `f32[8, 3, 16, 16]`; as `_fits` allows it."""
    dtype, _, sizes = text.strip().removesuffix("]").partition("[")
    return dtype.strip(), [int(size) for size in sizes.split(",") if size.strip()]


def _no_tensor(text: object) -> str:
    """What is wrong with a text that should say dtype and shape, or an empty string."""
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[1] not in SHORT_DTYPES:
        return "must be dtype and shape"
    _, sizes = example_of(match[0])
    if not sizes or min(sizes) < 1:
        return "must have sizes of 1 or more"
    return "must have at most 2**40 elements" if math.prod(sizes) > _MOST_ELEMENTS else ""


def has_tasks(path: str | Path) -> bool:
    """Whether a file is the configuration of tasks; False for one that cannot be read, which `read_config` tells."""
    try:
        return "task" in read(Path(path).read_text(encoding="utf-8"), "TOML")
    except (OSError, ValueError):
        return False


def function_place(text: str, model: str) -> str:
    """`FILE.py:NAME` of a function that is named so, or by its name in the file of the model."""
    return text if ":" in text else f"{model.rpartition(':')[0]}:{text}"
