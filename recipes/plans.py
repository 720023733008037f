"""A plan of `fxpar plan` in the place of strategies and budgets of a recipe."""

from __future__ import annotations

import os
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes.torchtitan_api import logger
from fxpar.runtime.planned import parameters_of
from fxpar.search.plan_file import Plan, plan_of


def planned(
    recipe: Any, given: Plan | str | PathLike[str], settings: dict[str, Any]
) -> tuple[dict[int, str], dict[str, Any]]:
    """The strategies of a plan, and the settings with its budgets; a memory budget of the settings goes first.

    Raises UnsupportedRecipeError if the settings say what the plan says; PlanFileError for a plan that cannot be read,
    or is for another model or number of ranks.
    """
    said = [name for name in ("strategies", "token_budget", "token_budgets") if settings.pop(name, None) is not None]
    if said:
        why = "the plan says it already"
        raise UnsupportedRecipeError(said[0], why, f"Leave out {said[0]}=, or edit the plan")
    plan, path = plan_of(given)
    with torch.device("meta"):
        model = None if recipe.model_spec is None else recipe.model_spec.model.build()
    world = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None  # not of torchrun: a look at it
    plan.check_module(path, plan.parameters if model is None else parameters_of(model), world)
    settings["token_budgets"] = plan.token_budgets
    if plan.memory_budget_bytes and settings.get("memory_budget_gib") is None:
        settings["memory_budget_gib"] = plan.memory_budget_bytes / 2**30
    return plan.strategies, settings


def with_plan(config: Any) -> Any:
    """A configuration with the strategies and budgets of the file `fxpar.plan`, if it names one: it goes before
    `fxpar.strategies`, which a recipe has, and a line says so. Raises as `planned` does.
    """
    settings = config.fxpar
    if settings.plan is None or config.checkpoint.create_seed_checkpoint:  # that is made without strategies
        return config
    budgets = {name: getattr(settings, name) for name in ("token_budget", "token_budgets", "memory_budget_gib")}
    strategies, found = planned(config, settings.plan, budgets)
    if settings.strategies:
        logger.warning(f"[fxpar] fxpar.strategies are not used: {settings.plan} says strategies")
    return replace(config, fxpar=replace(settings, strategies=strategies, **found))


__all__ = ["planned", "with_plan"]
