"""`pkg.module:function` and `file.py:function`: a user's function that returns a model and what belongs to it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import ModelFunctionError, nearest
from fxpar.models.loaded import LoadedModel, cast_batch
from fxpar.models.options import with_arguments

_WANTED = "(model, loss_fn, example_batch), or a dict with these keys and, if you like, 'batches'"


def load_function(spec: str, given: Mapping[str, str], *, dtype: torch.dtype, device: str, seed: int) -> LoadedModel:
    """Call the function with `given` as keyword arguments (typed by its defaults).

    Parameters and floating-point batch tensors are cast to `dtype`. Raises ModelFunctionError, ModelOptionError.
    """
    place, _, name = spec.rpartition(":")
    function = find_function(spec, place, name)
    arguments = with_arguments(given, inspect.signature(function), spec)
    model, loss_fn, *batches = unpack(spec, call(spec, function, arguments, device, seed))
    has_values = not any(value.is_meta for batch in batches for value in batch.values())
    example, *others = (_on_cpu(cast_batch(batch, dtype)) for batch in batches)
    name = f"{Path(place).name if place.endswith('.py') else place}:{name}"  # as it was asked for, without its folder
    return LoadedModel(name, model.to(dtype), loss_fn, example, tuple(others) or (example,), has_values)


def load_module(spec: str, given: Mapping[str, str], *, dtype: torch.dtype, device: str, seed: int) -> nn.Module:
    """The model of a function that returns one alone, or what `load_function` takes: of tasks, whose losses are their
    own. Raises as `load_function` does.
    """
    place, _, name = spec.rpartition(":")
    function = find_function(spec, place, name)
    found = call(spec, function, with_arguments(given, inspect.signature(function), spec), device, seed)
    return (found if isinstance(found, nn.Module) else unpack(spec, found)[0]).to(dtype)


def arguments_of(spec: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What the function is called with for the texts `given`, its defaults included. Raises ModelFunctionError,
    ModelOptionError.
    """
    place, _, name = spec.rpartition(":")
    signature = inspect.signature(find_function(spec, place, name))
    known = {key: one.default for key, one in signature.parameters.items() if one.default is not one.empty}
    return known | with_arguments(given, signature, spec)


def find_function(spec: str, place: str, name: str) -> Callable[..., Any]:
    """The attribute `name` of the file or module `place`. Raises ModelFunctionError."""
    if not place or not name:
        raise ModelFunctionError(spec, "write a module or a file, and a function in it: pkg.module:FUNCTION")
    module = _from_file(spec, Path(place)) if place.endswith(".py") else _from_module(spec, place)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelFunctionError(spec, f"{place} has no function {name!r}{nearest(name, known)}")
    if not callable(function):
        raise ModelFunctionError(spec, f"{name!r} is {type(function).__name__}, not a function")
    return function


def call(spec: str, function: Callable[..., Any], arguments: dict[str, Any], device: str, seed: int) -> Any:
    """What the function returns; on "meta" it allocates nothing, unless it looks at values: then it runs on the CPU.

    Raises ModelFunctionError.
    """
    for place in ("meta", "cpu") if device == "meta" else ("cpu",):
        try:
            with torch.random.fork_rng(devices=[]), torch.device(place), warnings.catch_warnings():
                # On "meta" nothing is loaded, and torch says so once for each parameter.
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter .* to a meta parameter")
                torch.manual_seed(seed)
                return function(**arguments)
        except Exception as error:
            if place == "cpu":
                raise ModelFunctionError(spec, f"the function raised {type(error).__name__}: {error}") from error
    raise AssertionError("unreachable")


def unpack(spec: str, result: Any) -> tuple[nn.Module, Callable, *tuple[Mapping[str, Tensor], ...]]:
    """Model, loss function, example and batches out of what the function returned. Raises ModelFunctionError."""
    if isinstance(result, Mapping):
        missing = [key for key in ("model", "loss_fn", "example_batch") if key not in result]
        if missing:
            raise ModelFunctionError(spec, f"the dict it returned has no {missing[0]!r}; it must return {_WANTED}")
        parts = (result["model"], result["loss_fn"], result["example_batch"])
        others = tuple(result.get("batches", ()))
    elif isinstance(result, tuple) and len(result) == 3:
        parts, others = result, ()
    else:
        length = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise ModelFunctionError(spec, f"it returned {type(result).__name__}{length}; it must return {_WANTED}")
    model, loss_fn, example = parts
    if not isinstance(model, nn.Module):
        raise ModelFunctionError(spec, f"the model it returned is {type(model).__name__}, not a torch.nn.Module")
    if not callable(loss_fn):
        raise ModelFunctionError(spec, f"the loss function it returned is {type(loss_fn).__name__}; it is not callable")
    return model, loss_fn, *(_as_dict(spec, batch) for batch in (example, *others))


def _as_dict(spec: str, batch: Any) -> Mapping[str, Tensor]:
    if not isinstance(batch, Mapping):
        raise ModelFunctionError(spec, f"a batch it returned is {type(batch).__name__}, not a dict of tensors")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ModelFunctionError(
                spec, f"a batch it returned has {key!r} of type {type(value).__name__}, not a tensor"
            )
    return batch


def _on_cpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: torch.zeros_like(v, device="cpu") if v.is_meta else v for k, v in batch.items()}


def _from_file(spec: str, path: Path) -> ModuleType:
    if not os.path.isfile(path):  # as it is for a name that is too long for a file
        raise ModelFunctionError(spec, f"there is no file {str(path)!r}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a program: it may import modules beside it
    try:
        return run_file(path.resolve(), path.read_bytes())
    except Exception as error:
        raise ModelFunctionError(spec, f"the file does not run: {type(error).__name__}: {error}") from error


@functools.cache
def run_file(path: Path, _content: bytes) -> ModuleType:
    """The module of a file; run once while its content stays, as it may register ops and rules."""
    name = f"fxpar_model_file_{path.stem}"  # of its own: a module of this name may be imported too
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


def _from_module(spec: str, name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does: modules of the current folder are found
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelFunctionError(spec, f"cannot import {name!r}: {error}") from error
    finally:
        sys.path.remove("")
