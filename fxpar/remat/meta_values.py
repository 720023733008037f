"""What calls make of tensors on the meta device, each different call worked out once.

Layers repeat, and so do the programs of a search: most calls are like one before, with operands of the same sizes,
strides and shared storages, so they make the same. torch's meta kernels take fifty times as long as looking that up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

META = torch.device("meta")
KNOWN = 1 << 16  # different calls that are kept


@dataclass(frozen=True)
class MetaLook:
    """Shape, strides, offset and dtype of a tensor, and the bytes of its storage; its hash is asked for often."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.strides, self.offset, self.dtype, self.nbytes)))

    def __hash__(self) -> int:
        return self._hash


class MetaTensor(NamedTuple):
    """A tensor without data, in the storage with this number."""

    look: MetaLook
    storage: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.look.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.look.strides

    @property
    def offset(self) -> int:
        return self.look.offset

    @property
    def dtype(self) -> torch.dtype:
        return self.look.dtype


class _Scalar(NamedTuple):
    """`1`, `1.0` and `True` are equal, and not the same operand: all but whole numbers, the usual ones, are wrapped."""

    kind: type
    value: object


class _Many(NamedTuple):
    """A list or tuple."""

    kind: type
    values: tuple[Any, ...]


def meta_tensors(value: Any) -> Iterator[MetaTensor]:
    """The tensors of a value."""
    if isinstance(value, MetaTensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            if isinstance(one, MetaTensor):
                yield one


class MetaValues:
    """Values of one graph; `nbytes[i]` is the size of storage i."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def placed(self, shape: tuple[int, ...], dtype: torch.dtype) -> MetaTensor:
        """A new contiguous tensor."""
        found = MetaTensor(_empty(shape, dtype), len(self.nbytes))
        self.nbytes.append(found.look.nbytes)
        return found

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns: MetaTensors where a tensor would be, anything else as it is."""
        found, mine = _result(target, args, kwargs)
        return self._numbered(found, mine, {})

    def _numbered(self, value: Any, mine: list[int], fresh: dict[int, int]) -> Any:
        kind = type(value)
        if kind is MetaTensor:
            look, number = value
            if number < len(mine):
                return MetaTensor(look, mine[number])
            if number not in fresh:
                fresh[number] = len(self.nbytes)
                self.nbytes.append(look.nbytes)
            return MetaTensor(look, fresh[number])
        if kind in (list, tuple):
            return kind(self._numbered(one, mine, fresh) for one in value)
        return value


def is_same_call(target: Callable[..., Any], one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a call with other operands makes the same, but for where in a storage it lies: whether a later call is a
    view or a copy follows from strides.
    """
    return _anywhere(_result(target, one, {})) == _anywhere(_result(target, other, {}))


def _anywhere(value: Any) -> Any:
    """At offset 0."""
    if isinstance(value, MetaTensor):
        return value._replace(look=replace(value.look, offset=0))
    return type(value)(map(_anywhere, value)) if type(value) in (list, tuple) else value


def _result(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[int]]:
    """What a call returns, with storages numbered by call, and the numbers in the graph of those of its operands."""
    storages: dict[int, int] = {}
    given = tuple([_encoded(one, storages) for one in args])
    named = tuple([(name, _encoded(one, storages)) for name, one in sorted(kwargs.items())]) if kwargs else ()
    try:
        return _called(target, given, named), list(storages)
    except TypeError:  # an operand without a hash; what is wrong with the call itself is raised again
        return _called.__wrapped__(target, given, named), list(storages)


@lru_cache(KNOWN)
def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> MetaLook:
    return _described(torch.empty(shape, dtype=dtype, device=META), {}).look


def _encoded(value: Any, storages: dict[int, int]) -> Any:
    """With a hash: a tensor is a plain pair; storages are numbered in the order in which they are met."""
    kind = type(value)
    if kind is MetaTensor:
        look, storage = value
        return look, storages.setdefault(storage, len(storages))
    if kind is int or value is None:
        return value
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return _Many(kind, tuple([_encoded(one, storages) for one in value]))
    return _Scalar(kind, value) if isinstance(value, bool | float | int) else value


def _decoded(value: Any, storages: dict[int, Any]) -> Any:
    """With tensors on the meta device, and their storages by number in `storages`."""
    if type(value) is tuple:
        look, number = value
        if number not in storages:
            storages[number] = torch.empty(look.nbytes, dtype=torch.uint8, device=META).untyped_storage()
        blank = torch.empty(0, dtype=look.dtype, device=META)
        return blank.set_(storages[number], look.offset, look.shape, look.strides)
    if isinstance(value, _Many):
        return value.kind(_decoded(one, storages) for one in value.values)
    return value.value if isinstance(value, _Scalar) else value


def _described(value: Any, known: dict[int, tuple[int, Any]]) -> Any:
    """With MetaTensors; `known` grows: numbers of storages by id, and the storages, so that no id is used again."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        number, _ = known.setdefault(id(storage), (len(known), storage))
        shape, strides = tuple(value.shape), tuple(value.stride())
        return MetaTensor(_look(shape, strides, int(value.storage_offset()), value.dtype, storage.nbytes()), number)
    if isinstance(value, list | tuple):
        return type(value)(_described(one, known) for one in value)
    return value


_look = lru_cache(KNOWN)(MetaLook)  # one object for all that are equal, which are then found at once


@lru_cache(KNOWN)
def _called(target: Callable[..., Any], given: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Any:
    """Storages of operands keep their numbers, new ones get the next ones."""
    storages: dict[int, Any] = {}
    args = [_decoded(one, storages) for one in given]
    kwargs = {name: _decoded(one, storages) for name, one in named}
    with torch.no_grad():
        made = target(*args, **kwargs)
    return _described(made, {id(storage): (number, storage) for number, storage in storages.items()})
