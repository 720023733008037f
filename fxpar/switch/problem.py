"""`SwitchProblem`: what a planner decides on, tensors of one kind put together.

Tensors with equal shape and dtype that lie alike before and after (the same weight of all layers of a stage) have the
same slices, holders and needers, so these are worked out once per *tensor class*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import LayoutError, NoOwnerError, nearest
from fxpar.ir.dist_config import DistConfig
from fxpar.switch.boxes import Holders, refine
from fxpar.switch.layout import ParamLayout


@dataclass(frozen=True, eq=False)
class TensorClass:
    """`members` are tensor numbers; `boxes` is [slices, ndim, 2]; who has the slices, `before` and `after`.

    `held`, `needed` and `missing` are [slices, ranks], made when a planner asks for them: thousands of ranks cannot.
    `giving` and `getting` have that shape, or [ranks].
    """

    members: np.ndarray
    shape: tuple[int, ...]
    itemsize: int
    boxes: np.ndarray
    nbytes: np.ndarray  # [slices], of one tensor
    before: Holders
    after: Holders
    giving: np.ndarray | None = None  # of those that have or need a slice, who counts; None: all
    getting: np.ndarray | None = None

    @cached_property
    def held(self) -> np.ndarray:
        return self.before.table if self.giving is None else self.before.table & self.giving

    @cached_property
    def needed(self) -> np.ndarray:
        return self.after.table if self.getting is None else self.after.table & self.getting

    @cached_property
    def missing(self) -> np.ndarray:
        """What must travel; a rank that holds what it needs copies it at home."""
        return self.needed & ~self.held

    def stays(self, rank: int) -> np.ndarray:
        """[slices]: what `rank` holds and needs."""
        return self.before.of(rank) & self.after.of(rank)


@dataclass(frozen=True, eq=False)
class SwitchProblem:
    """All tensors of a switch on a cluster, from `source` (and further holders) to `target`."""

    cluster: ClusterSpec
    source: str
    target: str
    world: int
    tensors: tuple[str, ...]
    classes: tuple[TensorClass, ...]

    @cached_property
    def node_of(self) -> np.ndarray:
        """[ranks]: node of each rank."""
        return np.arange(self.world) // self.cluster.devices_per_node

    @cached_property
    def class_of(self) -> np.ndarray:
        """[tensors]: class of each tensor."""
        result = np.zeros(len(self.tensors), np.int64)
        for index, cls in enumerate(self.classes):
            result[cls.members] = index
        return result

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.world // self.cluster.devices_per_node)

    @cached_property
    def local_bytes(self) -> int:
        """Bytes that ranks already hold and need, over all ranks."""
        return sum(int(len(c.members) * (c.nbytes * (c.needed & c.held).sum(1)).sum()) for c in self.classes)

    def box_text(self, tensor: int, piece: int) -> str:
        """`[0:4, 8:16]` for a slice of a tensor."""
        box = self.classes[self.class_of[tensor]].boxes[piece]
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


Alike = Mapping[tuple, list[int]]  # (shape, item size, copies per source, copies in the target) -> tensor numbers


def alike_tensors(
    source: ParamLayout, target: ParamLayout, cluster: ClusterSpec, holders: Sequence[ParamLayout] = ()
) -> tuple[int, Alike]:
    """The number of ranks, and the tensors that lie alike in all of these layouts, together; `holders` are further
    valid sources (copies of earlier graphs, the home shard), which need not have all tensors.

    Raises LayoutError (layouts of different models), ClusterError (too few devices).
    """
    sources = (source, *holders)
    world = max(layout.world for layout in (*sources, target))
    cluster.require(world)
    _check_has_all(source, target)
    for layout in sources:
        _check_same_tensors(layout, target)
    alike: dict[tuple, list[int]] = {}
    for number, (fqn, param) in enumerate(target.params.items()):
        before = tuple(layout.params[fqn].copies if fqn in layout.params else () for layout in sources)
        alike.setdefault((param.shape, param.dtype.itemsize, before, param.copies), []).append(number)
    return world, alike


def problem_of(alike: Alike, target: ParamLayout, source: str, world: int, cluster: ClusterSpec) -> SwitchProblem:
    """The problem of these tensors; all sources count as holders. Raises NoOwnerError."""
    tensors = tuple(target.params)
    classes = []
    for (shape, itemsize, sources, after), members in alike.items():
        before = tuple(dist for copies in sources for dist in copies)
        cls = class_of_tensors(members, shape, itemsize, before, after, world)
        _check_owners(cls, tensors[members[0]])
        classes.append(cls)
    return SwitchProblem(cluster, source, target.name, world, tensors, tuple(classes))


def class_of_tensors(
    members: Sequence[int],
    shape: tuple[int, ...],
    itemsize: int,
    before: Sequence[DistConfig],
    after: Sequence[DistConfig],
    world: int,
) -> TensorClass:
    """The class of tensors that lie like `before` and are to lie like `after`."""
    grid = refine(shape, (*before, *after))
    holders, needers = grid.holders(before, world), grid.holders(after, world)
    return TensorClass(np.array(members), shape, itemsize, grid.boxes, grid.numel * itemsize, holders, needers)


def _check_has_all(layout: ParamLayout, target: ParamLayout) -> None:
    for fqn in target.params:
        if fqn not in layout.params:
            raise LayoutError(layout.name, f"has no parameter {fqn!r} of {target.name!r}{nearest(fqn, layout.params)}")


def _check_same_tensors(layout: ParamLayout, target: ParamLayout) -> None:
    for fqn, param in target.params.items():
        other = layout.params.get(fqn, param)
        if other.shape != param.shape or other.dtype != param.dtype:
            raise LayoutError(
                layout.name,
                f"{fqn} is {other.dtype} {list(other.shape)}, but {param.dtype} {list(param.shape)} in {target.name!r}",
            )


def _check_owners(cls: TensorClass, fqn: str) -> None:
    lost = (cls.after.counts > 0) & (cls.before.counts == 0)
    if lost.any():
        first = int(np.argmax(lost))
        box = "[" + ", ".join(f"{start}:{stop}" for start, stop in cls.boxes[first]) + "]"
        raise NoOwnerError(fqn, box, ", ".join(map(str, np.flatnonzero(cls.needed[first])[:4])))
