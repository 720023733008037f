"""Initial values for a model that was built on the meta device: module by module, and of each weight this rank's slice.

No rank makes a whole weight, unless its initializer does something that needs it (see `sliced`). The values depend on
the seed, the parameter's name and the number of the element in it, not on ranks, strategies or the home layout.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.errors import MetaBufferError, warn
from fxpar.store.sliced import Slice, Sliced, sliced_init
from fxpar.store.weights import WeightStore

Initializer = Callable[[nn.Module], object]
"""Fills the parameters and buffers that a module has itself (not those of its children), in place or by assignment."""


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no values yet."""
    return any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


@dataclass
class _Filling:
    """`first` maps every FQN to the parameter's first one; `slices` are kept until `uses` modules have filled them.
    Without a `seed` initializers get whole tensors. What has its values already is `valued`.
    """

    store: WeightStore
    first: Mapping[str, str]
    initializer: Initializer | None
    seed: int | None
    uses: dict[str, int]
    given: Collection[str]
    valued: Collection[str]
    slices: dict[str, Slice] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)


def materialize(
    module: nn.Module,
    store: WeightStore,
    names: Mapping[str, tuple[str, ...]],
    initializer: Initializer | None = None,
    whole: bool = False,
    given: Collection[str] = (),
    valued: Collection[str] = (),
) -> None:
    """Fill every module that has meta tensors of its own, children before their parents, and keep this rank's pieces.
    Parameters that are `valued`, which were not on the meta device, stay as they are.

    `initializer` is called with a stand-in of each such module whose parameters show their whole shape, on the device;
    by default it is the module's `reset_parameters`. The seed is the next number of rank 0's random generator. `names`
    maps the first FQN of each parameter to all of them; a shared one is filled by each of its modules in turn.
    Parameters that nothing fills stay zero, with a warning that names them. Raises MetaBufferError for a buffer that
    nothing would fill. All ranks call it.

    `whole`: parameters are whole one module at a time, and torch's generator draws them: the values of one device, if
    all ranks' generators are in the same state. What is `given` its values later stays zero, and modules that have
    nothing else are left alone.
    """
    first = {alias: fqn for fqn, aliases in names.items() for alias in aliases}
    uses = {fqn: len(aliases) for fqn, aliases in names.items()}
    seed = None if whole else _shared_seed(store.device)
    work = _Filling(store, first, initializer, seed, uses, given, valued)
    for prefix, owner in _children_first(module, ""):
        _fill_module(prefix, owner, work)
    missing = [fqn for fqn in work.left if fqn not in work.filled and fqn not in given]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        warn(
            f"no reset_parameters fills {', '.join(missing[:3])}{more}: they are zeros now; load a checkpoint, or set "
            "them from whole tensors"
        )


def _shared_seed(device: torch.device) -> int:
    seed = torch.randint(2**62, (), dtype=torch.int64).to(device)
    dist.broadcast(seed, 0)
    return int(seed)


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
    fqns = {name: work.first[_join(prefix, name)] for name in own}
    empty = []
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if buffer.device.type == "meta" and _join(prefix, name) in work.given:
            value = torch.zeros_like(buffer, device=work.store.device)
            owner.register_buffer(name, value, name not in owner._non_persistent_buffers_set)
        elif buffer.device.type == "meta":
            empty.append(name)
    if not empty and all(fqn in work.given or fqn in work.valued for fqn in fqns.values()):
        return
    run = work.initializer or getattr(type(owner), "reset_parameters", None)
    if run is not None:
        filled = _initialized(run, prefix, owner, fqns, empty, work)
        for name, fqn in fqns.items():
            _take(getattr(filled, name).detach(), fqn, work)
        for name in empty:
            value = getattr(filled, name)
            if value.device.type == "meta":
                raise MetaBufferError(_join(prefix, name))
            owner.register_buffer(name, value, name not in owner._non_persistent_buffers_set)
    elif empty:
        raise MetaBufferError(_join(prefix, empty[0]))
    else:
        work.left += [fqn for fqn in fqns.values() if fqn not in work.valued]
    for fqn in fqns.values():
        work.uses[fqn] -= 1
        if not work.uses[fqn] and fqn in work.slices:
            made = work.slices.pop(fqn).value
            if fqn not in work.valued:
                work.store.fill_slice(fqn, made)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _initialized(
    run: Initializer, prefix: str, owner: nn.Module, fqns: Mapping[str, str], buffers: list[str], work: _Filling
) -> nn.Module:
    """A stand-in of the module after its initializer. What that draws by torch's own generator (in whole tensors and
    buffers) follows from the seed too.
    """
    device = work.store.device
    if work.seed is None:
        filled = _stand_in(owner, fqns, buffers, work)
        with torch.no_grad():
            run(filled)
        return filled
    digest = hashlib.sha256(f"{work.seed} {prefix}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), sliced_init():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        filled = _stand_in(owner, fqns, buffers, work)
        run(filled)
    return filled


def _take(value: Tensor, fqn: str, work: _Filling) -> None:
    """Note what an initializer has made of a parameter: its slice, or a tensor that was put in its place."""
    if not isinstance(value, Sliced):
        work.slices[fqn].whole = value
    work.filled.add(fqn)


def _stand_in(owner: nn.Module, fqns: Mapping[str, str], buffers: list[str], work: _Filling) -> nn.Module:
    """The module with tensors of its own, which shares nothing else with it."""
    made = copy.copy(owner)
    for table in ("_parameters", "_buffers"):
        made.__dict__[table] = dict(owner.__dict__[table])
    device = work.store.device
    for name, fqn in fqns.items():
        like = getattr(owner, name)
        if fqn not in work.slices:
            box = work.store.home_box(fqn)
            work.slices[fqn] = Slice(fqn, tuple(like.shape), box, like.dtype, device, work.seed or 0)
        part = work.slices[fqn]
        shown = part.make_whole() if work.seed is None else Sliced(part)
        made.__dict__["_parameters"][name] = nn.Parameter(shown, requires_grad=like.requires_grad)
    for name in buffers:
        like = getattr(owner, name)
        made.__dict__["_buffers"][name] = torch.empty(tuple(like.shape), dtype=like.dtype, device=device)
    return made
