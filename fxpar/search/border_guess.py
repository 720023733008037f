"""A guess at what switches and reductions take, from the bytes that must travel: no message is planned.

For each slice of a tensor it is counted who lacks it: a node that nobody has it on takes it in once, and hands it on
inside. Of a gradient each node adds its terms first. It is counted node by node, so that a few stand for many nodes.
Ranks are taken to share the bytes evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import DistConfig
from fxpar.switch.boxes import Grid, refine
from fxpar.switch.layout import ParamLayout, PlacedParam
from fxpar.switch.terms import GradientPlacement, without_partial

MOST_NODES = 8  # that are looked at


class Travels(NamedTuple):
    """Bytes of all ranks, inside of nodes and between them."""

    inside: float
    between: float


@dataclass
class BorderGuess:
    """`world` ranks of a cluster; what is worked out of a tensor is kept."""

    cluster: ClusterSpec
    world: int
    _grids: dict[tuple[tuple[int, ...], tuple[DistConfig, ...]], Grid] = field(default_factory=dict)
    _tables: dict[tuple[int, tuple[DistConfig, ...]], np.ndarray] = field(default_factory=dict)
    _lacking: dict[tuple[PlacedParam, ...], Travels] = field(default_factory=dict)

    def seconds(self, found: Iterable[Travels]) -> float:
        """In which these travel one behind the other."""
        inside, between = (float(self.cluster.bytes_per_s(level)) for level in (False, True))
        return sum(one.inside / inside + one.between / between for one in found) / self.world

    def switch(self, sources: Sequence[ParamLayout], target: ParamLayout) -> Travels:
        """To a layout from others that all hold their weights."""
        counts = Counter((param, *(source.params[fqn] for source in sources)) for fqn, param in target.params.items())
        return _summed((self._missing(each), count) for each, count in counts.items())

    def _missing(self, placed: tuple[PlacedParam, ...]) -> Travels:
        """Of a tensor on its way to the first placement from the others."""
        if placed not in self._lacking:
            target, *sources = placed
            grid = self._grid(target.shape, tuple(copy for one in placed for copy in one.copies))
            needs = self._table(grid, target.copies)
            has = np.logical_or.reduce([self._table(grid, one.copies) for one in sources])
            lacks = (needs & ~has).reshape(len(needs), -1, self._devices)
            enters = lacks.any(2) & ~has.reshape(lacks.shape).any(2)
            inside, between = (lacks.sum(2) - enters).sum(1), enters.sum(1)
            self._lacking[placed] = self._travels(grid.numel * target.dtype.itemsize, inside, between)
        return self._lacking[placed]

    def reduction(self, terms: Iterable[tuple[GradientPlacement, ...]], homes: Iterable[PlacedParam]) -> Travels:
        """Of gradients to their home, beyond what they send in any order that keeps the ranks of a node together."""
        counts = Counter(zip(terms, homes, strict=True))
        return _summed((self._added(placed, home), count) for (placed, home), count in counts.items())

    def _added(self, placed: tuple[GradientPlacement, ...], home: PlacedParam) -> Travels:
        whole = without_partial(placed)
        grid = self._grid(home.shape, (*home.copies, *whole.copies))
        owners, holds = self._table(grid, home.copies), self._table(grid, whole.copies)
        shape = len(owners), -1, self._devices
        # Where the owner's node has terms, one sum less comes from another node, and its terms are added at the owner:
        # all are sent to it but its own.
        here = (owners.reshape(shape).any(2) & holds.reshape(shape).any(2)).sum(1)
        own = (owners & holds).sum(1)
        return self._travels(grid.numel * placed[0].dtype.itemsize, here - own, -here)

    def _travels(self, nbytes: np.ndarray, inside: np.ndarray, between: np.ndarray) -> Travels:
        """Of all ranks, for as many times as slices of `nbytes` [slices] are sent by those looked at."""
        share = self.world / len(self._ranks)
        return Travels(float(nbytes @ inside) * share, float(nbytes @ between) * share)

    @property
    def _devices(self) -> int:
        """Of a node."""
        return min(self.cluster.devices_per_node, self.world)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """Those that are looked at: of nodes at equal distances."""
        nodes = self.world // self._devices
        chosen = np.unique(np.linspace(0, nodes - 1, min(nodes, MOST_NODES)).astype(int))
        return (chosen[:, None] * self._devices + np.arange(self._devices)).ravel()

    def _grid(self, shape: tuple[int, ...], copies: tuple[DistConfig, ...]) -> Grid:
        if (shape, copies) not in self._grids:
            self._grids[shape, copies] = refine(shape, copies)
        return self._grids[shape, copies]

    def _table(self, grid: Grid, copies: tuple[DistConfig, ...]) -> np.ndarray:
        """[slices, ranks that are looked at]: who has what."""
        key = id(grid), copies
        if key not in self._tables:
            found = grid.holders(copies, self.world)
            self._tables[key] = replace(found, has=found.has[:, self._ranks]).table
        return self._tables[key]


def _summed(found: Iterable[tuple[Travels, int]]) -> Travels:
    pairs = list(found)
    return Travels(*(sum(one[level] * count for one, count in pairs) for level in (0, 1)))


__all__ = ["BorderGuess", "Travels"]
