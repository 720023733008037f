"""`to_fxpar`: any torchtitan recipe becomes one that trains with fxpar.

def my_recipe():
    return to_fxpar(llama3_8b(), strategies={2048: "dp8", 8192: "dp4.tp2+sp", 32768: "cp8"})

torchrun --nproc-per-node 8 -m torchtitan.train --module my_module --config my_recipe
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from fxpar.recipes import attention, cpu
from fxpar.recipes import torchtitan_api as titan
from fxpar.recipes.checks import check_options
from fxpar.recipes.trainer import FxparConfig, FxparTrainer


def to_fxpar(
    recipe: titan.Trainer.Config,
    *,
    strategies: Mapping[int, str] | None,
    **settings: Any,
) -> FxparTrainer.Config:
    """The recipe with `fxpar.strategies` and further settings of `FxparConfig`; the given one is left alone.

    `strategies` maps the longest sequence that a strategy takes to the strategy; None trains exactly as torchtitan
    does. All settings are fields of the result (`--fxpar.strategies`, ...). What changes with strategies: attention is
    `fxpar::attention`, the loss is not chunked (its kernel needs no copy of the logits), recomputation is what the
    strategies say (`+remat`) instead of `activation_checkpoint`, and torchtitan's own parallelism is not used: its
    degrees only say how many rows a step takes. Without a GPU torchtitan is told to train on CPU (`fxpar.recipes.cpu`).

    Raises UnsupportedRecipeError for an option of the recipe that fxpar does not support.
    """
    _prepare_host()
    config = FxparTrainer.Config(**{f.name: getattr(recipe, f.name) for f in fields(recipe)})
    config.fxpar = FxparConfig(strategies=None if strategies is None else dict(strategies), **settings)
    if strategies is None:
        return stock(config)
    check_options(config)
    imports = [*config.override.imports, *attention.FOR_FXPAR]
    loss = config.loss.loss_fn if isinstance(config.loss, titan.ChunkedLossWrapper.Config) else config.loss
    return replace(
        config,
        loss=loss,
        activation_checkpoint=None,
        training=replace(config.training, disable_cuda_graphs=True),
        override=replace(config.override, imports=imports),
    )


def stock(config: Any) -> Any:
    """A recipe for torchtitan alone, with what this torch and a CPU need."""
    _prepare_host()
    parallelism, training, override = config.parallelism, config.training, config.override
    if not titan.has_spmd_types():
        parallelism = replace(parallelism, spmd_backend="partial_dtensor")
    if cpu.is_enabled():
        training = replace(training, disable_cuda_graphs=True)
        if attention.FOR_STOCK_ON_CPU not in override.imports:
            override = replace(override, imports=[*override.imports, attention.FOR_STOCK_ON_CPU])
    return replace(config, parallelism=parallelism, training=training, override=override)


def _prepare_host() -> None:
    """What torchtitan lacks on this machine: functions of torch 2.14, a GPU."""
    titan.bridge_torch()
    if not torch.cuda.is_available():
        cpu.enable()


__all__ = ["stock", "to_fxpar"]
