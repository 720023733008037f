"""`Handover`: what the ranks of a pipeline stage send to those of its neighbour, where pieces of the two meet.

Two stages may differ in mesh and in what cuts tokens: each rank gets what it holds from those that have it.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy

from fxpar.ir.axes import REPLICAS
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Stored
from fxpar.ir.mesh import Mesh

Span = tuple[int, int]  # start and stop
Runs = tuple[tuple[tuple[int, int, int], ...], ...]  # of each dim (local start, global start, length)


@dataclass(frozen=True)
class Message:
    """Rank `source` sends `taken` of what it holds (start and stop of each dim), rank `target` has it at `put`."""

    source: int
    target: int
    taken: tuple[Span, ...]
    put: tuple[Span, ...]

    @property
    def numel(self) -> int:
        """Elements that it carries."""
        size = 1
        for start, stop in self.taken:
            size *= stop - start
        return size


@dataclass(frozen=True)
class Handover:
    """Value `fqn`, an activation ("sent") or a gradient ("sent_grad"), on its way from a stage to the next or the one
    before: how it lies on the one (`given`) and on the other (`taken`).
    """

    kind: str
    fqn: str
    stage: int
    to: int
    given: Stored
    taken: Stored

    @property
    def alike(self) -> bool:
        """Whether each rank sends all that it has to the one at its place."""
        before, after = self.given.dist, self.taken.dist
        return before.dims == after.dims and before.mesh.axes == after.mesh.axes

    def messages(self, dims: Mapping[sympy.Symbol, int], replica: int = 0) -> tuple[Message, ...]:
        """What goes between the ranks of a replica, in the order in which each of them sends and receives."""
        shape = self.given.meta.sizes(dict(dims))
        return messages(self.given.dist, self.taken.dist, tuple(shape), replica)

    def bytes_of_busiest(self, dims: Mapping[sympy.Symbol, int], *, received: bool = False) -> int:
        """The most that a rank sends of it, or receives."""
        if self.alike:
            return self.given.local.numel(dict(dims)) * self.given.local.dtype.itemsize
        total: dict[int, int] = defaultdict(int)
        for each in self.messages(dims):
            total[each.target if received else each.source] += each.numel
        return max(total.values(), default=0) * self.given.local.dtype.itemsize

    def most_messages(self, dims: Mapping[sympy.Symbol, int]) -> int:
        """The most that a rank sends or receives."""
        if self.alike:
            return 1
        found = self.messages(dims)
        ends = [[each.source for each in found], [each.target for each in found]]
        return max((ranks.count(rank) for ranks in ends for rank in set(ranks)), default=0)


@functools.lru_cache(maxsize=4096)  # micro-batches are of few lengths
def messages(before: DistConfig, after: DistConfig, shape: tuple[int, ...], replica: int) -> tuple[Message, ...]:
    """What the ranks of a replica send, so that each of `after` gets all that it holds, every element once: from the
    rank itself where that has it, else from the one at its own place, else from the one of those that have it which has
    least to send.
    """
    sources, targets = _ranks(before.mesh, replica), _ranks(after.mesh, replica)
    held: dict[Runs, list[int]] = defaultdict(list)  # ranks that hold the same, by their place
    for place, rank in enumerate(sources):
        held[_runs(before, rank, shape)].append(place)
    load = [0] * len(sources)
    found: list[Message] = []
    for number, target in enumerate(targets):
        wanted = _runs(after, target, shape)
        own = (sources.index(target),) if target in sources else ()
        for runs, places in held.items():
            at_hand = next((place for place in (*own, number) if place in places), None)
            here = min(places, key=lambda place: (load[place], place)) if at_hand is None else at_hand
            parts = [Message(sources[here], target, *boxes) for boxes in _meetings(runs, wanted)]
            load[here] += sum(part.numel for part in parts)
            found += parts
    return tuple(found)


def _ranks(mesh: Mesh, replica: int) -> tuple[int, ...]:
    return mesh.at(REPLICAS, replica).ranks if REPLICAS in mesh.names else mesh.ranks


def _runs(dist: DistConfig, rank: int, shape: tuple[int, ...]) -> Runs:
    return tuple(tuple(dist.intervals(rank, d, size)) for d, size in enumerate(shape))


def _meetings(one: Runs, other: Runs) -> Iterator[tuple[tuple[Span, ...], tuple[Span, ...]]]:
    """The boxes that both hold, where each has them."""
    for pairs in itertools.product(*(itertools.product(*dim) for dim in zip(one, other, strict=True))):
        taken, put = [], []
        for (here, first, count), (there, second, length) in pairs:
            start, stop = max(first, second), min(first + count, second + length)
            if start >= stop:
                break
            taken.append((here + start - first, here + stop - first))
            put.append((there + start - second, there + stop - second))
        else:
            yield tuple(taken), tuple(put)
