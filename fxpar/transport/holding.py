"""`Holding`: the local tensors of one rank under one layout, and where in them a global box lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fxpar.errors import HoldingError
from fxpar.ir.dist_config import DistConfig
from fxpar.switch.layout import ParamLayout
from fxpar.switch.plan import Box

Runs = list[tuple[int, int, int]]  # (local start, global start, length)


@dataclass(frozen=True)
class Holding:
    """What a rank holds of a layout: its local tensors by FQN.

    A tensor has the shape `dist.local_shape` of its placement, or the same with padding left out (as shards of the home
    layout are kept), any strides, and any dtype. What the rank holds nothing of may be missing.
    """

    layout: ParamLayout
    tensors: Mapping[str, Tensor]


class Spot(NamedTuple):
    """Where a tensor lies: its storage, and where in it. `offset` and `strides` count elements."""

    storage: int
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int


def spot_of(tensor: Tensor) -> Spot:
    """The place of `tensor` in memory."""
    return Spot(tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class _Kind:
    """What tensors that are placed alike have in common on a rank; None and no shapes where it holds nothing."""

    runs: list[Runs] | None
    shapes: tuple[tuple[int, ...], ...]  # with padding and without
    starts: dict[Box, tuple[int, ...] | None] = field(default_factory=dict)  # found so far

    def start(self, box: Box) -> tuple[int, ...] | None:
        """`start_in` of the runs: layers ask for the same boxes, of up to hundreds of runs."""
        if self.runs is None:
            return None
        if box not in self.starts:
            self.starts[box] = start_in(self.runs, box)
        return self.starts[box]


def _kind_of(layout: ParamLayout, fqn: str, rank: int) -> _Kind:
    dist = copy_of(layout, fqn, rank) if fqn in layout.params else None
    if dist is None:
        return _Kind(None, ())
    shape = layout.params[fqn].shape
    return _Kind(local_runs(layout, fqn, rank), (dist.local_shape(shape), dist.real_shape(rank, shape)))


class Located:
    """A holding as `rank` sees it. Raises HoldingError for a tensor of another shape than the layout's."""

    def __init__(self, holding: Holding, rank: int) -> None:
        self.layout = holding.layout
        self.rank = rank
        self._given = holding.tensors
        self._tensors: dict[str, Tensor] = {}
        self._spots: dict[str, Spot] = {}
        self._kinds: dict[str, _Kind] = {}
        self._shapes: dict[str, torch.Size] = {}  # found right before
        self._alike: dict[tuple, _Kind] = {}

    def replace(self, fqn: str, tensor: Tensor) -> None:
        """Use `tensor` (of the same shape) instead of the one given."""
        self._tensors[fqn] = tensor
        self._spots.pop(fqn, None)

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take other tensors of the same layout."""
        self._given = tensors
        self._tensors, self._spots = {}, {}

    def start(self, fqn: str, box: Box) -> tuple[int, ...] | None:
        """Local start per dim of a global box; None if the rank does not hold it, or was not given the tensor."""
        if fqn not in self._given:
            return None
        return self._kind(fqn).start(box)

    def required(self, fqn: str, box: Box) -> tuple[int, ...]:
        """`start` of a box that the rank must hold. Raises HoldingError."""
        start = self.start(fqn, box)
        if start is None:
            raise HoldingError(self.layout.name, fqn, f"is needed on rank {self.rank}, but was not given")
        return start

    def _kind(self, fqn: str) -> _Kind:
        found = self._kinds.get(fqn)
        if found is None:
            param = self.layout.params.get(fqn)
            key = (param.shape, param.copies) if param else ()
            if key not in self._alike:
                self._alike[key] = _kind_of(self.layout, fqn, self.rank)
            found = self._kinds[fqn] = self._alike[key]
        return found

    def tensor(self, fqn: str) -> Tensor:
        """The local tensor, detached."""
        found = self._tensors.get(fqn)
        if found is None:
            found = self._tensors[fqn] = self._checked(fqn)
        return found

    def spot(self, fqn: str) -> Spot:
        found = self._spots.get(fqn)
        if found is None:
            found = self._spots[fqn] = spot_of(self.tensor(fqn))
        return found

    def _checked(self, fqn: str) -> Tensor:
        tensor = self._given[fqn]
        if self._shapes.get(fqn) != tensor.shape:
            if tensor.shape not in self._kind(fqn).shapes:
                check_shape(self.layout, fqn, self.rank, tensor)
            self._shapes[fqn] = tensor.shape
        return tensor.detach()


def copy_of(layout: ParamLayout, fqn: str, rank: int) -> DistConfig | None:
    """How the copy of a parameter lies that `rank` has a piece of. Raises HoldingError if there are two."""
    copies = [dist for dist in layout.params[fqn].copies if rank in dist.mesh]
    if len(copies) > 1:
        raise HoldingError(layout.name, fqn, f"lies twice on rank {rank}; the meshes of its copies must not overlap")
    return copies[0] if copies else None


def local_runs(layout: ParamLayout, fqn: str, rank: int) -> list[Runs] | None:
    """Runs per dim of what `rank` holds; None if it holds nothing."""
    dist = copy_of(layout, fqn, rank) if fqn in layout.params else None
    if dist is None:
        return None
    return [dist.intervals(rank, d, size) for d, size in enumerate(layout.params[fqn].shape)]


def start_in(runs: Sequence[Runs], box: Box) -> tuple[int, ...] | None:
    """Local start per dim of a box that lies within one run of every dim; None if there is no such run."""
    start = []
    for of_dim, (low, high) in zip(runs, box, strict=True):
        for local, origin, length in of_dim:
            if origin <= low and high <= origin + length:
                start.append(local + low - origin)
                break
        else:
            return None
    return tuple(start)


def check_shape(layout: ParamLayout, fqn: str, rank: int, tensor: Tensor) -> None:
    """Raise HoldingError unless every dim has its padded or its real local size."""
    dist = copy_of(layout, fqn, rank)
    if dist is None:
        raise HoldingError(layout.name, fqn, f"is given on rank {rank}, which holds nothing of it")
    shape = layout.params[fqn].shape
    padded = dist.local_shape(shape)
    real = dist.real_shape(rank, shape)
    fits = tensor.dim() == len(padded) and all(
        size in (a, b) for size, a, b in zip(tensor.shape, padded, real, strict=True)
    )
    if not fits:
        either = f" or, without padding, {list(real)}" if real != padded else ""
        raise HoldingError(
            layout.name,
            fqn,
            f"is {list(tensor.shape)} on rank {rank}, but rank {rank} holds {list(padded)}{either} of {list(shape)}",
        )
