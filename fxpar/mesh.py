"""`Mesh`: named axes over a contiguous range of ranks. No process group is needed.

The first axis is the outermost: rank = mixed-radix number of the coordinates, last axis fastest. So with axes
`dp=2, tp=4` the four ranks of one tp group are neighbours, as in Megatron.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Ordered named axes with degrees, outermost first; degree-1 axes are legal and do nothing."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

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
        """Coordinate of `rank` on each axis."""
        coordinate = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """Inverse of `coordinate`; axes that are left out are 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

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

    def __str__(self) -> str:
        return "x".join(f"{name}{size}" for name, size in self.axes) or "1"
