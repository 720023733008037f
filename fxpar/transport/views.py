"""Strided views of a slice of many tensors at once.

Parameters of equal shape often stand at equal distances in one flat buffer. A slice of all of them is then one view
with one more dim, and moving it is one copy instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from fxpar.transport.holding import Located, Spot


class View(NamedTuple):
    """Members `first .. first + tensor.shape[0]` of a piece: `[members, *box]`."""

    first: int
    tensor: Tensor


def slice_views(
    holding: Located, fqns: Sequence[str], start: Sequence[int], shape: Sequence[int], merge: bool = True
) -> Iterator[View]:
    """Views that together are the box at local `start` of all tensors `fqns`; as few as possible with `merge`."""
    spots = [holding.spot(fqn) for fqn in fqns]
    first = 0
    while first < len(fqns):
        count, distance = _run(spots, first) if merge else (1, 0)
        spot = spots[first]
        base = holding.tensor(fqns[first])
        yield View(first, base.as_strided((count, *shape), (distance, *spot.strides), _address(spot, start)))
        first += count


def paired_views(
    a: Located, b: Located, fqns: Sequence[str], starts: Sequence[Sequence[int]], shape: Sequence[int], merge: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same tensors of two holdings, pair by pair; `starts` are those in `a` and in `b`."""
    sides = [
        (holding, [holding.spot(fqn) for fqn in fqns], start) for holding, start in zip((a, b), starts, strict=True)
    ]
    first = 0
    while first < len(fqns):
        runs = [_run(spots, first) if merge else (1, 0) for _, spots, _ in sides]
        count = min(run[0] for run in runs)
        pair = []
        for (holding, spots, start), (_, distance) in zip(sides, runs, strict=True):
            spot = spots[first]
            base = holding.tensor(fqns[first])
            pair.append(base.as_strided((count, *shape), (distance, *spot.strides), _address(spot, start)))
        yield pair[0], pair[1]
        first += count


def _run(spots: Sequence[Spot], first: int) -> tuple[int, int]:
    """How many spots from `first` on stand at an equal distance, and the distance."""
    base = spots[first]
    if first + 1 == len(spots):
        return 1, 0
    distance = spots[first + 1].offset - base.offset
    count = 1
    while first + count < len(spots):
        other = spots[first + count]
        alike = other.storage == base.storage and other.dtype == base.dtype and other.strides == base.strides
        if not alike or other.offset - base.offset != count * distance:
            break
        count += 1
    # A distance of 0 is the same tensor under two names, one below 0 cannot be expressed.
    return (count, distance) if count > 1 and distance > 0 else (1, 0)


def same_memory(a: Located, b: Located, fqn: str, a_start: Sequence[int], b_start: Sequence[int]) -> bool:
    """Do both tensors have their elements from these starts on at the same addresses?"""
    one, two = a.spot(fqn), b.spot(fqn)
    if one.storage != two.storage or one.dtype != two.dtype or one.strides != two.strides:
        return False
    return _address(one, a_start) == _address(two, b_start)


def _address(spot: Spot, start: Sequence[int]) -> int:
    return spot.offset + sum(s * stride for s, stride in zip(start, spot.strides, strict=True))


def extent(holding: Located, fqn: str) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last one; equal if it is empty."""
    tensor, spot = holding.tensor(fqn), holding.spot(fqn)
    low = spot.storage + spot.offset * spot.dtype.itemsize
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, spot.strides, strict=True))
    return low, low + (last + 1) * spot.dtype.itemsize
