"""Initial values for a model that was built on the meta device: one module at a time, so whole weights never add up."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxpar.errors import MetaBufferError, warn
from fxpar.store.weights import WeightStore


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no values yet."""
    return any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


def materialize(module: nn.Module, store: WeightStore, names: Mapping[str, tuple[str, ...]]) -> None:
    """Run `reset_parameters` of every module that has meta tensors of its own, and keep this rank's pieces.

    Every rank draws the same values if its random generator is in the same state. `names` maps the first FQN of each
    parameter to all of them. Parameters of modules without `reset_parameters` stay zero, with a warning that names
    them. Raises MetaBufferError for a buffer that nothing would fill.
    """
    first = {alias: fqn for fqn, aliases in names.items() for alias in aliases}
    left, done = [], set()
    for prefix, owner in list(module.named_modules()):
        own = [name for name, p in owner.named_parameters(recurse=False)]
        fqns = {name: first[f"{prefix}.{name}" if prefix else name] for name in own}
        empty = [name for name, b in owner.named_buffers(recurse=False) if b.device.type == "meta"]
        if not own and not empty:
            continue
        reset = getattr(type(owner), "reset_parameters", None)
        if reset is None:
            if empty:
                raise MetaBufferError(f"{prefix}.{empty[0]}" if prefix else empty[0])
            left += [fqn for fqn in fqns.values() if fqn not in done]
            continue
        filled = _run_reset(owner, own, empty, store.device)
        for name, fqn in fqns.items():
            if fqn not in done:
                store.fill(fqn, filled[name])
                done.add(fqn)
        for name in empty:
            owner.register_buffer(name, filled[name], name not in owner._non_persistent_buffers_set)
    missing = [fqn for fqn in left if fqn not in done]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn(
            f"no reset_parameters fills {', '.join(missing[:3])}{more}: they are zeros now; load a checkpoint, or set "
            "them from whole tensors"
        )


def _run_reset(owner: nn.Module, params: list[str], buffers: list[str], device: torch.device) -> dict[str, Tensor]:
    """Whole tensors as the module's own `reset_parameters` fills them, on a stand-in that shares nothing else."""
    stand_in = copy.copy(owner)
    for table in ("_parameters", "_buffers"):
        stand_in.__dict__[table] = dict(owner.__dict__[table])
    for name in (*params, *buffers):
        like = getattr(owner, name)
        dtype = like.dtype
        whole = torch.empty(tuple(like.shape), dtype=dtype, device=device)
        stand_in.__dict__["_parameters" if name in params else "_buffers"][name] = (
            nn.Parameter(whole, requires_grad=like.requires_grad) if name in params else whole
        )
    with torch.no_grad():
        stand_in.reset_parameters()  # type: ignore[operator]
    return {name: getattr(stand_in, name).detach() for name in (*params, *buffers)}
