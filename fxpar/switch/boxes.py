"""Slices: the coarsest grid of a tensor in which every rank's part, before and after, is made of whole cells.

Per dim, the starts and stops of all ranks' pieces are its cuts. Pieces may be uneven, strided (several runs) or empty.
Everything is known from the layouts alone; no process group, no tensor.
"""

from __future__ import annotations

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


@lru_cache(maxsize=4096)
def pieces(mesh: Mesh, entries: tuple[AxisShard, ...], size: int) -> Pieces:
    """Pieces of a dim of `size` that `entries` shard."""
    coordinates = dict(zip(mesh.names, np.unravel_index(np.arange(mesh.size), mesh.shape), strict=True))
    index = np.zeros(mesh.size, np.int64)
    for entry in entries:
        for part in map(mesh.part, entry.axis.split(".")):
            index = index * part.degree + coordinates[part.axis] // part.step % part.degree
    _, first, of_rank = np.unique(index, return_index=True, return_inverse=True)
    dist = DistConfig(mesh, (entries,))
    return Pieces(tuple(_runs(dist.intervals(mesh.ranks[place], 0, size)) for place in first), of_rank)


def _runs(intervals: list[tuple[int, int, int]]) -> Runs:
    return tuple(sorted((start, start + length) for _, start, length in intervals if length > 0))


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

    def held(self, dist: DistConfig) -> np.ndarray:
        """[ranks of the mesh, slices]: which slices each rank holds. The placement's pieces must end at cuts."""
        result = np.ones((dist.mesh.size, 1), bool)
        for d, (size, cut) in enumerate(zip(self.shape, self.cuts, strict=True)):
            cutting = pieces(dist.mesh, dist.dims[d], size)
            mask = np.zeros((len(cutting.runs), len(cut) - 1), bool)
            for row, runs in zip(mask, cutting.runs, strict=True):
                for start, stop in runs:
                    row[np.searchsorted(cut, start) : np.searchsorted(cut, stop)] = True
            result = (result[:, :, None] & mask[cutting.of_rank][:, None, :]).reshape(len(result), -1)
        return result

    def holders(self, copies: Sequence[DistConfig], world: int) -> np.ndarray:
        """[slices, ranks]: which ranks hold each slice in any of these copies."""
        table = np.zeros((world, len(self.boxes)), bool)
        for dist in copies:
            table[np.array(dist.mesh.ranks)] |= self.held(dist)
        return np.ascontiguousarray(table.T)


def refine(shape: tuple[int, ...], copies: Sequence[DistConfig]) -> Grid:
    """The common refinement of all copies of a tensor of `shape`."""
    cuts = []
    for d, size in enumerate(shape):
        ends = {0, size}
        for dist in set(copies):
            for runs in pieces(dist.mesh, dist.dims[d], size).runs:
                ends.update(end for run in runs for end in run)
        cuts.append(np.array(sorted(ends), np.int64))
    return Grid(shape, tuple(cuts))
