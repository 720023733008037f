"""A model, its data and its optimizer put together on this rank, and what a checkpoint holds of them."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpar.api import parallelize
from fxpar.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fxpar.checkpoint.weights import HF_CONFIG, HF_GENERATION, hf_config, hf_generation
from fxpar.data import MiniBatchLoader
from fxpar.errors import ResumeError
from fxpar.monitor import Monitor
from fxpar.runtime.ahead import DrawnAhead
from fxpar.runtime.drift import Drift
from fxpar.runtime.exact_experts import ExactExperts
from fxpar.runtime.options import cluster_here
from fxpar.runtime.report import Evaluated, StepReport
from fxpar.train.config import TrainConfig, described_cluster, token_budget
from fxpar.train.loop import Training
from fxpar.train.model import build_model, text_alone, weights_in, weights_of
from fxpar.train.optimize import changed_schedule, factor, make_optimizer, make_schedule
from fxpar.train.shared import compiled_tasks
from fxpar.train.task_source import TaskLoader, task_model, tasks_of
from fxpar.train.text import Prepared, held_out_sequences, make_loader, open_tokens
from fxpar.train.traces import StepTraces

TRAINED = "train"
"""Where a checkpoint's `extra` holds the globs of the parameters that were trained."""


@dataclass
class TrainSession:
    """Everything that training changes on this rank; `step` is the number of steps done, `changed` what a resumed run
    does otherwise than the one before, in one line. `trained` of the `parameters` are trained.
    """

    config: TrainConfig
    training: Training
    model: Any
    loader: MiniBatchLoader | TaskLoader
    batches: DrawnAhead  # of the loader
    parameters: int
    trained: int
    setup_s: float
    held_out: Any  # sequences, or by task its items
    exact: ExactExperts | None = None
    step: int = 0
    changed: str = ""

    def size(self) -> str:
        """`1,204 parameters, of which 32 are trained`."""
        part = f", of which {self.trained:,} are trained" if self.trained != self.parameters else ""
        return f"{self.parameters:,} parameters{part}"

    def save(self, step: int) -> Path:
        """Write a checkpoint. All ranks call it. Raises what `save_checkpoint` raises."""
        self.step = step
        extra = {
            "step": step,
            "steps": self.config.run.steps,
            "loader": self.batches.state_dict(),
            "engine": self.model.engine_state(),
            "exact_experts": [] if self.exact is None else self.exact.state(),
            "scheduler": scheduler_state(self.training.scheduler),
            "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            "model": self.config.model.name,
            TRAINED: self.config.model.train,
            "strategies": [list(pair) for pair in self.config.strategies],
            HF_CONFIG: hf_config(self.model),
            HF_GENERATION: hf_generation(self.model),
        }
        folder, keep = self.config.checkpoints, self.config.checkpoint.keep
        return save_checkpoint(folder, step, self.model, self.training.optimizer, extra, keep=keep)

    def validate(self, step: int) -> Evaluated | None:
        """Loss and metrics of the held-out documents if they are due after this step. All ranks call it."""
        every = self.config.data.validate_every
        due = step == self.config.run.steps or (every > 0 and step % every == 0)
        if not due or not self.held_out:
            return None
        found = self.model.evaluate(self.held_out)
        return _together(self.config, found) if self.config.tasks else found

    def release(self) -> None:
        """Give up model, gradients and optimizer states: another session needs the memory."""
        self.training = self.model = self.exact = None  # type: ignore[assignment]

    def resume(self) -> Path:
        """Continue from the latest checkpoint. All ranks call it. Raises ResumeError and what the parts raise."""
        path = latest(self.config)
        extra = load_checkpoint(path, self.model, self.training.optimizer)
        missing = {"step", "loader", "engine", "scheduler", "rng"} - set(extra)
        if missing:
            raise ResumeError(str(path), f"it was not written by `fxpar train` (it lacks {', '.join(sorted(missing))})")
        self.batches.load_state_dict(extra["loader"])
        self.model.load_engine_state(extra["engine"])
        groups = len(self.training.optimizer.param_groups)
        self.training.scheduler.load_state_dict({**extra["scheduler"], "lr_lambdas": [None] * groups})
        rng = bytearray(base64.b64decode(extra["rng"]))
        torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
        if self.exact is not None:
            self.exact.load_state(extra.get("exact_experts", []))
        self.step = int(extra["step"])
        check_steps_left(path, self.step, self.config)
        self._take_schedule(int(extra.get("steps", self.config.run.steps)))
        return path

    def _take_schedule(self, before: int) -> None:
        """The next step's learning rate is that of this run, where it has other steps than the one `before`."""
        config, rates = self.config, list(map(float, self.training.scheduler.base_lrs))
        self.changed = changed_schedule(config.schedule, before, config.run.steps, self.step, rates[0])
        if self.changed:
            at = factor(config.schedule, config.run.steps)(self.step)
            for group, rate in zip(self.training.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * at


def check_steps_left(checkpoint: Path, done: int, config: TrainConfig) -> None:
    """Raise ResumeError for a checkpoint that has all steps behind it."""
    steps = config.run.steps
    if done >= steps:
        why = f"it has done {done} steps, and run.steps is {steps}: nothing is left. Raise run.steps"
        raise ResumeError(str(checkpoint), why)


def latest(config: TrainConfig) -> Path:
    """The checkpoint that `--resume` takes. Raises ResumeError if there is none."""
    folder = config.checkpoints
    path = latest_checkpoint(folder) if folder.is_dir() else None
    if path is None:
        raise ResumeError(
            str(folder), "there is no complete checkpoint. Start without --resume, or set checkpoint.folder"
        )
    return path


def scheduler_state(scheduler: torch.optim.lr_scheduler.LRScheduler) -> dict[str, Any]:
    """The plain values of a scheduler's state; functions of the step come from the configuration again."""
    state = scheduler.state_dict()
    return {key: state[key] for key in ("last_epoch", "_step_count", "base_lrs") if key in state}


@dataclass(frozen=True)
class _Trained:
    """What is trained on what: a module, how `fxpar.parallelize` is told of its loss or its tasks, and the data."""

    module: nn.Module
    told: dict[str, Any]
    loader: MiniBatchLoader | TaskLoader
    held_out: Any


def _on_text(config: TrainConfig, prepared: Prepared, device: torch.device) -> _Trained:
    tokens, held_out = open_tokens(prepared, config.data.validation)
    loader = make_loader(tokens, config, prepared.vocab_size)
    loaded = build_model(config, prepared.vocab_size, prepared.tokenizer, device.type)
    told = {
        "loss": loaded.loss_fn,
        "order": config.engine.order,
        "initializer": loaded.initializer,
        "weights": weights_of(config, loaded),
        "record": config.run.report,
    }
    return _Trained(loaded.model, told, loader, held_out_sequences(held_out, config))


def _on_tasks(config: TrainConfig, device: torch.device) -> _Trained:
    """Raises as `compiled_tasks` does."""
    weights, loader, module, tasks = weights_in(config, None), TaskLoader(config), task_model(config), tasks_of(config)
    cluster = cluster_here(described_cluster(config.engine), config.world, device)
    compiled = compiled_tasks(config, module, tasks, cluster)
    tasks = {name: replace(task, compiled=compiled[name]) for name, task in tasks.items()}
    told = {"tasks": tasks, "weights": weights, "record": config.run.report}
    return _Trained(module, told, loader, loader.held_out())


def _together(config: TrainConfig, found: Mapping[str, Evaluated]) -> Evaluated:
    """The weighted sum of the means of tasks, with each of them and its metrics."""
    losses = {name: float(one) for name, one in found.items()}
    inner = {f"{name}/{key}": value for name, one in found.items() for key, value in one.metrics.items()}
    return Evaluated(sum(config.tasks[name].weight * loss for name, loss in losses.items()), {**losses, **inner})


def open_session(
    config: TrainConfig, prepared: Prepared, device: torch.device, monitor: Monitor | None = None
) -> TrainSession:
    """Build everything from its seeds. All ranks call it alike.

    Raises what the loaders of models and data and `fxpar.parallelize` raise.
    """
    begun = time.perf_counter()
    torch.manual_seed(config.run.seed)
    what = _on_tasks(config, device) if config.tasks else _on_text(config, prepared, device)
    on_meta = any(parameter.is_meta for parameter in what.module.parameters())
    count = sum(parameter.numel() for parameter in what.module.parameters())
    trained = sum(parameter.numel() for parameter in what.module.parameters() if parameter.requires_grad)
    engine = config.engine
    with text_alone(config.model.name):
        model: Any = parallelize(
            what.module if on_meta else what.module.to(device),
            strategies=dict(config.strategies) or None,
            token_budget=token_budget(engine, []),
            cluster=described_cluster(engine),
            memory_budget_bytes=engine.memory_budget_bytes,
            gradients=engine.gradients,
            merge=engine.merge,
            compile=engine.compile,
            checked=engine.checked,
            length_multiple=engine.length_multiple,
            precision=config.precision.compute,
            loss_scale=config.precision.loss_scale,
            deterministic=config.precision.deterministic,
            nan=config.run.nan,
            timeout_s=config.run.timeout_s,
            monitor=monitor if monitor is not None else False,
            seed=config.run.seed,
            **what.told,
        )
    optimizer = make_optimizer(model.parameters(), config.optimizer)
    scheduler = make_schedule(optimizer, config.schedule, config.run.steps)
    batches = model.plan_ahead(what.loader)
    training = Training(model, batches, optimizer, scheduler, config.optimizer.clip, config.run.nan)
    exact = ExactExperts(model, *config.plan.of_experts) if any(config.plan.of_experts) else None
    training.after_step = _Watch(model, config.plan.drift or 0.0, exact).after
    training.traces = StepTraces() if config.run.report else None
    return TrainSession(
        config,
        training,
        model,
        what.loader,
        batches,
        count,
        trained,
        time.perf_counter() - begun,
        what.held_out,
        exact,
    )


@dataclass
class _Watch:
    """What may run otherwise after a step."""

    model: Any
    share: float  # of the predicted time
    exact: ExactExperts | None
    drift: Drift | None = None

    def after(self, report: StepReport) -> str:
        changed = "" if self.exact is None else self.exact.after(report)
        if changed:
            self.drift = None  # it watched strategies that are gone
            return changed
        if self.share and self.drift is None:
            self.drift = self.model.fxpar_session.watch_drift(self.share)
        return self.drift.after(report) if self.drift is not None else ""


def static_config(config: TrainConfig, strategy: str) -> TrainConfig:
    """The same run under one strategy: own packing and own token budget, and no report."""
    engine = replace(config.engine, token_budget=None, token_budgets={}, order=None)
    strategies = ((config.strategies[-1][0], strategy),)
    run = replace(config.run, report=False)
    return replace(config, strategies=strategies, engine=engine, plan=replace(config.plan, drift=0.0), run=run)
