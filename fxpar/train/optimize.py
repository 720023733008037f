"""Optimizer and learning-rate schedule from their sections, by torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fxpar.train.config import OptimizerConfig, ScheduleConfig

# One kernel for all parameters, by default: a loop calls DTensor a dozen times for each of them.
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}

CLASSES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Matrices get the weight decay; vectors (norms, biases) none, as is usual."""
    everything = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in everything if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in everything if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    auto = "foreach" if config.name == "sgd" else "fused"  # torch 2.13 has no rule for DTensors in fused SGD
    how: dict[str, Any] = {"lr": config.lr, **_IMPLEMENTATIONS[config.implementation.replace("auto", auto)]}
    own = {"momentum": config.momentum} if config.name == "sgd" else {"betas": config.betas, "eps": config.eps}
    return CLASSES[config.name](groups, **own, **how)


def make_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int) -> LRScheduler:
    """The learning rate of each of `steps` steps."""
    return LambdaLR(optimizer, factor(config, steps))


def changed_schedule(config: ScheduleConfig, before: int, steps: int, done: int, lr: float) -> str:
    """What it means that a run was planned for `before` steps, has done `done`, and is now to do `steps`: one line, or
    nothing if the learning rate stays as it was.
    """
    if before == steps or config.kind == "constant" or done >= steps:
        return ""
    old, new = lr * factor(config, before)(done), lr * factor(config, steps)(done)
    return (
        f"the {config.kind} schedule now ends at step {steps}, not {before}: "
        f"step {done + 1} runs with learning rate {new:.2e} instead of {old:.2e}"
    )


def factor(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Step (from 0) -> factor of the learning rate: (step+1)/warmup while warming up, `final` at the last step."""

    def at(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        if config.kind == "constant":
            return 1.0
        done = min(1.0, (step - config.warmup) / max(1, steps - 1 - config.warmup))
        left = 1.0 - done if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return config.final + (1.0 - config.final) * left

    return at
