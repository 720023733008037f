"""Initial values for a model that was built on the meta device: one module at a time, so whole weights never add up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fxpar.errors import MetaBufferError, warn
from fxpar.store.weights import WeightStore

Initializer = Callable[[nn.Module], object]
"""Fills the parameters and buffers that a module has itself (not those of its children), in place or by assignment."""


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no values yet."""
    return any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


@dataclass
class _Shared:
    """A parameter that several modules use: kept whole until the last of them has been filled."""

    left: int
    whole: Tensor | None = None


@dataclass
class _Filling:
    store: WeightStore
    first: Mapping[str, str]
    initializer: Initializer | None
    shared: dict[str, _Shared] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)


def materialize(
    module: nn.Module,
    store: WeightStore,
    names: Mapping[str, tuple[str, ...]],
    initializer: Initializer | None = None,
) -> None:
    """Fill every module that has meta tensors of its own, children before their parents, and keep this rank's pieces.

    `initializer` is called with a stand-in of each such module whose parameters are whole and on the device; by default
    it is the module's `reset_parameters`. Every rank draws the same values if its random generator is in the same
    state: those that one device would draw. `names` maps the first FQN of each parameter to all of them; a shared one
    is filled by each of its modules in turn. Parameters that nothing fills stay zero, with a warning that names them.
    Raises MetaBufferError for a buffer that nothing would fill.
    """
    first = {alias: fqn for fqn, aliases in names.items() for alias in aliases}
    work = _Filling(store, first, initializer)
    work.shared = {fqn: _Shared(len(aliases)) for fqn, aliases in names.items() if len(aliases) > 1}
    for prefix, owner in _children_first(module, ""):
        _fill_module(prefix, owner, work)
    missing = [fqn for fqn in work.left if fqn not in work.filled]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn(
            f"no reset_parameters fills {', '.join(missing[:3])}{more}: they are zeros now; load a checkpoint, or set "
            "them from whole tensors"
        )


def _children_first(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()

    def walk(owner: nn.Module, at: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in owner.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                yield from walk(child, f"{at}.{name}" if at else name)
        yield at, owner

    return walk(module, prefix)


def _fill_module(prefix: str, owner: nn.Module, work: _Filling) -> None:
    own = [name for name, _ in owner.named_parameters(recurse=False)]
    fqns = {name: work.first[f"{prefix}.{name}" if prefix else name] for name in own}
    empty = [name for name, b in owner.named_buffers(recurse=False) if b.device.type == "meta"]
    if not own and not empty:
        return
    run = work.initializer or getattr(type(owner), "reset_parameters", None)
    if run is None:
        if empty:
            raise MetaBufferError(f"{prefix}.{empty[0]}" if prefix else empty[0])
        work.left += fqns.values()
    filled = _stand_in(owner, fqns, empty, work)
    if run is not None:
        with torch.no_grad():
            run(filled)
    for name, fqn in fqns.items():
        value = getattr(filled, name).detach()
        shared = work.shared.get(fqn)
        if shared is not None:
            shared.left -= 1
            shared.whole = value if shared.left else None
        if run is not None:
            work.filled.add(fqn)
        if fqn in work.filled and (shared is None or not shared.left):
            work.store.fill(fqn, value)
    for name in empty:
        value = getattr(filled, name)
        if value.device.type == "meta":
            raise MetaBufferError(f"{prefix}.{name}" if prefix else name)
        owner.register_buffer(name, value, name not in owner._non_persistent_buffers_set)


def _stand_in(owner: nn.Module, fqns: Mapping[str, str], buffers: list[str], work: _Filling) -> nn.Module:
    """The module with whole tensors of its own, which shares nothing else with it."""
    made = copy.copy(owner)
    for table in ("_parameters", "_buffers"):
        made.__dict__[table] = dict(owner.__dict__[table])
    device = work.store.device
    for name, fqn in fqns.items():
        like = getattr(owner, name)
        shared = work.shared.get(fqn)
        whole = shared.whole if shared is not None else None
        if whole is None:
            whole = torch.zeros(tuple(like.shape), dtype=like.dtype, device=device)
        made.__dict__["_parameters"][name] = nn.Parameter(whole, requires_grad=like.requires_grad)
    for name in buffers:
        like = getattr(owner, name)
        made.__dict__["_buffers"][name] = torch.empty(tuple(like.shape), dtype=like.dtype, device=device)
    return made
