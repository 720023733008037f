"""`Mesh`: named axes over ranks of its own. No process group is needed.

The rank at a coordinate is `offset` plus, for each axis, the coordinate times the axis' stride. By default the last
axis is the fastest, so with axes `dp=2, tp=4` the four ranks of one tp group are neighbours, as in Megatron. What lies
at one coordinate of an axis is a mesh again (`at`): a pipeline stage is `mesh.at(STAGES, 1)`.

An axis may stand in several places: with digits `dp4, tp4, dp2` the axes are `dp=8, tp=4`, and rank 9 is at 3 on dp: at
1 on the outer digit, whose neighbours are 8 ranks apart, and at 1 on the inner one.

An axis splits into sub-axes, written as in Shardy: `tp:(1)2` is the sub-axis of 2 with 1 in front of it, `tp:(2)2` the
one of 2 behind. On `tp4` these are the outer and the inner half of 4 = 2 x 2: rank 3 is at 1 on both. What takes an
axis takes a sub-axis, and several joined by '.', the last of them varying fastest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fxpar.errors import PlacementError

Axes = tuple[tuple[str, int], ...]
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

    `digits` are the places of the axes, those of one axis outermost first; () where each has one. `strides` are the
    distances of neighbours on each digit in ranks; () is the default: outermost first, without gaps.
    """

    axes: Axes
    offset: int = 0
    strides: tuple[int, ...] = ()
    digits: Axes = ()

    def __post_init__(self) -> None:
        if self.strides and len(self.strides) != len(self.all_digits):
            raise PlacementError(f"mesh {self} has {len(self.all_digits)} axes, but {len(self.strides)} strides")
        # One way to write it, as meshes are compared.
        if self.digits:
            if _products(self.digits) != dict(self.axes):
                raise PlacementError(f"mesh {self} has the axes {self.axes}, its digits are {self.digits}")
            digits, strides = _joined(self.digits, self.strides or _compact(self.digits))
            single = len(digits) == len(self.axes)
            by_name = dict(zip((name for name, _ in digits), strides, strict=True))
            object.__setattr__(self, "digits", () if single else digits)
            object.__setattr__(self, "strides", tuple(by_name[n] for n in self.names) if single else strides)
        if self.strides == _compact(self.all_digits):
            object.__setattr__(self, "strides", ())

    @property
    def all_digits(self) -> Axes:
        """The digits of all axes: the axes themselves where each stands in one place."""
        return self.digits or self.axes

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
        for name in self.names:
            ranks = [rank + distance for rank in ranks for distance in self._far[name]]
        return tuple(ranks)

    @cached_property
    def last(self) -> int:
        """The highest rank."""
        return self.offset + sum(far[-1] for far in self._far.values())

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

    def covers(self, joined: str, axis: str) -> bool:
        """Whether a joint axis has all of `axis`, as a whole or in parts."""
        parts = [part for part in map(self.part, joined.split(".")) if part.axis == axis]
        return bool(parts) and math.prod(part.degree for part in parts) == self.degree(axis)

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
        for name, size, stride, weight in self._widest_first:
            digit = min(max(rest // stride, 0), size - 1)
            place[name] += digit * weight
            rest -= digit * stride
        return place

    @cached_property
    def _degrees(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def _digits(self) -> list[tuple[str, int, int, int]]:
        """Of each digit: axis, degree, stride, and by how much the coordinate on the axis grows with it."""
        found, weights = [], dict.fromkeys(self.names, 1)
        strides = self.strides or _compact(self.all_digits)
        for (name, size), stride in zip(reversed(self.all_digits), reversed(strides), strict=True):
            found.append((name, size, stride, weights[name]))
            weights[name] *= size
        return found[::-1]

    @cached_property
    def _widest_first(self) -> list[tuple[str, int, int, int]]:
        return sorted(self._digits, key=lambda digit: -digit[2])

    @cached_property
    def _far(self) -> dict[str, tuple[int, ...]]:
        """By axis: how far the rank at each coordinate is from that at 0."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.names, (0,))
        for name, size, stride, _ in self._digits:
            found[name] = tuple(outer + place * stride for outer in found[name] for place in range(size))
        return found

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Inverse of `coordinate`; axes that are left out are 0."""
        return self.offset + sum(far[coordinate.get(name, 0)] for name, far in self._far.items())

    def at(self, axis: str, index: int) -> Mesh:
        """The mesh of the ranks at one coordinate of `axis`, without that axis."""
        kept = [(name, size, stride) for name, size, stride, _ in self._digits if name != axis]
        axes = tuple(entry for entry in self.axes if entry[0] != axis)
        digits = tuple((name, size) for name, size, _ in kept) if self.digits else ()
        return Mesh(axes, self.rank({axis: index}), tuple(stride for *_, stride in kept), digits)

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Ranks that differ only on `axes`: one tuple per group, in the order of the mixed radix of `axes`."""
        parts = [self.part(name) for name in axes]
        fixed = [
            [i for i in range(size) if not any(p.axis == name and i // p.step % p.degree for p in parts)]
            for name, size in self.axes
        ]
        firsts = (dict(zip(self.names, place, strict=True)) for place in itertools.product(*fixed))
        return self._from(firsts, parts)

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The group over `axes` that contains `rank`."""
        first, parts = self.coordinate(rank), [self.part(name) for name in axes]
        for p in parts:
            if p.axis in first:
                first[p.axis] -= first[p.axis] // p.step % p.degree * p.step
        return self._from([first], parts)[0]

    def _from(self, firsts: Iterable[dict[str, int]], parts: Sequence[AxisPart]) -> list[tuple[int, ...]]:
        """The groups over `parts` of the ranks at these coordinates."""
        mine = [p for p in parts if p.axis in self._degrees]
        names = list(dict.fromkeys(p.axis for p in mine))
        # Coordinates are added up, not distances: a part of an axis may cut through its digits.
        places = itertools.product(*(range(0, p.degree * p.step, p.step) for p in mine))
        steps = [[sum(i for p, i in zip(mine, each, strict=True) if p.axis == n) for n in names] for each in places]
        fars = [self._far[name] for name in names]
        found = []
        for first in firsts:
            rest = self.rank({name: i for name, i in first.items() if name not in names})
            here = [first[name] for name in names]
            found.append(tuple(rest + sum(map(_behind, fars, here, each)) for each in steps))
        return found

    def in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes and sub-axes for one joint cut of a tensor: outermost first, in parts where digits of one have another
        axis between them. A process group has its ranks in ascending order, and pieces go by that.
        """
        found = sorted(axes, key=self._stride, reverse=True)
        if self.digits and not self.ascends(found):
            found = sorted(self._parts_at_digits(found), key=self._stride, reverse=True)
        return tuple(found)

    def ascends(self, axes: Sequence[str]) -> bool:
        """Whether the ranks of a group over `axes` ascend with their position on these."""
        group = self.group_of(self.offset, tuple(axes))
        return all(before < behind for before, behind in itertools.pairwise(group))

    def _parts_at_digits(self, axes: Iterable[str]) -> list[str]:
        """These axes and sub-axes, cut where digits end."""
        found = []
        for name in axes:
            axis, degree, step = self.part(name)
            whole, within = self._degrees.get(axis, 1), {step, step * degree}
            within |= {weight for one, _, _, weight in self._digits if one == axis and step < weight < step * degree}
            pairs = itertools.pairwise(sorted(within))
            found += [sub_axis(axis, whole // high, high // low) for low, high in pairs] if len(within) > 2 else [name]
        return found

    def _stride(self, name: str) -> int:
        """Distance in ranks of neighbours on an axis or a part of it."""
        part = self.part(name)
        return self._far[part.axis][part.step] if part.degree > 1 else 1

    def to_json(self) -> dict[str, Any]:
        """{"mesh": [[axis, degree], ...]}, with "offset", "strides" and "digits" where they are not the default."""
        data: dict[str, Any] = {"mesh": [list(axis) for axis in self.axes]}
        if self.offset:
            data["offset"] = self.offset
        if self.strides:
            data["strides"] = list(self.strides)
        if self.digits:
            data["digits"] = [list(digit) for digit in self.digits]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Mesh:
        axes, digits = (tuple((name, size) for name, size in data.get(key, ())) for key in ("mesh", "digits"))
        return cls(axes, data.get("offset", 0), tuple(data.get("strides", ())), digits)

    def __str__(self) -> str:
        return "x".join(f"{name}{size}" for name, size in self.all_digits) or "1"


def strides_of(digits: Axes, outermost: str) -> tuple[int, ...]:
    """Strides without gaps, the last digit fastest, but for one axis that is the slowest wherever it stands."""
    strides, step = [0] * len(digits), 1
    for place in sorted(reversed(range(len(digits))), key=lambda place: digits[place][0] == outermost):
        strides[place] = step
        step *= digits[place][1]
    return tuple(strides)


def _behind(far: tuple[int, ...], place: int, step: int) -> int:
    """How far the rank at a coordinate so much behind another one is."""
    return far[place + step]


def _compact(digits: Axes) -> tuple[int, ...]:
    """Strides without gaps, the last one fastest."""
    return tuple(math.prod(size for _, size in digits[i + 1 :]) for i in range(len(digits)))


def _products(digits: Axes) -> dict[str, int]:
    """The degrees of axes."""
    found: dict[str, int] = {}
    for name, size in digits:
        found[name] = found.get(name, 1) * size
    return found


def _joined(digits: Axes, strides: Sequence[int]) -> tuple[Axes, tuple[int, ...]]:
    """Digits and strides with each digit that another one of its axis follows without a gap joined to that."""
    found: list[tuple[str, int, int]] = []
    for (name, size), stride in zip(digits, strides, strict=True):
        outer = next((i for i in reversed(range(len(found))) if found[i][0] == name), None)
        if outer is None or found[outer][1] == 1:
            found = [one for i, one in enumerate(found) if i != outer] + [(name, size, stride)]
        elif found[outer][2] == size * stride:
            found[outer] = name, found[outer][1] * size, stride
        elif size > 1:
            found.append((name, size, stride))
    return tuple((name, size) for name, size, _ in found), tuple(stride for *_, stride in found)
