"""Strided views of a slice of many tensors at once.

Parameters of equal shape often stand at equal distances in one flat buffer. A slice of all of them is then one view
with one more dim, and moving it is one copy instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from fxpar.transport.holding import Located


class PieceView(NamedTuple):
    """Members `first .. first + tensor.shape[0]` of a piece: `[members, *box]`."""

    first: int
    tensor: Tensor


def slice_views(
    holding: Located, fqns: Sequence[str], start: Sequence[int], shape: Sequence[int], merge: bool = True
) -> Iterator[PieceView]:
    """Views that together are the box at local `start` of all tensors `fqns`; as few as possible with `merge`."""
    side = _Side(holding, fqns, start, shape)
    first = 0
    while first < len(fqns):
        count = side.run(first, len(fqns)) if merge else 1
        yield PieceView(first, side.view(first, count))
        first += count


def paired_views(
    a: Located, b: Located, fqns: Sequence[str], starts: Sequence[Sequence[int]], shape: Sequence[int], merge: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same tensors of two holdings, pair by pair; `starts` are those in `a` and in `b`."""
    one, two = _Side(a, fqns, starts[0], shape), _Side(b, fqns, starts[1], shape)
    first = 0
    while first < len(fqns):
        count = two.run(first, one.run(first, len(fqns) - first)) if merge else 1
        yield one.view(first, count), two.view(first, count)
        first += count


class _Side:
    """The same box of many tensors of one holding."""

    def __init__(self, holding: Located, fqns: Sequence[str], start: Sequence[int], shape: Sequence[int]) -> None:
        self.holding, self.fqns, self.start, self.shape = holding, fqns, start, shape
        self.spots = [holding.spot(fqn) for fqn in fqns]
        self._ahead: tuple[tuple[int, ...], int] | None = None  # strides, and where the box starts with them

    def view(self, first: int, count: int) -> Tensor:
        """The box of `count` tensors from number `first` on, `[count, *shape]`."""
        spot = self.spots[first]
        if self._ahead is None or self._ahead[0] != spot.strides:
            self._ahead = spot.strides, _distance(self.start, spot.strides)
        step = self.spots[first + 1].offset - spot.offset if count > 1 else 0
        base = self.holding.tensor(self.fqns[first])
        return base.as_strided((count, *self.shape), (step, *spot.strides), spot.offset + self._ahead[1])

    def run(self, first: int, most: int) -> int:
        """How many tensors from number `first` on, up to `most`, stand at equal distances."""
        base, spots = self.spots[first], self.spots
        most = min(most, len(spots) - first)
        if most < 2:
            return 1
        step = spots[first + 1].offset - base.offset
        if step <= 0:  # the same tensor under two names, or an order that strides cannot express
            return 1
        count = 1
        while count < most:
            other = spots[first + count]
            alike = other.storage == base.storage and other.dtype == base.dtype and other.strides == base.strides
            if not alike or other.offset - base.offset != count * step:
                break
            count += 1
        return count


def _distance(start: Sequence[int], strides: Sequence[int]) -> int:
    return sum(s * stride for s, stride in zip(start, strides, strict=True))


def same_memory(a: Located, b: Located, fqn: str, a_start: Sequence[int], b_start: Sequence[int]) -> bool:
    """Do both tensors have their elements from these starts on at the same addresses?"""
    one, two = a.spot(fqn), b.spot(fqn)
    if one.storage != two.storage or one.dtype != two.dtype or one.strides != two.strides:
        return False
    return one.offset + _distance(a_start, one.strides) == two.offset + _distance(b_start, two.strides)


def extent(holding: Located, fqn: str) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last one; equal if it is empty."""
    tensor, spot = holding.tensor(fqn), holding.spot(fqn)
    low = spot.storage + spot.offset * spot.dtype.itemsize
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, spot.strides, strict=True))
    return low, low + (last + 1) * spot.dtype.itemsize
