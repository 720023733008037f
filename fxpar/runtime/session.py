"""Everything behind a parallel module on this rank; `fxpar.runtime.opening` puts it together."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fxpar.batching import BatchPlan, LengthGroup
from fxpar.batching.collate import are_inputs_again
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ParallelizeError, TaskBatchError, warn
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.losses import causal_lm, what_is_called
from fxpar.monitor import Monitor
from fxpar.runtime.attributes import PlainAttribute
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.drift import Drift
from fxpar.runtime.engine import Engine, Given, Replanned
from fxpar.runtime.evaluate import Evaluation
from fxpar.runtime.options import ParallelizeOptions
from fxpar.runtime.report import Evaluated, StepReport, merged_text
from fxpar.runtime.step import heard_by_all, step
from fxpar.runtime.storage import activation_bytes
from fxpar.runtime.task import CompiledModel, Task, batches_of, denominators_of
from fxpar.store import MemoryReport
from fxpar.store.weights import WeightStore
from fxpar.torch_api.hooks import hooked_modules
from fxpar.transport.groups import ProcessGroups

LOGGER = logging.getLogger("fxpar")


@dataclass(frozen=True)
class Ground:
    """What a session stands on: what stays when its tasks change."""

    process_groups: ProcessGroups
    world_group: Any
    cluster: ClusterSpec
    watcher: Monitor | None


@dataclass(frozen=True)
class SessionTask:
    """One loss of a session: what it was given as, what it became, what runs and evaluates it."""

    task: Task
    compiled: CompiledModel
    engine: Engine
    evaluation: Evaluation


@dataclass
class Session:
    """The state of a parallel module on this rank. `tasks` by name; one loss alone has no name."""

    tasks: Mapping[str, SessionTask]
    store: WeightStore
    planned_memory: MemoryReport  # without a budget nobody has asked for activations
    options: ParallelizeOptions
    calls: PlainCalls
    ground: Ground
    hooks: dict[str, int] | None  # of modules, at the capture; None once a user was told
    attributes: list[PlainAttribute]  # as they were at the capture, but for those of which a user was told
    labels_seen: bool = False  # whether there was a mini-batch
    scale_told: set[str] = field(default_factory=set)  # tasks
    logged: set[str] = field(default_factory=set)  # of what joined other groups, each once

    @property
    def first(self) -> SessionTask:
        """The loss, if there is one alone. What tasks share (storage, steps, ranks) is that of any."""
        return next(iter(self.tasks.values()))

    @property
    def engine(self) -> Engine:
        return self.first.engine

    @property
    def evaluation(self) -> Evaluation:
        return self.first.evaluation

    @property
    def compiled(self) -> CompiledModel:
        return self.first.compiled

    @property
    def programs(self) -> Mapping[str, TrainGraph]:
        """Of all tasks, by the names of their strategies."""
        return {name: program for one in self.tasks.values() for name, program in one.compiled.programs.items()}

    @cached_property
    def memory(self) -> MemoryReport:
        """Bytes on the fullest rank, with activations as this rank predicts them."""
        if self.options.memory_budget_bytes is not None:
            return self.planned_memory
        needed = max(self._activations(one.engine, one.engine.groups) for one in self.tasks.values())
        return replace(self.planned_memory, activation_bytes=needed)

    def _activations(self, engine: Engine, groups: Sequence[LengthGroup]) -> int:
        programs = [self.programs[name] for name in engine.names]
        return activation_bytes(programs, groups, engine.options.packed, engine.options.lengths)

    def kept(self, name: str, task: Task) -> Task:
        """A task with what it became in this session, if it is the same but for its weight."""
        known = self.tasks.get(name)
        if known is None or task.compiled is not None or not known.task.is_alike(task):
            return task
        programs = {each.removeprefix(f"{name}: "): one for each, one in known.compiled.programs.items()}
        return replace(task, compiled=replace(known.compiled, programs=programs))

    def _given(self, batches: Any, denominator: float | Mapping[str, float] | None) -> list[Given]:
        """What each engine is given: of one loss the mini-batch; of tasks those that have one, in the order of tasks.

        Raises TaskBatchError, on all ranks or with BatchMismatchError on the others.
        """
        if self.options.tasks is None:
            return [Given(self.engine, batches, denominator)]  # type: ignore[arg-type]
        try:
            found = batches_of(batches, self.tasks)
            by_task = denominators_of(denominator, found, self.tasks)
        except TaskBatchError as error:
            heard_by_all(self.engine, str(error))
            raise
        rescaled = 1.0
        if self.options.absent_tasks == "rescale":
            rescaled = math.fsum(one.task.weight for one in self.tasks.values()) / math.fsum(
                self.tasks[name].task.weight for name in found
            )
        return [
            Given(self.tasks[name].engine, found[name], by_task.get(name), self.tasks[name].task.weight * rescaled)
            for name in self.tasks
            if name in found
        ]

    def plan(self, batches: Any) -> BatchPlan | dict[str, BatchPlan]:
        """What `train_step` would run."""
        if self.options.tasks is None:
            return self.engine.plan(batches)
        found = batches_of(batches, self.tasks)
        return {name: one.engine.plan(found[name]) for name, one in self.tasks.items() if name in found}

    def begin_plan(self, batches: Any) -> None:
        """Make the plan of these in a thread, for the `train_step` that is given them; those of tasks are made in
        their step.
        """
        if self.options.tasks is None:
            self.engine.begin_plan(batches)

    def train_step(
        self, module: nn.Module, batches: Any, denominator: float | Mapping[str, float] | None = None
    ) -> StepReport:
        """One mini-batch; buffers that the forward changes are written back to the module."""
        self.store.check_adopted(module, trained=True)
        self._warn_of_hooks(module)
        self._warn_of_changes()
        buffers = dict(module.named_buffers(remove_duplicate=False))
        before = dict(buffers)
        given = self._given(batches, denominator)
        report = step(given, buffers)
        for one in self.tasks.values():
            one.engine.steps = report.step  # of tasks without a batch too
        if not report.skipped:
            with torch.no_grad():
                for fqn, value in buffers.items():
                    if value is not before[fqn]:
                        before[fqn].copy_(value)
        self.log_merged(report)
        if self.options.tasks is None:
            self._warn_of_labels(batches)
        for each in given:
            self._warn_of_scale(each, report.tasks.get(each.engine.task, report).valid_tokens)
        return report

    def log_merged(self, report: StepReport) -> None:
        """Once on rank 0, each group that has joined another one: its strategy does not run."""
        for name, one in (report.tasks or {"": report}).items():
            for pair in one.merged if self.store.rank == 0 else ():
                text = f"{name}: " * bool(name) + merged_text(*pair)
                if text not in self.logged:
                    self.logged.add(text)
                    LOGGER.info("%s (first in step %d)", text, report.step)

    def _warn_of_labels(self, sequences: Sequence[Any]) -> None:
        """Once, of labels in the first mini-batch that a language model would learn to copy."""
        loss = what_is_called(self.evaluation.loss)
        if not self.labels_seen and loss is causal_lm and are_inputs_again(sequences):
            warn(
                "each label of this mini-batch is the token at its own place, so the model learns to copy its input: "
                "losses.causal_lm does not shift labels, unlike models of Hugging Face. Give labels[t] = the token at "
                "t + 1 (fxpar.losses.next_token_labels makes them), or no labels: train_step makes these itself"
            )
        self.labels_seen = True

    def _warn_of_scale(self, given: Given, valid: int) -> None:
        """Once of each task, of a mean over all tokens where some of a mini-batch have no label: fxpar does not divide
        by these.
        """
        name = given.engine.task
        one = self.tasks[name]
        mean = one.evaluation.averaged
        if mean is None or mean.fewer is None or given.denominator is not None or name in self.scale_told:
            return
        numbers = given.engine.reading.averaged(given.sequences, mean.fewer, one.task.example)
        if numbers != valid:
            self.scale_told.add(name)
            warn(
                f"{f'task {name!r}: ' if name else ''}the loss is {mean.words}, a mean over tokens that also divides "
                f"by those whose label is -100: in this mini-batch by {numbers}, where fxpar takes the sum and "
                f"divides by the {valid} valid tokens. So loss and gradients have another scale than on one device: "
                "pass train_step(denominator=...), or return the sum times a factor of your own"
            )

    def _warn_of_hooks(self, module: nn.Module) -> None:
        """Once, of hooks that came after the capture: a step runs the captured graph, in which they are not."""
        if self.hooks is not None:
            new = [fqn for fqn, count in hooked_modules(module).items() if count > self.hooks.get(fqn, 0)]
            if new:
                where = f"module {new[0]!r}" if new[0] else "the model"
                self.hooks = None
                warn(
                    f"{where} has a hook on its forward or backward that came after fxpar.parallelize: train_step runs "
                    "what was captured and does not call it (plain calls and evaluate may). Register it before"
                )

    def _warn_of_changes(self) -> None:
        """Once per attribute of a module that has another value than the captured graphs."""
        changed = [one for one in self.attributes if one.changed()]
        if changed:
            self.attributes = [one for one in self.attributes if not one.changed()]
        for one in changed:
            where = f"module {one.fqn!r}" if one.fqn else "the model"
            now = f"{one.now[one.name]!r} now" if one.name in one.now else "not there now"
            warn(
                f"{one.name} of {where} was {one.value!r} when it was captured, and is {now}: what was captured goes "
                f"on with {one.value!r}. Make it a buffer or a key of the batch, or parallelize a new model"
            )

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`module(...)` under the plain strategy."""
        self.store.check_adopted(module, trained=False)
        self._warn_of_changes()
        with self.engine.watched("a plain call"):
            return self.calls.call(module, args, kwargs)

    def evaluate(
        self, module: nn.Module, batches: Any, denominator: float | Mapping[str, float] | None = None
    ) -> Evaluated | dict[str, Evaluated]:
        """Mean loss and metrics without training; of tasks those of each that has something."""
        self.store.check_adopted(module, trained=False)
        self._warn_of_changes()
        with self.engine.watched("evaluation"):
            if self.options.tasks is None:
                return self.evaluation.run(module, batches, denominator)  # type: ignore[arg-type]
            given = self._given(batches, denominator)
            heard_by_all(self.engine, f"evaluate {[one.engine.task for one in given]}")
            return {
                one.engine.task: self.tasks[one.engine.task].evaluation.run(module, one.sequences, one.denominator)
                for one in given
            }

    def state(self) -> dict[str, Any]:
        scaler = self.engine.scaler
        found: dict[str, Any] = {"steps": self.engine.steps, "seed": self.options.seed}
        if self.engine.replanned is not None:
            found["replanned"] = {"strategies": list(self.engine.names), **asdict(self.engine.replanned)}
        return found if scaler is None else {**found, "loss_scaler": scaler.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "steps" not in state:
            raise ParallelizeError("load_engine_state was not given what engine_state() returned")
        try:
            steps = int(state["steps"])
        except (TypeError, ValueError) as error:
            raise _not_a_state(error) from error
        for one in self.tasks.values():
            one.engine.steps = steps
        self._take_replanned(state.get("replanned"))
        if self.engine.scaler is not None and "loss_scaler" in state:
            self.engine.scaler.load_state(state["loss_scaler"])

    def _take_replanned(self, state: Any) -> None:
        """What an earlier run planned with, if it had the same strategies for the same longest sequences, and where
        this run has as much memory.
        """
        if state is None:
            return
        try:
            limits, factors = tuple(map(int, state["limits"])), tuple(map(float, state["factors"]))
            found = Replanned(limits, factors, float(state["borders"]))
            same = list(state["strategies"]) == list(self.engine.names)
        except (KeyError, TypeError, ValueError) as error:
            raise _not_a_state(error) from error
        ascending = bool(limits) and limits[0] >= 1 and list(limits) == sorted(limits)
        if not (ascending and len(factors) == len(limits) and all(0 < x < math.inf for x in (*factors, found.borders))):
            raise _not_a_state(found)
        if not same or limits[-1] != self.engine.opened[-1].limit:
            warn("limits and costs of the re-planned earlier run are not taken: it had other strategies")
        elif not self.watch_drift(0.0).may(limits):
            each = ", ".join(map(str, limits))
            why = "micro-batches of this run hold fewer tokens, or its memory is smaller"
            warn(f"limits {each} and costs of the re-planned earlier run are not taken: {why}")
        else:
            self.engine.replan(found)

    def watch_drift(self, share: float) -> Drift:
        """What is to be called after each step. Groups whose limits rise must do with the memory that there is."""
        engine, needed = self.engine, partial(self._activations, self.engine)
        return Drift(engine, share, lambda groups: needed(groups) <= needed(engine.opened))


def _not_a_state(found: object) -> ParallelizeError:
    return ParallelizeError(f"load_engine_state was not given what engine_state() returned ({found!r})")
