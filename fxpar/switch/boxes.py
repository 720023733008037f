"""Slices: the coarsest grid of a tensor in which every rank's part, before and after, is made of whole cells.

Per dim, the starts and stops of all ranks' pieces are its cuts. Pieces may be uneven, strided (several runs) or empty.
Everything is known from the layouts alone; no process group, no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh

Runs = tuple[tuple[int, int], ...]  # (start, stop), ascending, none empty


@dataclass(frozen=True)
class Pieces:
    """How a dim is cut on a mesh: the runs of each piece, and which piece each of `mesh.ranks` holds ([ranks])."""

    runs: tuple[Runs, ...]
    of_rank: np.ndarray

    @cached_property
    def table(self) -> np.ndarray:
        """[runs, 3]: start, stop and piece of every run, by start. The runs of all pieces together are the dim."""
        found = [(start, stop, number) for number, runs in enumerate(self.runs) for start, stop in runs]
        return np.array(sorted(found), np.int64).reshape(-1, 3)

    def owners(self, cuts: np.ndarray) -> np.ndarray:
        """[intervals between `cuts`]: the piece that each is part of. The pieces must end at cuts."""
        if not len(self.table):
            return np.zeros(len(cuts) - 1, np.int64)
        return self.table[np.searchsorted(self.table[:, 0], cuts[:-1], "right") - 1, 2]


def places(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """[ranks of the mesh]: the position of each on these axes or sub-axes, the last one fastest."""
    coordinates = dict(zip(mesh.names, np.unravel_index(np.arange(mesh.size), mesh.shape), strict=True))
    index = np.zeros(mesh.size, np.int64)
    for part in map(mesh.part, axes):
        index = index * part.degree + coordinates[part.axis] // part.step % part.degree
    return index


@lru_cache(maxsize=4096)
def pieces(mesh: Mesh, entries: tuple[AxisShard, ...], size: int) -> Pieces:
    """Pieces of a dim of `size` that `entries` shard."""
    index = places(mesh, tuple(axis for entry in entries for axis in entry.axis.split(".")))
    _, first, of_rank = np.unique(index, return_index=True, return_inverse=True)
    dist = DistConfig(mesh, (entries,))
    return Pieces(tuple(_runs(dist.intervals(mesh.ranks[place], 0, size)) for place in first), of_rank)


def _runs(intervals: list[tuple[int, int, int]]) -> Runs:
    return tuple(sorted((start, start + length) for _, start, length in intervals if length > 0))


@dataclass(frozen=True, eq=False)
class Holders:
    """Which ranks have which slices, by the pieces that both belong to: nothing here is [slices, ranks].

    A row per copy of a tensor: `piece` [copies, slices] is the number of the piece that a slice is part of, `has`
    [copies, world] that of the piece which a rank has (-1: none).
    """

    piece: np.ndarray
    has: np.ndarray

    def of(self, rank: int) -> np.ndarray:
        """[slices]: does `rank` have it."""
        return (self.piece == self.has[:, rank, None]).any(0)

    def of_all(self, ranks: np.ndarray) -> np.ndarray:
        """[ranks, slices]: does each of these have it."""
        return np.asarray((self.piece[:, None] == self.has[:, ranks, None]).any(0))

    @cached_property
    def table(self) -> np.ndarray:
        """[slices, world]: does a rank have a slice. For worlds that can afford it."""
        found = np.zeros((self.piece.shape[1], self.has.shape[1]), bool)
        for piece, has in zip(self.piece, self.has, strict=True):
            found |= piece[:, None] == has
        return found

    @cached_property
    def counts(self) -> np.ndarray:
        """[slices]: how many ranks have it; one with two copies counts twice."""
        total = np.zeros(self.piece.shape[1], np.int64)
        for piece, has in zip(self.piece, self.has, strict=True):
            ranks = np.bincount(has[has >= 0], minlength=int(piece.max(initial=0)) + 1)
            total += ranks[piece]
        return total

    def most(self, nbytes: np.ndarray) -> int:
        """Bytes of the fullest rank, for slices of `nbytes` [slices]."""
        sizes = [int(np.bincount(piece, nbytes).max(initial=0)) for piece in self.piece]
        return max(sizes, default=0)


@dataclass(frozen=True)
class Grid:
    """Cells of a tensor of `shape`: the product of the intervals between the `cuts` of each dim, row-major."""

    shape: tuple[int, ...]
    cuts: tuple[np.ndarray, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(cut) - 1 for cut in self.cuts)

    @cached_property
    def boxes(self) -> np.ndarray:
        """[slices, ndim, 2]: start and stop of each slice."""
        ends = [np.stack([cut[:-1], cut[1:]], -1) for cut in self.cuts]
        if not ends:
            return np.zeros((1, 0, 2), np.int64)
        index = np.indices(self.counts).reshape(len(ends), -1)
        return np.stack([end[i] for end, i in zip(ends, index, strict=True)], 1)

    @cached_property
    def numel(self) -> np.ndarray:
        """[slices]: elements of each slice."""
        return (self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(-1, dtype=np.int64)

    def holders(self, copies: Sequence[DistConfig], world: int) -> Holders:
        """Who of `world` ranks has which slices of these copies, whose pieces must end at cuts."""
        piece = np.zeros((len(copies), math.prod(self.counts)), np.int64)
        has = np.full((len(copies), world), -1)
        for row, dist in enumerate(copies):
            of_slice, of_rank = np.zeros(1, np.int64), np.zeros(dist.mesh.size, np.int64)
            for d, (size, cut) in enumerate(zip(self.shape, self.cuts, strict=True)):
                cutting = pieces(dist.mesh, dist.dims[d], size)
                count = len(cutting.runs)
                of_slice = (of_slice[:, None] * count + cutting.owners(cut)).ravel()
                of_rank = of_rank * count + cutting.of_rank
            piece[row] = of_slice
            has[row, list(dist.mesh.ranks)] = of_rank
        return Holders(piece, has)


def refine(shape: tuple[int, ...], copies: Sequence[DistConfig]) -> Grid:
    """The common refinement of all copies of a tensor of `shape`."""
    cuts = []
    for d, size in enumerate(shape):
        tables = [pieces(dist.mesh, dist.dims[d], size).table[:, :2].ravel() for dist in dict.fromkeys(copies)]
        cuts.append(np.unique(np.concatenate([*tables, np.array([0, size], np.int64)])))
    return Grid(shape, tuple(cuts))
