"""torchtitan alone: what a recipe needs on this torch, and where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpar.recipes import attention, cpu
from fxpar.recipes import torchtitan_api as titan


def prepare_host() -> None:
    """Give torchtitan what it lacks on this machine: functions of torch 2.14, a GPU. Doing so again is harmless."""
    titan.bridge_torch()
    if not torch.cuda.is_available():
        cpu.enable()


def stock(config: Any) -> Any:
    """A recipe for torchtitan alone: a copy with a backend that FSDP2 of this torch has, and on CPU dense attention."""
    prepare_host()
    parallelism, training, override = config.parallelism, config.training, config.override
    if not titan.has_spmd_types():
        parallelism = replace(parallelism, spmd_backend="partial_dtensor")
    if cpu.is_enabled():
        training = replace(training, disable_cuda_graphs=True)
        override = with_overrides(override, attention.FOR_STOCK_ON_CPU)
    return replace(config, parallelism=parallelism, training=training, override=override)


def with_overrides(override: Any, *paths: str) -> Any:
    """torchtitan's override settings with further ones, each once."""
    return replace(override, imports=[*override.imports, *(path for path in paths if path not in override.imports)])


__all__ = ["prepare_host", "stock", "with_overrides"]
