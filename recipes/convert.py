"""`to_fxpar`: any torchtitan recipe becomes one that trains with fxpar.

def my_recipe():
    return to_fxpar(llama3_8b(), strategies={2048: "dp8", 8192: "dp4.tp2+sp", 32768: "cp8"})

torchrun --nproc-per-node 8 -m torchtitan.train --module my_module --config my_recipe

For a trainer of your own: `class Mine(FxparMixin, YourTrainer)`, and `to_fxpar(recipe, trainer=Mine, strategies=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import check_options, check_trainer
from fxpar.recipes.plans import planned
from fxpar.recipes.stock import prepare_host
from fxpar.recipes.trainer import FxparConfig, FxparMixin, FxparTrainer
from fxpar.search.plan_file import Plan


def to_fxpar(
    recipe: titan.Trainer.Config,
    *,
    strategies: Mapping[int, str] | None = None,
    plan: Plan | str | PathLike[str] | None = None,
    trainer: type[FxparMixin] | None = None,
    **settings: Any,
) -> Any:
    """The recipe with `fxpar.strategies` and further settings of `FxparConfig`; the given one is left alone.

    `strategies` maps the longest sequence that a strategy takes to the strategy; None trains exactly as torchtitan
    does. A `plan` (a file that `fxpar plan` wrote, or a `Plan`) says strategies, token budgets and the memory budget
    instead; a `memory_budget_gib` that is given goes first.

    All settings are fields of the result (`--fxpar.strategies`, ...). What changes with strategies, when the
    trainer is built: attention is `fxpar::attention`, the loss is not chunked (its kernel needs no copy of the logits),
    recomputation is what the strategies say (`+remat`) instead of `activation_checkpoint`, and torchtitan's own
    parallelism is not used: its degrees only say how many rows a step takes. Without a GPU torchtitan is told to train
    on CPU (`fxpar.recipes.cpu`).

    The result is a `FxparTrainer.Config`, or that of the `trainer`, a class with FxparMixin; a recipe of such a class
    stays one of it.

    Raises UnsupportedRecipeError for an option of the recipe that fxpar does not support, and for one that is made for
    another trainer; PlanFileError for a plan that cannot be read, or is for another model or number of ranks.
    """
    trainer = _trainer(recipe, trainer)
    prepare_host()
    if plan is not None:
        strategies, settings = planned(recipe, plan, {"strategies": strategies, **settings})
    config: Any = trainer.Config(**{f.name: getattr(recipe, f.name) for f in fields(recipe)})
    config.fxpar = FxparConfig(strategies=None if strategies is None else dict(strategies), **settings)
    if strategies is not None:
        check_trainer(trainer, FxparMixin)
        check_options(config)
    return config


def _trainer(recipe: Any, given: type[FxparMixin] | None) -> type[FxparMixin]:
    """Who trains: settings of another trainer, and what it does in its steps, would be lost without a word."""
    owner = getattr(type(recipe), "_owner", None) or type(recipe)
    has_mixin = issubclass(owner, FxparMixin)
    trainer: Any = given or (owner if has_mixin else FxparTrainer)
    if not (isinstance(trainer, type) and issubclass(trainer, FxparMixin) and trainer is not FxparMixin):
        raise UnsupportedRecipeError(
            "trainer",
            f"{getattr(trainer, '__name__', trainer)} is not a trainer made with FxparMixin",
            f"Write class Mine(FxparMixin, {owner.__name__}), and trainer=Mine",
        )
    known = {f.name for f in fields(trainer.Config)}
    own = [f.name for f in fields(recipe) if f.name not in known]
    if not own and (owner in (titan.Trainer, FxparTrainer) or issubclass(trainer, owner)):
        return trainer
    wanted = "torchtitan's Trainer" if given is None else given.__name__
    raise UnsupportedRecipeError(
        ", ".join(own) or "(the whole)",
        f"the recipe is made for {owner.__name__}, not for {wanted}",
        "Use a recipe that returns a Trainer.Config (without torchft a run resumes on another number of ranks too), or "
        f"write class Mine(FxparMixin, {owner.__name__}), and trainer=Mine",
    )


__all__ = ["to_fxpar"]
