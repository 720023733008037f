"""The training loop: mini-batch, engine, clip, optimizer, schedule, record. It knows neither files nor screens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fxpar.errors import GradientNormError
from fxpar.runtime.report import Evaluated
from fxpar.train.alone import MINI_BATCHES
from fxpar.train.records import GroupRecord, StepRecord
from fxpar.train.traces import StepTraces


class Trained(Protocol):
    """What the loop needs of a model made by `fxpar.parallelize`."""

    def train_step(self, sequences: Any) -> Any: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


@dataclass
class Training:
    """Everything that one step changes. `batches` yields mini-batches: lists of 1-D int64 tensors, or of tasks by their
    names lists of items. `after_step(report)`
    is called on all ranks; it returns in one line what it changed, or nothing.
    """

    model: Trained
    batches: Iterator[Any]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    clip: float = 0.0
    nan: str = "error"
    after_step: Callable[[Any], str] = lambda report: ""
    traces: StepTraces | None = None
    recent: deque[list[int]] = field(default_factory=lambda: deque(maxlen=MINI_BATCHES))  # lengths, of one loss


@dataclass(frozen=True)
class Hooks:
    """What happens around a step.

    `sync(cpu_s, wall_s)` is called before the first step and after each with this rank's CPU and wall seconds; it
    returns whether to stop, and the sums over all ranks: the same on all of them. `validate(step)` returns the loss of
    held-out sequences with its metrics, or None if it is not due. `phase` says what is about to happen (for the other
    ranks' error messages).
    """

    done: Callable[[StepRecord], None]
    sync: Callable[[float, float], tuple[bool, float, float]] = lambda cpu_s, wall_s: (False, cpu_s, wall_s)
    save: Callable[[int], None] = lambda step: None
    phase: Callable[[str], object] = lambda text: None
    validate: Callable[[int], Evaluated | None] = lambda step: None


def run_steps(training: Training, first: int, steps: int, every: int, hooks: Hooks) -> bool:
    """Steps `first`+1 to `steps`; saves after each `every`-th (0: none) and after the last. True if stopped early.

    A run that is stopped saves too, unless no step was done. Raises GradientNormError and what `train_step` raises.
    """
    if hooks.sync(0.0, 0.0)[0]:
        return True
    for step in range(first + 1, steps + 1):
        hooks.phase(f"step {step}")
        record = one_step(training, step)
        stop, cpu_s, wall_s = hooks.sync(record.cpu_s, record.wall_s)
        if training.traces is not None:
            training.traces.choose(wall_s)
        record = replace(record, cpu_s=cpu_s)
        if stop or step == steps or (every and step % every == 0):  # before anything else can fail
            hooks.phase(f"step {step}, saving a checkpoint")
            hooks.save(step)
            hooks.phase(f"step {step}")
        held_out = hooks.validate(step)
        if held_out is not None:
            record = replace(record, validation_loss=float(held_out), validation_metrics=held_out.metrics)
        hooks.done(record)
        if stop:
            return step < steps
    return False


def one_step(training: Training, step: int) -> StepRecord:
    """One mini-batch and one optimizer step."""
    begun, cpu_begun = time.perf_counter(), time.process_time()
    sequences = next(training.batches)
    if isinstance(sequences, list):
        training.recent.append([len(one) for one in sequences])
    lr = float(training.optimizer.param_groups[0]["lr"])
    engine_begun = time.perf_counter()
    report = training.model.train_step(sequences)
    optimizer_begun = time.perf_counter()
    norm, skipped = None, bool(report.skipped)
    if not skipped:
        norm = gradient_norm(training)
        if norm is not None and not math.isfinite(norm):
            if training.nan == "error":
                raise GradientNormError(norm, step)
            skipped = True
    if skipped:
        training.optimizer.zero_grad()  # without gradients the optimizer leaves weights and its state as they are
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    ended = time.perf_counter()
    replanned = training.after_step(report)
    if training.traces is not None:
        training.traces.take(step, report.trace, (optimizer_begun - engine_begun) * 1e3, (ended - engine_begun) * 1e3)
    return StepRecord(
        step=step,
        loss=float(report.loss),
        sequences=report.sequences,
        tokens=report.tokens,
        valid_tokens=report.valid_tokens,
        lr=lr,
        grad_norm=norm,
        skipped=skipped,
        wall_s=ended - begun,
        cpu_s=time.process_time() - cpu_begun,
        engine_s=optimizer_begun - engine_begun,
        optimizer_s=ended - optimizer_begun,
        groups=tuple(GroupRecord.of(group) for group in report.groups),
        merged=report.merged,
        rides=report.rides,
        predicted_s=report.predicted_s,
        replanned=replanned,
        metrics=report.metrics,
        tasks={name: float(one.loss) for name, one in report.tasks.items()},
        experts={load.module: load.figures() for load in report.experts},
    )


def gradient_norm(training: Training) -> float | None:
    """Norm of all gradients before they are clipped; None without clipping."""
    if not training.clip:
        return None
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
    whole = getattr(norm, "full_tensor", None)
    return float(norm if whole is None else whole())
