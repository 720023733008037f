"""Process groups of a mesh, made once and kept: one per set of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fxpar.mesh import Mesh


class ProcessGroups:
    """All process groups that a rank needs. Every rank must ask for the same meshes and axes in the same order."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def names(self, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, str]:
        """Group name of this rank for each entry of `axes` (an entry may join several axes by '.')."""
        rank = dist.get_rank()
        names = {}
        for axis in axes:
            for ranks in mesh.groups(tuple(axis.split("."))):
                if ranks not in self._groups:
                    group: Any = dist.new_group(list(ranks))
                    self._groups[ranks] = group if rank in ranks else None
            mine = self._groups[mesh.group_of(rank, tuple(axis.split(".")))]
            assert mine is not None
            names[axis] = str(mine.group_name)
        return names
