"""A plan as a file: which strategy runs which lengths, in TOML that a person reads and edits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

from fxpar.errors import FxparError, PlanFileError, nearest
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import formations
from fxpar.ir.written import LONGEST, brief, read

VERSION = 1
MOST_TOKENS = 2**40  # of a mini-batch


@dataclass(frozen=True)
class PlanGroup:
    """Sequences of up to `limit` tokens run under `strategy`, in micro-batches of at most `token_budget` tokens of a
    replica. `seconds` are predicted, of a mean mini-batch.
    """

    limit: int
    strategy: str
    token_budget: int
    seconds: float = 0.0


Resolved = Callable[[Sequence[str]], Mapping[str, Any]]
"""From options `key=value` of a model to their values, defaults included."""


@dataclass(frozen=True)
class Plan:
    """A set of strategies for `model` (with `options` as `--set` has them) on `world` ranks. `memory_budget_bytes` is
    for a rank, without the optimizer's states, as `fxpar.parallelize` takes it; 0 is none. By its number of
    `parameters` another model is told from this one, where it has no such name; 0 is not said.
    """

    model: str
    world: int
    tokens_per_step: int
    groups: tuple[PlanGroup, ...]
    options: tuple[str, ...] = ()
    memory_budget_bytes: int = 0
    parameters: int = 0
    predicted_s: float = 0.0
    lower_bound_s: float = 0.0

    @property
    def strategies(self) -> dict[int, str]:
        """As `fxpar.parallelize` takes them: strategy by the longest sequence in tokens."""
        return {group.limit: group.strategy for group in self.groups}

    @property
    def token_budgets(self) -> dict[int, int]:
        """Most tokens of a micro-batch, by limit."""
        return {group.limit: group.token_budget for group in self.groups}

    def assignments(self) -> list[str]:
        """As `fxpar train --set` takes them."""
        strategies = ", ".join(f'{group.limit} = "{group.strategy}"' for group in self.groups)
        budgets = ", ".join(f"{group.limit} = {group.token_budget}" for group in self.groups)
        found = [f"strategies={{{strategies}}}", f"engine.token_budgets={{{budgets}}}"]
        if self.memory_budget_bytes:
            found.append(f"engine.memory_budget_bytes={self.memory_budget_bytes}")
        return found

    def other_batches(self, path: str, batch_tokens: int | None) -> list[str]:
        """A note if the mini-batches of a run have other tokens than those that the plan at `path` was made for."""
        if batch_tokens in (None, self.tokens_per_step):
            return []
        planned = f"plan {path!r} is for mini-batches of {self.tokens_per_step:,} tokens"
        return [f"{planned}, and data.batch_tokens is {batch_tokens:,}: another set may be faster"]

    def check_module(self, path: str, parameters: int, world: int | None) -> None:
        """Raise PlanFileError if it is for a model with another number of parameters, or for other ranks (None: any).
        `path` names the plan.
        """
        if self.parameters not in (0, parameters):
            why = f"it is for {self.model} with {self.parameters:,} parameters, and this model has {parameters:,}"
            raise PlanFileError(path, why, "Make one for it, or delete `parameters` if it is meant")
        self._check_world(path, world)

    def check(
        self,
        path: str,
        model: str,
        options: Sequence[str],
        world: int | None,
        resolved: Resolved | None = None,
        decided: Collection[str] = (),
    ) -> None:
        """Raise PlanFileError if it is for another model or another number of ranks (None: any). Options that are
        written otherwise are compared as `resolved` has them, defaults included. Those that the data of a run decides
        where it names none (`decided`, such as a vocabulary) may stand in the plan alone.
        """
        if model != self.model or not self._covers(options, resolved, decided):
            mine, theirs = " ".join([self.model, *self.options]), " ".join([model, *options])
            words = " ".join([model, *(f"--set {option}" for option in options)])
            do = f"Make one with: fxpar plan {words}; or give the model the options of the plan"
            raise PlanFileError(path, f"it is for the model {mine}, not {theirs}", do)
        self._check_world(path, world)

    def _covers(self, options: Sequence[str], resolved: Resolved | None, decided: Collection[str]) -> bool:
        """Whether these options are those of the plan, by their texts or by what they come to."""
        named = {_key(one) for one in options}
        options = [*options, *(one for one in self.options if _key(one) in decided and _key(one) not in named)]
        if set(options) == set(self.options):
            return True
        return resolved is not None and resolved(self.options) == resolved(options)

    def _check_world(self, path: str, world: int | None) -> None:
        if world not in (None, self.world):
            raise PlanFileError(path, f"it is for {self.world} ranks, not {world}", "Make one with `fxpar plan`")

    def to_toml(self, remarks: Sequence[str] = ()) -> str:
        """The file, `remarks` as comments on top."""
        lines = [*(f"# {one}" for one in remarks), f"fxpar_plan = {VERSION}"]
        lines += [f"{name} = {_toml(getattr(self, name))}" for name in _fields(Plan) if name != "groups"]
        for group in self.groups:
            lines += ["", "[[groups]]", *(f"{name} = {_toml(getattr(group, name))}" for name in _fields(PlanGroup))]
        return "\n".join(lines) + "\n"


def is_plan(path: str) -> bool:
    """Whether a file says that it is one of these, whatever else is wrong with it."""
    try:
        return re.search(r"^\s*fxpar_plan\s*=", Path(path).read_text(encoding="utf-8"), re.M) is not None
    except (OSError, ValueError):
        return False


def read_plan(path: str) -> Plan:
    """Read and check a file. Raises PlanFileError, which names the key."""
    try:
        return parse_plan(Path(path).read_text(encoding="utf-8"), path)
    except IsADirectoryError as error:
        raise PlanFileError(path, "it is a folder; name the file that fxpar plan -o has written") from error
    except OSError as error:
        raise PlanFileError(path, f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanFileError(path, f"it is not TOML: {error}") from error


def plan_of(given: Plan | str | PathLike[str]) -> tuple[Plan, str]:
    """A plan, or the file that it is in, and what names it in errors. Raises PlanFileError."""
    return (given, given.model) if isinstance(given, Plan) else (read_plan(str(given)), str(given))


def parse_plan(text: str, path: str) -> Plan:
    """Check the text of a plan; `path` names it in errors. Raises PlanFileError."""
    try:
        data = read(text, "TOML")
    except ValueError as error:
        raise PlanFileError(path, str(error)) from error
    if isinstance(data.get("model"), dict):
        why = "it is the configuration of a run, not a plan"
        raise PlanFileError(
            path, why, "Name a file that fxpar plan -o has written, or, to draw it, the model of the run"
        )
    version = data.pop("fxpar_plan", None)
    if version != VERSION or isinstance(version, bool):  # True is 1
        raise PlanFileError(path, f"it does not begin with fxpar_plan = {VERSION}", "Write one with `fxpar plan -o`")
    groups = data.pop("groups", None)
    if not isinstance(groups, list) or not groups or not all(isinstance(one, dict) for one in groups):
        raise PlanFileError(path, "it has no [[groups]]", "Each has limit, strategy and token_budget")
    found = tuple(
        PlanGroup(**_values(path, PlanGroup, one, _group(n, one.get("limit")))) for n, one in enumerate(groups, 1)
    )
    plan = Plan(groups=found, **_values(path, Plan, data, "", given=("groups",)))
    if plan.world < 1:
        raise PlanFileError(path, f"world = {plan.world} ranks can run nothing")
    _check_tokens(path, "tokens_per_step", plan.tokens_per_step, MOST_TOKENS)
    _check_options(path, plan.options)
    _check_groups(path, plan)
    return plan


def _check_options(path: str, options: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for one in options:
        key = _key(one)
        if "=" not in one or not key:
            raise PlanFileError(path, f"options: {one!r} is not an assignment", 'Write "key=value", such as "layers=4"')
        if key in seen:
            raise PlanFileError(path, f"options: {seen[key]!r} and {one!r} set the same option", "Keep one")
        seen[key] = one


def _check_tokens(path: str, key: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise PlanFileError(path, f"{key} = {value} must be from 1 to {most:,} tokens")


def _check_groups(path: str, plan: Plan) -> None:
    limits = [group.limit for group in plan.groups]
    if limits != sorted(set(limits)) or limits[0] < 1:
        raise PlanFileError(path, f"limits are {', '.join(map(str, limits))}", "They ascend, from 1 on")
    found: list[tuple[str, Strategy]] = []
    for number, group in enumerate(plan.groups, 1):
        where = _group(number, group.limit)
        _check_tokens(path, f"{where}limit", group.limit, LONGEST)
        _check_tokens(path, f"{where}token_budget", group.token_budget, MOST_TOKENS)
        try:
            found.append((where, formations(group.strategy)[0]))
        except FxparError as error:
            raise PlanFileError(path, f"{where}{error}") from error
        if group.token_budget < group.limit:
            why = f"token_budget = {group.token_budget} holds no sequence of {group.limit} tokens"
            raise PlanFileError(path, f"{where}{why}")
    worlds = {strategy.world for _, strategy in found}
    if len(worlds) == 1 and plan.world not in worlds:
        why = f"world = {plan.world}, and all of its strategies are for {min(worlds)}"
        raise PlanFileError(path, why, "Plan for as many as you have")
    for where, strategy in found:
        try:
            strategy.check_world(plan.world)
        except FxparError as error:
            raise PlanFileError(path, f"{where}{error}") from error


def _group(number: int, limit: Any) -> str:
    """Names a group in errors: by its place, and by its limit if that is one."""
    return f"group {number} (limit {limit}): " if isinstance(limit, int) else f"group {number}: "


def _key(option: str) -> str:
    """What `key=value` sets."""
    return option.partition("=")[0].strip()


def _fields(cls: type) -> list[str]:
    return [one.name for one in fields(cls)]


def _values(path: str, cls: type, table: Mapping[str, Any], where: str, given: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of `cls` in a table, in their types. Raises PlanFileError."""
    hints = get_type_hints(cls)
    known = {one.name: one for one in fields(cls) if one.name not in given}
    for key in table:
        if key not in known:
            hint = nearest(key, known) or f"; there are {', '.join(known)}"
            raise PlanFileError(path, f"{where}key {key!r} is unknown{hint}")
    for name, one in known.items():
        if one.default is MISSING and name not in table:
            raise PlanFileError(path, f"{where}{name} is missing")
    return {key: _typed(path, f"{where}{key}", value, hints[key]) for key, value in table.items()}


def _typed(path: str, key: str, value: Any, hint: Any) -> Any:
    """A value as the annotation wants it: int, float, str or tuple[str, ...]."""
    words = {int: "a whole number from 0 on", float: "a number from 0 on", str: "a text"}
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool) and value >= 0
        fits = fits and value < float("inf")
    elif hint is str:
        fits = isinstance(value, str)
    else:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not fits:
        raise PlanFileError(path, f"{key} = {brief(value)} must be {words.get(hint, 'a list of texts')}")
    return tuple(value) if isinstance(value, list) else value


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}" if any(c in f"{value:.6g}" for c in ".e") else f"{value:.1f}"
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
