"""What a checkpoint holds of a model and an optimizer: tensors by parameter name, and plain values beside them.

`torch.distributed.checkpoint.state_dict.get_state_dict` does the same but first steps an optimizer that has no state
yet (its step counters then start at 1), fails on parameters that never got a gradient, and saves tied weights once per
name; a resumed run would not equal the uninterrupted one. The names in the files are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.checkpoint.plain import PlainValueError, encode
from fxpar.errors import CheckpointValueError

# Parts of a name that torch.compile and activation checkpointing put there: a model loads with and without them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# How an optimizer computes, not what: the optimizer of the resumed run keeps its own choice.
IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")


def clean_name(name: str) -> str:
    """The FQN of a state dict key without the parts of wrappers."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


@dataclass
class ModelState:
    """A model's state: each tensor once (tied weights under their first name), and what is no tensor.

    `keys` lists, for each name, all keys of `model.state_dict()` with that tensor; `alias` goes from any name of a
    tensor to the one used here, `name_of` from `id(parameter)`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)

    def names(self, name: str) -> list[str]:
        """All names of a tensor: several for tied weights."""
        return [clean_name(key) for key in self.keys[name]]


def model_state(model: nn.Module) -> ModelState:
    """The live tensors of a model by name."""
    state = ModelState()
    for key, value in model.state_dict(keep_vars=True).items():
        name = clean_name(key)
        if isinstance(value, torch.Tensor):
            name = state.name_of.setdefault(id(value), name)
            state.tensors[name] = value
        else:
            state.values[name] = value
        state.keys.setdefault(name, []).append(key)
        state.alias[clean_name(key)] = name
    return state


@dataclass
class OptimizerState:
    """An optimizer's state: tensors by parameter name and key, the plain values among them, and the param groups."""

    class_name: str
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The JSON form of all but the tensors; PlainValueError for an option or a state that has none."""
        return {
            "class": self.class_name,
            "groups": [encode(group, f"param_groups[{i}]") for i, group in enumerate(self.groups)],
            "values": encode(self.values, "optimizer.state"),
            "tensors": {name: sorted(tensors) for name, tensors in self.tensors.items()},
        }


def parameter_names(model: ModelState, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters in the order of its state dict's ids; ValueError for a foreign one."""
    names = []
    for i, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if id(parameter) not in model.name_of:
            raise ValueError(
                f"parameter {i} of the optimizer (shape {tuple(parameter.shape)}) is not a parameter of the model; "
                "make the optimizer from model.parameters() after the model has been parallelized"
            )
        names.append(model.name_of[id(parameter)])
    return names


def optimizer_state(model: ModelState, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The live state of an optimizer by parameter name; ValueError as in `parameter_names`."""
    names = parameter_names(model, optimizer)
    packed = optimizer.state_dict()
    result = OptimizerState(type(optimizer).__name__)
    for i, entries in packed["state"].items():
        for key, value in entries.items():
            kind = result.tensors if isinstance(value, torch.Tensor) else result.values
            kind.setdefault(names[i], {})[str(key)] = value
    for group in packed["param_groups"]:
        result.groups.append({**group, "params": [names[i] for i in group["params"]]})
    return result


@dataclass(frozen=True)
class Content:
    """All of a checkpoint: `tensors` for torch.distributed.checkpoint, `plain` for JSON, this rank's bytes."""

    tensors: dict[str, Any]
    plain: dict[str, Any]
    local_bytes: int
    shared_bytes: int  # of the tensors that each rank holds whole; written by one rank


def collect(path: object, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> Content:
    """What to write; CheckpointValueError (with `path` in it) for what cannot be stored."""
    state = model_state(model)
    try:
        optim = optimizer_state(state, optimizer)
        plain = {
            "model": encode(state.values, "model.state_dict()"),
            "optimizer": optim.plain(),
            "extra": encode(dict(extra), "extra"),
        }
    except (PlainValueError, ValueError) as error:
        raise CheckpointValueError(path, str(error)) from error
    tensors = {
        "model": {name: tensor.detach() for name, tensor in state.tensors.items()},
        "optimizer": {"state": {name: dict(entries) for name, entries in optim.tensors.items()}},
    }
    local_bytes = shared_bytes = 0
    for tensor in chain(state.tensors.values(), *(entries.values() for entries in optim.tensors.values())):
        if isinstance(tensor, DTensor):
            local_bytes += tensor.to_local().nbytes
        else:
            shared_bytes += tensor.nbytes
    return Content(tensors, plain, local_bytes, shared_bytes)
