"""Process groups of a mesh, made once and kept: one per set of ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpar.mesh import Mesh


class ProcessGroups:
    """All process groups that a rank needs. Every rank must ask for the same meshes and axes in the same order.

    `timeout_s` bounds every wait in them; None leaves torch's default (30 minutes with gloo).
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def world(self) -> dist.ProcessGroup:
        """A group of all ranks with this timeout."""
        ranks = tuple(range(dist.get_world_size()))
        group = self._make(ranks, dist.get_rank())
        assert group is not None
        return group

    def _make(self, ranks: tuple[int, ...], rank: int) -> dist.ProcessGroup | None:
        if ranks not in self._groups:
            group: Any = dist.new_group(list(ranks), timeout=self._timeout)
            self._groups[ranks] = group if rank in ranks else None
        return self._groups[ranks]

    def names(self, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, str]:
        """Group name of this rank for each entry of `axes` (an entry may join several axes by '.')."""
        rank = dist.get_rank()
        names = {}
        for axis in axes:
            for ranks in mesh.groups(tuple(axis.split("."))):
                self._make(ranks, rank)
            mine = self._groups[mesh.group_of(rank, tuple(axis.split(".")))]
            assert mine is not None
            names[axis] = str(mine.group_name)
        return names
