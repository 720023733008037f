"""Read a checkpoint into a model and an optimizer, on any number of ranks; check all of it before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fxpar.checkpoint.agree import agreed, group_of, rank_in, watched
from fxpar.checkpoint.folder import require_checkpoint
from fxpar.checkpoint.manifest import advice, check_files, read_manifest
from fxpar.checkpoint.metadata import SafePlanner, SafeReader, read_metadata
from fxpar.checkpoint.plain import decode
from fxpar.checkpoint.save import PLAIN, without_group_warning
from fxpar.checkpoint.state import IMPLEMENTATION_FLAGS, ModelState, model_state, parameter_names
from fxpar.errors import CheckpointMismatchError, CorruptCheckpointError, MissingCheckpointError, one_line, warn

_WITHOUT = "Nothing was loaded. For the weights alone: load_checkpoint(path, model, None)"
_Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def load_checkpoint(
    path: str | os.PathLike[str] | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load `path` (see `latest_checkpoint`) in place and return its `extra`; call it on all ranks of the process group.

    The number of ranks and the placements may differ from those that wrote it. The optimizer gets the saved states and
    options (learning rate, betas, ...), a warning says which are others than it was made with, but keeps how it
    computes (`fused`, `foreach`). None loads the model alone.
    Takes one further copy of this rank's shards while it loads.

    Raises, the same on all ranks and before anything has changed: MissingCheckpointError where there is none (a folder
    of checkpoints is not one: the message names its newest), CorruptCheckpointError naming the file, and
    CheckpointMismatchError naming the first parameters that do not fit. PeerLostError if a rank is gone.
    """
    if path is None:
        raise MissingCheckpointError(
            "None",
            "there is no checkpoint to load: latest_checkpoint found none. Load only where it finds one "
            "(path = latest_checkpoint(folder); if path is not None: ...), or name the folder of one",
        )
    group, path = group_of(process_group), Path(path)
    with watched(model, rank_in(group)[0], f"loading {path.name}"):
        return _load(group, path, model, optimizer)


def read_extra(path: Path) -> dict[str, Any]:
    """The `extra` of a checkpoint alone, without a look at its other files. Raises CorruptCheckpointError."""
    return _read_plain(path, "extra")


def trained_names(path: Path) -> set[str]:
    """The parameters that the optimizer of a checkpoint has. Raises CorruptCheckpointError."""
    groups = _read_plain(path, "optimizer")
    try:
        return {str(name) for group in groups["groups"] for name in group["params"]}
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(path, f"{PLAIN} cannot be read. {advice(path)}") from error


def optimizer_class(path: Path) -> str:
    """The class of the optimizer that a checkpoint has, such as `AdamW`. Raises CorruptCheckpointError."""
    return str(_read_plain(path, "optimizer").get("class"))


def check_shapes(path: Path, model: nn.Module, other: nn.Module) -> None:
    """See that a checkpoint is of a model, whose tensors need no values: by names and shapes. Dtypes are not compared,
    since a run keeps masters that may be wider. `other` is the same model with another vocabulary (or `model` itself):
    sizes in which the two differ may be any in the checkpoint.

    Raises CheckpointMismatchError, CorruptCheckpointError.
    """
    state, another = model_state(model), model_state(other)

    def form(name: str, entry: TensorStorageMetadata) -> _Form:
        shape = tuple(state.tensors[name].shape)
        if len(entry.size) == len(shape):
            both = zip(shape, another.tensors[name].shape, entry.size, strict=True)
            shape = tuple(saved if size != known else size for size, known, saved in both)
        return shape, entry.properties.dtype

    _names_in(path, state, read_metadata(path), set(_read_plain(path, "model")), form)


def _read_plain(path: Path, part: str) -> dict[str, Any]:
    """A part of a checkpoint's plain values. Raises CorruptCheckpointError."""
    try:
        found = decode(json.loads((path / PLAIN).read_text(encoding="utf-8"))[part])
        if isinstance(found, dict):
            return found
        raise TypeError(f"{part!r} is not a table")
    except Exception as error:  # it may be anybody's: too deep, a tensor of another shape, what has no hash
        why = f"{PLAIN} cannot be read ({type(error).__name__}: {one_line(error, 100)}). {advice(path)}"
        raise CorruptCheckpointError(path, why) from error


