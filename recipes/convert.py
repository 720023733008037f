"""`to_fxpar`: any torchtitan recipe becomes one that trains with fxpar.

def my_recipe():
    return to_fxpar(llama3_8b(), strategies={2048: "dp8", 8192: "dp4.tp2+sp", 32768: "cp8"})

torchrun --nproc-per-node 8 -m torchtitan.train --module my_module --config my_recipe
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fxpar.errors import UnsupportedRecipeError
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import check_options
from fxpar.recipes.stock import prepare_host
from fxpar.recipes.trainer import FxparConfig, FxparTrainer


def to_fxpar(
    recipe: titan.Trainer.Config,
    *,
    strategies: Mapping[int, str] | None,
    **settings: Any,
) -> FxparTrainer.Config:
    """The recipe with `fxpar.strategies` and further settings of `FxparConfig`; the given one is left alone.

    `strategies` maps the longest sequence that a strategy takes to the strategy; None trains exactly as torchtitan
    does. All settings are fields of the result (`--fxpar.strategies`, ...). What changes with strategies, when the
    trainer is built: attention is `fxpar::attention`, the loss is not chunked (its kernel needs no copy of the logits),
    recomputation is what the strategies say (`+remat`) instead of `activation_checkpoint`, and torchtitan's own
    parallelism is not used: its degrees only say how many rows a step takes. Without a GPU torchtitan is told to train
    on CPU (`fxpar.recipes.cpu`).

    Raises UnsupportedRecipeError for an option of the recipe that fxpar does not support, and for one that is made for
    another trainer.
    """
    _check_trainer(recipe)
    prepare_host()
    config = FxparTrainer.Config(**{f.name: getattr(recipe, f.name) for f in fields(recipe)})
    config.fxpar = FxparConfig(strategies=None if strategies is None else dict(strategies), **settings)
    if strategies is not None:
        check_options(config)
    return config


def _check_trainer(recipe: Any) -> None:
    """Settings of another trainer, and what it does in its steps, would be lost without a word."""
    if type(recipe) in (titan.Trainer.Config, FxparTrainer.Config):
        return
    owner = getattr(type(recipe), "_owner", None)
    name = owner.__name__ if owner is not None else type(recipe).__qualname__
    known = {f.name for f in fields(FxparTrainer.Config)}
    own = ", ".join(f.name for f in fields(recipe) if f.name not in known)
    raise UnsupportedRecipeError(
        own or "(the whole)",
        f"the recipe is made for {name}, not for torchtitan's Trainer",
        "Use a recipe that returns a Trainer.Config; without torchft a run resumes on another number of ranks too",
    )


__all__ = ["to_fxpar"]
