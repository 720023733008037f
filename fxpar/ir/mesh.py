"""`Mesh`: named axes over ranks of its own. No process group is needed.

The rank at a coordinate is `offset` plus, for each axis, the coordinate times the axis' stride. By default the last
axis is the fastest, so with axes `dp=2, tp=4` the four ranks of one tp group are neighbours, as in Megatron. What lies
at one coordinate of an axis is a mesh again (`at`): a pipeline stage is `mesh.at(STAGES, 1)`.

An axis splits into sub-axes, written as in Shardy: `tp:(1)2` is the sub-axis of 2 with 1 in front of it, `tp:(2)2` the
one of 2 behind. On `tp4` these are the outer and the inner half of 4 = 2 x 2: rank 3 is at 1 on both. What takes an
axis takes a sub-axis, and several joined by '.', the last of them varying fastest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fxpar.errors import PlacementError

_SUB_AXIS = re.compile(r"(\w+):\((\d+)\)(\d+)")


class AxisPart(NamedTuple):
    """All or part of an axis: of coordinate i on `axis`, the part has `i // step % degree`."""

    axis: str
    degree: int
    step: int = 1


def sub_axis(axis: str, front: int, degree: int) -> str:
    """The name of the sub-axis of `degree` that has `front` coordinates in front of it, of an axis or a sub-axis."""
    split = _split_name(axis)
    if split is not None:
        axis, front = split[0], split[1] * front
    return f"{axis}:({front}){degree}"


@functools.lru_cache
def _split_name(name: str) -> tuple[str, int, int] | None:
    """(axis, in front, degree) of the name of a sub-axis; None for another name."""
    match = _SUB_AXIS.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True)
class Mesh:
    """Ordered named axes with degrees; degree-1 axes are legal and do nothing.

    `strides` are the distances of neighbours on each axis in ranks; () is the default: outermost axis first, without
    gaps.
    """

    axes: tuple[tuple[str, int], ...]
    offset: int = 0
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.strides and len(self.strides) != len(self.axes):
            raise PlacementError(f"mesh {self} has {len(self.axes)} axes, but {len(self.strides)} strides")
        if self.strides == _compact(self.shape):
            object.__setattr__(self, "strides", ())  # one way to write it, as meshes are compared

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks in the order of their coordinates, the last axis fastest."""
        ranks = [self.offset]
        for (_, size), stride in zip(self.axes, self._steps.values(), strict=True):
            ranks = [rank + place * stride for rank in ranks for place in range(size)]
        return tuple(ranks)

    @cached_property
    def last(self) -> int:
        """The highest rank."""
        return self.offset + sum(
            (size - 1) * stride for (_, size), stride in zip(self.axes, self._steps.values(), strict=True)
        )

    def __contains__(self, rank: int) -> bool:
        if not self.strides:
            return self.offset <= rank < self.offset + self.size
        return self.rank(self._place(rank)) == rank

    def part(self, name: str) -> AxisPart:
        """The axis or sub-axis of this name; of degree 1 if the mesh does not have the axis.

        Raises PlacementError for a sub-axis that does not divide its axis.
        """
        split = _split_name(name)
        if split is None:
            return AxisPart(name, self._degrees.get(name, 1))
        axis, front, degree = split
        whole = self._degrees.get(axis, 1)
        if min(front, degree) < 1 or whole % (front * degree):
            raise PlacementError(f"{name!r} is not a sub-axis of {axis}{whole}")
        return AxisPart(axis, degree, whole // (front * degree))

    def joint(self, outer: str, inner: str) -> str | None:
        """The name of the axis or sub-axis that two neighbouring parts of one axis make; None for any others."""
        if ":" not in outer or ":" not in inner or "." in outer + inner:
            return None
        front, behind = self.part(outer), self.part(inner)
        if front.axis != behind.axis or front.step != behind.step * behind.degree:
            return None
        degree, whole = front.degree * behind.degree, self._degrees[front.axis]
        return front.axis if degree == whole else sub_axis(front.axis, whole // (degree * behind.step), degree)

    def parts(self, names: Iterable[str]) -> list[str]:
        """The parts that the axes are made of from which `names` have sub-axes, outermost first: each name is some of
        them, or has none. An axis has none either if its sub-axes cut through each other (2 x 3 and 3 x 2).
        """
        steps: dict[str, set[int]] = {}
        for name in names:
            if ":" in name:
                part = self.part(name)
                steps.setdefault(part.axis, {1, self._degrees[part.axis]}).update((part.step, part.step * part.degree))
        return [
            sub_axis(axis, self._degrees[axis] // high, high // low)
            for axis, found in steps.items()
            if not any(high % low for low, high in itertools.pairwise(sorted(found)))
            for low, high in reversed(list(itertools.pairwise(sorted(found))))
        ]

    def inside(self, part: str, axis: str) -> bool:
        """Whether `part` is the axis (or sub-axis) `axis`, or a part of it."""
        if part == axis or ":" not in part or "." in part + axis:
            return part == axis
        one, whole = self.part(part), self.part(axis)
        within = whole.step <= one.step and one.step * one.degree <= whole.step * whole.degree
        return one.axis == whole.axis and within

    def overlap(self, one: str, other: str) -> bool:
        """Whether two axes or sub-axes, of which neither is joined, share a part of an axis."""
        a, b = self.part(one), self.part(other)
        # Neither cuts through the other: coordinates on one say nothing of those on the other.
        apart = b.step % (a.step * a.degree) == 0 or a.step % (b.step * b.degree) == 0
        return one == other or (a.axis == b.axis and not apart)

    def place(self, name: str) -> tuple[int, int]:
        """For sorting axes and sub-axes as the mesh has them, outermost first."""
        part = self.part(name)
        return self.names.index(part.axis), -part.step

    def degree(self, axis: str) -> int:
        """Degree of `axis`, or of several joined by '.' (`dp.cp`); 1 for an axis that the mesh does not have."""
        return math.prod(self.part(name).degree for name in axis.split("."))

    def index(self, rank: int, axis: str) -> int:
        """Position of `rank` on `axis`, or on several joined by '.' (the last varies fastest)."""
        coordinate, index = self.coordinate(rank), 0
        for part in map(self.part, axis.split(".")):
            index = index * part.degree + coordinate.get(part.axis, 0) // part.step % part.degree
        return index

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on each axis. Raises ValueError for a rank that is not in the mesh."""
        place = self._place(rank)
        if self.rank(place) != rank:
            raise ValueError(f"rank {rank} is not in mesh {self} of ranks {self.ranks}")
        return place

    def _place(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank`, or of some other rank if it is not in the mesh."""
        rest, place = rank - self.offset, dict.fromkeys(self.names, 0)
        for name, size, stride in self._widest_first:
            place[name] = min(max(rest // stride, 0), size - 1)
            rest -= place[name] * stride
        return place

    @cached_property
    def _degrees(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def _steps(self) -> dict[str, int]:
        return dict(zip(self.names, self.strides or _compact(self.shape), strict=True))

    @cached_property
    def _widest_first(self) -> list[tuple[str, int, int]]:
        found = [(name, size, self._steps[name]) for name, size in self.axes]
        return sorted(found, key=lambda axis: -axis[2])

    def stride(self, axis: str) -> int:
        """Distance in ranks of neighbours on `axis`."""
        part = self.part(axis)
        return self._steps[part.axis] * part.step

    def rank(self, coordinate: dict[str, int]) -> int:
        """Inverse of `coordinate`; axes that are left out are 0."""
        return self.offset + sum(coordinate.get(name, 0) * stride for name, stride in self._steps.items())

    def at(self, axis: str, index: int) -> Mesh:
        """The mesh of the ranks at one coordinate of `axis`, without that axis."""
        kept = tuple(entry for entry in self.axes if entry[0] != axis)
        return Mesh(kept, self.rank({axis: index}), tuple(self.stride(name) for name, _ in kept))

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Ranks that differ only on `axes`: one tuple per group, in the order of the mixed radix of `axes`."""
        parts = [self.part(name) for name in axes]
        fixed = [
            [i for i in range(size) if not any(p.axis == name and i // p.step % p.degree for p in parts)]
            for name, size in self.axes
        ]
        firsts = [self.rank(dict(zip(self.names, place, strict=True))) for place in itertools.product(*fixed)]
        return [tuple(first + distance for distance in self._distances(parts)) for first in firsts]

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The group over `axes` that contains `rank`."""
        here, parts = self.coordinate(rank), [self.part(name) for name in axes]
        first = rank - sum(here.get(p.axis, 0) // p.step % p.degree * self._step(p) for p in parts)
        return tuple(first + distance for distance in self._distances(parts))

    def _distances(self, parts: list[AxisPart]) -> list[int]:
        """How far the ranks of a group over `parts` are from its first."""
        steps = [range(0, p.degree * self._step(p), self._step(p)) for p in parts]
        return [sum(distances) for distances in itertools.product(*steps)]

    def _step(self, part: AxisPart) -> int:
        """Distance of neighbours in ranks; any for an axis that the mesh does not have."""
        return self._steps.get(part.axis, 1) * part.step

    def to_json(self) -> dict[str, Any]:
        """{"mesh": [[axis, degree], ...]}, with "offset" and "strides" where they are not the default."""
        data: dict[str, Any] = {"mesh": [list(axis) for axis in self.axes]}
        if self.offset:
            data["offset"] = self.offset
        if self.strides:
            data["strides"] = list(self.strides)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Mesh:
        axes = tuple((name, size) for name, size in data["mesh"])
        return cls(axes, data.get("offset", 0), tuple(data.get("strides", ())))

    def __str__(self) -> str:
        return "x".join(f"{name}{size}" for name, size in self.axes) or "1"


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, the last axis fastest."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
