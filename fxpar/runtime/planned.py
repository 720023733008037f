"""Who says the strategies of a model: the user, or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from fxpar.errors import ParallelizeError
from fxpar.ir.strategy import Strategy
from fxpar.runtime.options import ParallelizeOptions
from fxpar.search.plan_file import Plan, plan_of


def check_choice(options: ParallelizeOptions) -> None:
    """Raise ParallelizeError unless strategies are said once."""
    if options.plan is None and options.strategies is None:
        raise ParallelizeError(
            "strategies= is missing, such as strategies={512: 'dp2', 4096: 'cp2'}; or plan=, a file of `fxpar plan`"
        )
    if options.plan is None:
        return
    for name in ("strategies", "token_budget"):
        if getattr(options, name) is not None:
            raise ParallelizeError(f"plan= says {name} already: leave out {name}=, or edit the plan")


def chosen(module: nn.Module, options: ParallelizeOptions) -> tuple[Mapping[int, Strategy | str], ParallelizeOptions]:
    """The strategies, and the options with what a plan says of budgets; a memory budget of the options goes first.

    Raises ParallelizeError, and PlanFileError for a plan that cannot be read or is not for this model and world.
    """
    check_choice(options)
    if options.plan is None:
        assert options.strategies is not None
        return options.strategies, options
    plan, path = plan_of(options.plan)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    plan.check_module(path, parameters_of(module), world)
    return plan.strategies, with_budgets(options, plan)


def with_budgets(options: ParallelizeOptions, plan: Plan) -> ParallelizeOptions:
    """The options with the plan's budgets, and the plan itself, whoever asks for it later."""
    memory = options.memory_budget_bytes or plan.memory_budget_bytes or None
    return replace(options, plan=plan, token_budget=plan.token_budgets, memory_budget_bytes=memory)


def parameters_of(module: nn.Module) -> int:
    """Numbers in all of its parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
