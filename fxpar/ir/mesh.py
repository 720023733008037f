"""`Mesh`: named axes over ranks of its own. No process group is needed.

The rank at a coordinate is `offset` plus, for each axis, the coordinate times the axis' stride. By default the last
axis is the fastest, so with axes `dp=2, tp=4` the four ranks of one tp group are neighbours, as in Megatron. What lies
at one coordinate of an axis is a mesh again (`at`): a pipeline stage is `mesh.at("pp", 1)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxpar.errors import PlacementError


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

    def degree(self, axis: str) -> int:
        """Degree of `axis`, or of several joined by '.' (`dp.cp`); 1 for an axis that the mesh does not have."""
        degrees = dict(self.axes)
        return math.prod(degrees.get(name, 1) for name in axis.split("."))

    def index(self, rank: int, axis: str) -> int:
        """Position of `rank` on `axis`, or on several joined by '.' (the last varies fastest)."""
        coordinate, index = self.coordinate(rank), 0
        for name in axis.split("."):
            index = index * self.degree(name) + coordinate.get(name, 0)
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
    def _steps(self) -> dict[str, int]:
        return dict(zip(self.names, self.strides or _compact(self.shape), strict=True))

    @cached_property
    def _widest_first(self) -> list[tuple[str, int, int]]:
        found = [(name, size, self._steps[name]) for name, size in self.axes]
        return sorted(found, key=lambda axis: -axis[2])

    def stride(self, axis: str) -> int:
        """Distance in ranks of neighbours on `axis`."""
        return self._steps[axis]

    def rank(self, coordinate: dict[str, int]) -> int:
        """Inverse of `coordinate`; axes that are left out are 0."""
        return self.offset + sum(coordinate.get(name, 0) * stride for name, stride in self._steps.items())

    def at(self, axis: str, index: int) -> Mesh:
        """The mesh of the ranks at one coordinate of `axis`, without that axis."""
        kept = tuple(entry for entry in self.axes if entry[0] != axis)
        return Mesh(kept, self.rank({axis: index}), tuple(self.stride(name) for name, _ in kept))

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Ranks that differ only on `axes`: one tuple per group, in the order of the mixed radix of `axes`."""
        fixed = [range(size) if name not in axes else range(1) for name, size in self.axes]
        varied = [range(self.degree(name)) for name in axes]
        groups = []
        for base in itertools.product(*fixed):
            coordinate = dict(zip(self.names, base, strict=True))
            members = itertools.product(*varied)
            groups.append(tuple(self.rank({**coordinate, **dict(zip(axes, m, strict=True))}) for m in members))
        return groups

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The group over `axes` that contains `rank`."""
        here = self.coordinate(rank)
        members = itertools.product(*(range(self.degree(name)) for name in axes))
        return tuple(self.rank({**here, **dict(zip(axes, m, strict=True))}) for m in members)

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
