"""What calls make of tensors on the meta device, each different call worked out once.

Layers repeat, and so do the programs of a search: most calls are like one before, with operands of the same sizes,
strides and shared storages, so they make the same. torch's meta kernels take fifty times as long as looking that up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

META = torch.device("meta")
KNOWN = 1 << 16  # different calls that are kept


class MetaTensor(NamedTuple):
    """A tensor without data; `storage` is a number, and `nbytes` the size of that storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    nbytes: int


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
        return self._own(_empty(shape, dtype))

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns: MetaTensors where a tensor would be, anything else as it is."""
        found, mine = _result(target, args, kwargs)
        return self._numbered(found, mine, {})

    def _own(self, one: MetaTensor) -> MetaTensor:
        self.nbytes.append(one.nbytes)
        return one._replace(storage=len(self.nbytes) - 1)

    def _numbered(self, value: Any, mine: list[int], fresh: dict[int, int]) -> Any:
        if isinstance(value, MetaTensor):
            if value.storage < len(mine):
                return _stored(value, mine[value.storage])
            if value.storage not in fresh:
                fresh[value.storage] = len(self.nbytes)
                self.nbytes.append(value.nbytes)
            return _stored(value, fresh[value.storage])
        if type(value) in (list, tuple):
            return type(value)(self._numbered(one, mine, fresh) for one in value)
        return value


def is_same_call(target: Callable[..., Any], one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a call with other operands makes the same, but for where in a storage it lies: whether a later call is a
    view or a copy follows from strides.
    """
    return _anywhere(_result(target, one, {})) == _anywhere(_result(target, other, {}))


def _anywhere(value: Any) -> Any:
    """At offset 0."""
    if isinstance(value, MetaTensor):
        return value._replace(offset=0)
    return type(value)(map(_anywhere, value)) if type(value) in (list, tuple) else value


def _result(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[int]]:
    """What a call returns, with storages numbered by call, and the numbers in the graph of those of its operands."""
    storages: dict[int, int] = {}
    given = _encoded((args, tuple(sorted(kwargs.items()))), storages)
    try:
        return _called(target, given), list(storages)
    except TypeError:  # an operand without a hash; what is wrong with the call itself is raised again
        return _called.__wrapped__(target, given), list(storages)


@lru_cache(KNOWN)
def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> MetaTensor:
    return _described(torch.empty(shape, dtype=dtype, device=META), {})


def _encoded(value: Any, storages: dict[int, int]) -> Any:
    """With a hash; storages are numbered in the order in which they are met."""
    if isinstance(value, MetaTensor):
        return _stored(value, storages.setdefault(value.storage, len(storages)))
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return _Many(kind, tuple([_encoded(one, storages) for one in value]))
    if type(value) is int:
        return value
    return _Scalar(type(value), value) if isinstance(value, bool | float | int) else value


def _stored(one: MetaTensor, storage: int) -> MetaTensor:
    """In the storage with this number."""
    if one.storage == storage:
        return one
    return MetaTensor(one.shape, one.strides, one.offset, one.dtype, storage, one.nbytes)


def _decoded(value: Any, storages: dict[int, Any]) -> Any:
    """With tensors on the meta device, and their storages by number in `storages`."""
    if isinstance(value, MetaTensor):
        if value.storage not in storages:
            storages[value.storage] = torch.empty(value.nbytes, dtype=torch.uint8, device=META).untyped_storage()
        blank = torch.empty(0, dtype=value.dtype, device=META)
        return blank.set_(storages[value.storage], value.offset, value.shape, value.strides)
    if isinstance(value, _Many):
        return value.kind(_decoded(one, storages) for one in value.values)
    return value.value if isinstance(value, _Scalar) else value


def _described(value: Any, known: dict[int, tuple[int, Any]]) -> Any:
    """With MetaTensors; `known` grows: numbers of storages by id, and the storages, so that no id is used again."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        number, _ = known.setdefault(id(storage), (len(known), storage))
        shape, strides = tuple(value.shape), tuple(value.stride())
        return MetaTensor(shape, strides, int(value.storage_offset()), value.dtype, number, storage.nbytes())
    if isinstance(value, list | tuple):
        return type(value)(_described(one, known) for one in value)
    return value


@lru_cache(KNOWN)
def _called(target: Callable[..., Any], given: Any) -> Any:
    """Storages of operands keep their numbers, new ones get the next ones."""
    storages: dict[int, Any] = {}
    args, kwargs = _decoded(given, storages)
    with torch.no_grad():
        made = target(*args, **dict(kwargs))
    return _described(made, {id(storage): (number, storage) for number, storage in storages.items()})
