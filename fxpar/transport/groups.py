"""Process groups, made once and kept: one per set of ranks."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpar.ir.mesh import Mesh
from fxpar.torch_api.groups import group_of_members, members_suffice

# How many there are within each process group, for the names of groups: a rank may be a thread with a world of its own.
_MADE: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class ProcessGroups:
    """The process groups that this rank needs: each is made by its members only, where the backend allows it.

    All ranks of `within` (None: the default process group) ask for the same meshes and axes in the same order, and make
    their ProcessGroups in the same order. `timeout_s` bounds every wait in them; None leaves torch's default (30
    minutes with gloo). `backend`: "gloo" for messages that stay on the CPU, by default that of the default group.
    """

    def __init__(
        self, timeout_s: float | None = None, within: dist.ProcessGroup | None = None, backend: str | None = None
    ) -> None:
        parent: Any = within if within is not None else dist.group.WORLD
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}
        self._backend = backend
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._ranks = tuple(dist.get_process_group_ranks(parent))
        number = _MADE[parent] = _MADE.get(parent, 0) + 1
        self._name = f"fxpar {parent.group_name} {number}"

    def world(self, purpose: str = "") -> dist.ProcessGroup:
        """A group of all ranks with this timeout; another one for each `purpose`."""
        return self.of(self._ranks, purpose)

    @property
    def count(self) -> int:
        """How many groups this rank is in."""
        return sum(group is not None for group in self._groups.values())

    def names(self, mesh: Mesh, axes: tuple[str, ...]) -> dict[str, str]:
        """Group name of this rank for each entry of `axes` (an entry may join several axes by '.'); none outside of the
        mesh.
        """
        names: dict[str, str] = {}
        for axis in axes:
            for ranks in self.to_make(mesh, tuple(axis.split("."))):
                group = self.of(ranks)
                if group is not None:
                    names[axis] = str(group.group_name)
        return names

    def to_make(self, mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The ranks of the groups along `axes` that this rank has to make: its own, or all where all ranks must."""
        rank = dist.get_rank()
        if not members_suffice():
            return mesh.groups(axes)
        return [mesh.group_of(rank, axes)] if rank in mesh else []

    def of(self, ranks: tuple[int, ...], purpose: str = "") -> Any:
        """The group of these ranks (None on others); another one for each `purpose`."""
        key = tuple(sorted(ranks)), purpose
        if key not in self._groups:
            self._groups[key] = self._make(*key)
        return self._groups[key]

    def of_places(self, places: Sequence[int]) -> Any:
        """The group of these ranks as `within` counts them, for all-gathers of a switch."""
        return self.of(tuple(self._ranks[place] for place in places), "switch")

    def _make(self, ranks: tuple[int, ...], purpose: str) -> Any:
        if members_suffice():
            if dist.get_rank() not in ranks:
                return None
            members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
            return group_of_members(ranks, f"{self._name} {members} {purpose}", self._timeout, self._backend)
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend)
        return group if dist.get_rank() in ranks else None


_SHARED: weakref.WeakKeyDictionary[Any, ProcessGroups] = weakref.WeakKeyDictionary()


def shared_groups() -> ProcessGroups:
    """The groups of what has no session, made once within the default process group: messages that the user sends there
    are left alone. All ranks ask for them.
    """
    default = dist.group.WORLD
    if default not in _SHARED:
        _SHARED[default] = ProcessGroups()
    return _SHARED[default]