def _load(
    group: dist.ProcessGroup | None, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    rank, world = rank_in(group)
    wrap = _Wrap(path)

    def check() -> None:
        require_checkpoint(path)
        check_files(path, read_manifest(path), rank, world)

    agreed(group, check, wrap)
    found: list[_Job] = []
    agreed(group, lambda: found.append(_plan(path, model, optimizer)), wrap)
    job = found[0]
    _read(path, job, group)
    if rank == 0 and optimizer is not None and (told := _other_options(job, optimizer)):
        warn(f"checkpoint {path.name}: the optimizer goes on with {told}, as saved. Set its param_groups after loading")
    agreed(group, lambda: _apply(job, model, optimizer), wrap)
    return job.extra


@dataclass(frozen=True)
class _Job:
    """What to read (`targets`, fresh tensors) and where it goes."""

    state: ModelState
    targets: dict[str, Any]
    values: dict[str, Any]
    optimizer: dict[str, Any] | None
    names: list[str]
    extra: dict[str, Any]


@dataclass(frozen=True)
class _Wrap:
    path: Path

    def __call__(self, error: BaseException) -> CorruptCheckpointError:
        reason = str(error).partition("\n")[0]
        return CorruptCheckpointError(self.path, f"cannot be loaded: {type(error).__name__}: {reason}")


def _plan(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> _Job:
    metadata = read_metadata(path)
    uncounted = {info.relative_path for info in metadata.storage_data.values()} - read_manifest(path).files.keys()
    if uncounted:
        raise CorruptCheckpointError(path, f"{min(uncounted)} is not in its manifest. {advice(path)}")
    plain = json.loads((path / PLAIN).read_text(encoding="utf-8"))
    state = model_state(model)
    values, extra = decode(plain["model"]), decode(plain["extra"])
    targets: dict[str, Any] = {"model": _model_targets(path, state, metadata, set(values))}
    names: list[str] = []
    if optimizer is not None:
        try:
            names = parameter_names(state, optimizer)
        except ValueError as error:
            raise CheckpointMismatchError(path, f"{error}. Nothing was loaded") from error
        _check_optimizer(path, plain["optimizer"], state, names, optimizer)
        targets["optimizer"] = {"state": _optimizer_targets(plain["optimizer"]["tensors"], state, metadata)}
    return _Job(state, targets, values, plain["optimizer"] if optimizer is not None else None, names, extra)


def _model_targets(path: Path, state: ModelState, metadata: Metadata, values: set[str]) -> dict[str, torch.Tensor]:
    """Fresh tensors for the model, by the name under which the checkpoint has them."""

    def form(name: str, entry: TensorStorageMetadata) -> _Form:
        return tuple(state.tensors[name].shape), state.tensors[name].dtype

    found = _names_in(path, state, metadata, values, form)
    return {key: torch.empty_like(state.tensors[name].detach()) for name, key in found.items()}


def _names_in(
    path: Path,
    state: ModelState,
    metadata: Metadata,
    values: set[str],
    form: Callable[[str, TensorStorageMetadata], _Form],
) -> dict[str, str]:
    """The name in the checkpoint of each tensor of the model. `form(name, entry)` is what the tensor is here, to be
    compared with what is saved. Raises CheckpointMismatchError.
    """
    prefix = "model."
    saved = {
        key.removeprefix(prefix): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    found, missing, differ = {}, sorted(set(state.values) - values), []
    for name in state.tensors:
        # Tied weights: another version of the model may list the other name first.
        key = next((k for k in state.names(name) if k in saved), None)
        if key is None:
            missing.append(name)
            continue
        entry = saved.pop(key)
        here, there = form(name, entry), (tuple(entry.size), entry.properties.dtype)
        if here != there:
            differ.append(f"{name} ({_form(*there)} saved, {_form(*here)} here)")
        found[name] = key
    problems = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (
            ("missing in the checkpoint", missing),
            ("in the checkpoint but not in the model", sorted({*saved, *values} - set(state.values))),
            ("of another shape or dtype", differ),
        )
        if names
    ]
    if problems:
        raise CheckpointMismatchError(
            path,
            f"is of another model; parameters {'; '.join(problems)}. Nothing was loaded. Load it into the model that "
            "wrote it (its options stand in the configuration of that run), or start in another folder",
        )
    return found


def _form(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _first(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _check_optimizer(
    path: Path, saved: dict[str, Any], state: ModelState, names: list[str], optimizer: torch.optim.Optimizer
) -> None:
    """The class and the parameters of each group must be the same; the order inside a group may differ."""
    kind = type(optimizer).__name__
    if saved["class"] != kind:
        why = f"holds the state of {saved['class']}, and the optimizer here is {kind}. {_WITHOUT}"
        raise CheckpointMismatchError(path, why)
    if len(saved["groups"]) != len(optimizer.param_groups):
        counts = f"{len(saved['groups'])} param groups, and the optimizer here has {len(optimizer.param_groups)}"
        lists = "; ".join(_first(list(group["params"]), 2) for group in saved["groups"])
        why = f"holds {counts}. Saved are {lists}; fxpar train has matrices apart from vectors, which do not decay. "
        raise CheckpointMismatchError(path, why + _WITHOUT)
    rest = iter(names)
    for i, (before, group) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        here = {next(rest) for _ in group["params"]}
        other = here ^ {state.alias.get(name, name) for name in before["params"]}
        if other:
            why = f"param group {i} holds other parameters than here: {_first(sorted(other))}. {_WITHOUT}"
            raise CheckpointMismatchError(path, why)


def _optimizer_targets(
    saved: dict[str, list[str]], state: ModelState, metadata: Metadata
) -> dict[str, dict[str, torch.Tensor]]:
    """Fresh tensors for the optimizer's states: laid out as the parameter where they have its shape."""
    targets: dict[str, dict[str, torch.Tensor]] = {}
    for name, keys in saved.items():
        parameter = state.tensors[state.alias[name]].detach()
        for key in keys:
            entry = metadata.state_dict_metadata[f"optimizer.state.{name}.{key}"]
            assert isinstance(entry, TensorStorageMetadata)
            dtype = entry.properties.dtype
            # torch keeps `step` apart from the other states of a 0-dim parameter too.
            if entry.size == parameter.shape and key != "step":
                target = torch.empty_like(parameter, dtype=dtype)
            else:
                device = "cpu" if len(entry.size) == 0 else _device(parameter)
                target = torch.empty(entry.size, dtype=dtype, device=device)
            targets.setdefault(name, {})[key] = target
    return targets


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.to_local().device if isinstance(tensor, DTensor) else tensor.device


def _read(path: Path, job: _Job, group: dist.ProcessGroup | None) -> None:
    try:
        with without_group_warning(group):
            words = {"storage_reader": SafeReader(path), "planner": SafePlanner()}
            dcp.load(job.targets, process_group=group, no_dist=group is None, **words)
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CorruptCheckpointError(path, f"rank {rank} cannot read it: {reason}. Nothing was loaded") from error


def _other_options(job: _Job, optimizer: torch.optim.Optimizer) -> str:
    """`momentum 0.9 instead of 0.0, ...`: what the saved options change; the learning rate, which schedules change, and
    how it computes are left out.
    """
    told: list[str] = []
    for before, group in zip((job.optimizer or {})["groups"], optimizer.param_groups, strict=True):
        for key, saved in decode(before).items():
            if key in group and key not in ("params", "lr", "initial_lr", *IMPLEMENTATION_FLAGS):
                here = group[key]
                same = tuple(saved) == tuple(here) if isinstance(saved, list | tuple) else saved == here
                told += [] if same else [f"{key} {saved} instead of {here}"]
    return ", ".join(dict.fromkeys(told))


@torch.no_grad()
def _apply(job: _Job, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy what was read into the live tensors."""
    by_key: dict[str, Any] = {}
    for name, keys in job.state.keys.items():
        read = job.values if name in job.state.values else job.targets["model"]
        saved = next(known for known in job.state.names(name) if known in read)
        by_key |= dict.fromkeys(keys, read[saved])
    model.load_state_dict(by_key)
    if optimizer is not None and job.optimizer is not None:
        optimizer.load_state_dict(_optimizer_dict(job, optimizer))


def _optimizer_dict(job: _Job, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of this optimizer: ids in its own order, saved options, its own flags."""
    saved: dict[str, Any] = job.optimizer or {}
    alias = job.state.alias
    values = {alias[name]: entries for name, entries in decode(saved["values"]).items()}
    tensors = {alias[name]: entries for name, entries in job.targets["optimizer"]["state"].items()}
    states = {
        i: {**tensors.get(name, {}), **values.get(name, {})}
        for i, name in enumerate(job.names)
        if name in tensors or name in values
    }
    ids = iter(range(len(job.names)))
    groups = []
    for before, group in zip(saved["groups"], optimizer.param_groups, strict=True):
        own = {key: group[key] for key in IMPLEMENTATION_FLAGS if key in group}
        options = {key: value for key, value in group.items() if key != "params"} | decode(before) | own
        groups.append({**options, "params": [next(ids) for _ in group["params"]]})
    return {"state": states, "param_groups": groups}
