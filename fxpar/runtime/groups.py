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
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def world(self) -> dist.ProcessGroup:
        """A group of all ranks with this timeout."""
        return self.of(tuple(range(dist.get_world_size())))

    def names(self, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, str]:
        """Group name of this rank for each entry of `axes` (an entry may join several axes by '.').

        Ranks outside of the mesh take part in making the groups, and get no names.
        """
        rank = dist.get_rank()
        names = {}
        for axis in axes:
            for members in mesh.groups(tuple(axis.split("."))):
                group = self.of(members)
                if rank in members:
                    names[axis] = str(group.group_name)
        return names

    def of(self, ranks: tuple[int, ...], purpose: str = "") -> Any:
        """The group of these ranks (None on others); another one for each `purpose`. All ranks ask for it."""
        if (ranks, purpose) not in self._groups:
            group: Any = dist.new_group(list(ranks), timeout=self._timeout)
            self._groups[ranks, purpose] = group if dist.get_rank() in ranks else None
        return self._groups[ranks, purpose]
