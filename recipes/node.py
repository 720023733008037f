"""The ranks of a node: what one of them reads, all are given."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch.distributed as dist

from fxpar.errors import DataDrawError
from fxpar.transport.groups import ProcessGroups

T = TypeVar("T")


class Node:
    """The ranks that share this rank's node, ascending, and its `place` among them. All ranks of the world make it.

    A node is what torchrun calls one (GROUP_RANK); without torchrun, what has one host name. Messages stay on the CPU.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = (0,)
        self.place = 0
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._meet()

    def _meet(self) -> None:
        mine = os.environ.get("GROUP_RANK") or socket.gethostname()
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, mine)
        groups = ProcessGroups(backend="gloo")
        for name in dict.fromkeys(names):
            ranks = tuple(rank for rank, other in enumerate(names) if other == name)
            group = groups.of(ranks)
            if name == mine:
                self.ranks, self._group = ranks, group
        self.place = self.ranks.index(dist.get_rank())

    def shared(self, places: Collection[int], make: Callable[[], T]) -> list[T]:
        """What `make()` returns on these places, which do it at the same time, on all ranks of the node.

        It must pickle, and all ranks of the node call this alike. Where `make` fails on one of them, that one raises
        its own error and all others DataDrawError.
        """
        own: Exception | None = None
        packet: tuple[str, Any] = "", None
        if self.place in places:
            try:
                packet = "", make()
            except Exception as error:
                own, packet = error, (f"{type(error).__name__}: {error}", None)
        found = [(place, *self._given(place, packet)) for place in places]
        if own is not None:
            raise own
        for place, problem, _ in found:
            if problem:
                raise DataDrawError(self.ranks[place], problem)
        return [value for _, _, value in found]

    def _given(self, place: int, packet: tuple[str, Any]) -> tuple[str, Any]:
        """The packet of the rank at `place`."""
        if self._group is None:
            return packet
        box = [packet]
        dist.broadcast_object_list(box, src=self.ranks[place], group=self._group)
        return box[0]


__all__ = ["Node"]
