"""Loaders by prefix: what a MODEL such as `hf:qwen3` is handed to. Other packages add some through `fxpar.models`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from fxpar.errors import ModelFunctionError, UnknownModelError
from fxpar.ir.registry import Registry
from fxpar.models.loaded import LoadedModel


class Loader(Protocol):
    """`loader(name, options, ...)` is called for MODEL `prefix:name`."""

    def __call__(
        self,
        name: str,
        given: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: str,
        seed: int,
        tokens: Sequence[int] | None,
        noise: bool,
    ) -> LoadedModel:
        """The model called `name` in `dtype`, its weights and batches drawn from `seed`.

        `given` are options as texts (`--set key=value`; ModelOptionError for what it does not take). On device "meta"
        no weight is allocated. `tokens` are lengths of the micro-batches, None for its own. With `noise`, every
        parameter is to be random, so that errors of a check show (`fxpar.models.loaded.perturb`); a model to train
        wants none.
        """
        ...


def _unknown(prefix: str, known: Iterable[str]) -> UnknownModelError:
    return UnknownModelError(f"{prefix}:", [f"{name}:" for name in known], "")


LOADERS = Registry("model prefix", "fxpar.models", {"hf": "fxpar.models.huggingface:load_hf"}, _unknown)


def prefix_of(spec: str) -> str | None:
    """The prefix of a MODEL that a loader takes; None for any other, such as a function or a file.

    A prefix wins over a module of the same name. Raises DuplicateNameError.
    """
    prefix, colon, _ = spec.partition(":")
    return prefix if colon and prefix in LOADERS.available() else None


def is_function(spec: str) -> bool:
    """Whether a MODEL is a Python function (`pkg.module:function`, `file.py:function`): it is imported and called."""
    return ":" in spec and prefix_of(spec) is None


def loader_of(prefix: str) -> Loader:
    """The loader of a prefix. Raises UnknownModelError, DuplicateNameError, EntryLoadError."""
    return LOADERS.get(prefix)


def check_loaded(spec: str, found: object) -> LoadedModel:
    """Raise ModelFunctionError unless a loader returned what a loader returns."""
    if not isinstance(found, LoadedModel):
        raise ModelFunctionError(spec, f"its loader returned {type(found).__name__}, not a fxpar.models.LoadedModel")
    return found
