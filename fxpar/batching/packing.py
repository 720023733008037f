"""How a group runs, and the two moves of planning: spread sequences over replicas, pack them into micro-batches.

Costs are whole ticks (1e-15 s): integer sums do not depend on their order, so all ranks find the same plan.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fxpar.cost.group_cost import ZB_H1_SHORTER

TICKS_PER_S = 10**15


def ticks(seconds: float) -> int:
    """Seconds in whole ticks."""
    return round(seconds * TICKS_PER_S)


@dataclass(frozen=True)
class PackingRule:
    """How a group runs: `budget` is the most tokens of a micro-batch, `fixed` its fixed cost in ticks; `stages`,
    `virtual` and `shared_by` as in `GroupCost`, `zero_bubble` for its zb_h1. Without `packed` each sequence is a
    micro-batch of its own. Where a micro-batch is packed in several `bins`, `replicas` are those of all replicas, and
    `budget` is of a bin: every `bins` of them that follow each other run side by side.
    """

    replicas: int
    budget: int
    fixed: int = 0
    lockstep: bool = False
    packed: bool = True
    stages: int = 1
    virtual: int = 1
    shared_by: float = 1.0
    zero_bubble: bool = False
    bins: int = 1

    @property
    def unit(self) -> int:
        """A replica's micro-batches are filled up with idle ones to a multiple of this."""
        return self.stages if self.virtual > 1 else 1

    @property
    def shorter(self) -> int:
        """By so many times, at most, a pipeline fills and drains faster than under 1f1b."""
        return ZB_H1_SHORTER if self.zero_bubble else self.virtual

    def fill(self, cost: int) -> int:
        """Ticks to fill and drain the pipeline, at least, if the dearest micro-batch costs this; rounded up."""
        return -(-(self.stages - 1) * (self.fixed + cost) // self.shorter)

    def _bubble(self, costs: Sequence[int]) -> int:
        """As `GroupCost` has it; rounded up."""
        if not self.zero_bubble or self.stages == 1:
            return self.fill(max(costs))
        first, *others = sorted(costs, reverse=True)[: self.stages]
        waits = 2 * (self.stages - 1) * (self.fixed + first)
        return -((sum(others) + self.fixed * len(others) - waits) // ZB_H1_SHORTER)

    def time(self, costs: Sequence[int]) -> int:
        """Ticks of micro-batches of these costs, one after the other."""
        if not costs:
            return 0
        idle = -len(costs) % self.unit
        return sum(costs) + idle * min(costs) + self.fixed * (len(costs) + idle) + self._bubble(costs)

    def shared(self, slowest: int, work: int) -> int:
        """Ticks of a group whose slowest replica takes `slowest` and whose replicas take `work` together, where ranks
        that wait leave their core to others.
        """
        return slowest if self.shared_by == 1 else max(int(slowest / self.shared_by), work // self.replicas)


class SequenceItem(NamedTuple):
    """A sequence: its index in the mini-batch, its tokens, what it adds to the cost of a micro-batch."""

    index: int
    tokens: int
    cost: int


class Bin(NamedTuple):
    """Sequences packed together; `cost` leaves out the fixed cost of a run."""

    items: tuple[SequenceItem, ...]
    tokens: int
    cost: int


Part = TypeVar("Part", SequenceItem, Bin)


def as_bin(items: Iterable[SequenceItem]) -> Bin:
    kept = tuple(items)
    return Bin(kept, sum(i.tokens for i in kept), sum(i.cost for i in kept))


def longest_first(items: Iterable[SequenceItem]) -> list[SequenceItem]:
    """By descending cost and length; equal ones by index."""
    return sorted(items, key=lambda i: (-i.cost, -i.tokens, i.index))


def dearest_first(bins: Iterable[Bin]) -> list[Bin]:
    """By descending cost and length; equal ones by their first sequence."""
    return sorted(bins, key=lambda b: (-b.cost, -b.tokens, b.items[0].index))


def spread(
    parts: Sequence[Part], replicas: int, fixed: int = 0, first: Callable[[int], int] | None = None
) -> list[list[Part]]:
    """Each part, dearest first, to the replica that has least so far: at most 4/3 - 1/(3 replicas) of the optimum.

    Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969), rule LPT. `fixed` is added to
    the cost of each part, `first(cost)` to that of a replica's first part, its dearest. Replicas of equal cost are told
    apart by tokens (a cost model may be blind to them).
    """
    loads = [(0, 0, r) for r in range(replicas)]
    shares: list[list[Part]] = [[] for _ in range(replicas)]
    for part in parts:
        cost, tokens, r = loads[0]
        shares[r].append(part)
        if first is not None and len(shares[r]) == 1:
            cost += first(part.cost)
        heapq.heapreplace(loads, (cost + fixed + part.cost, tokens + part.tokens, r))
    return shares


def pack(items: Sequence[SequenceItem], budget: int) -> list[Bin]:
    """Items, longest first, into few bins of at most `budget` tokens: each into the fullest bin that has room.

    Best fit decreasing: at most 11/9 of the fewest bins, plus one (Johnson, "Near-Optimal Bin Packing Algorithms",
    MIT thesis, 1973).
    """
    bins: list[list[SequenceItem]] = []
    costs: list[int] = []
    free_in: list[int] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for item in items:
        at = bisect_left(room, (item.tokens, -1))
        if at < len(room):
            free, b = room.pop(at)
        else:
            free, b = budget, len(bins)
            bins.append([])
            costs.append(0)
            free_in.append(budget)
        bins[b].append(item)
        costs[b] += item.cost
        free -= item.tokens
        free_in[b] = free
        if free:
            room.insert(bisect_left(room, (free, b)), (free, b))
    return [Bin(tuple(found), budget - left, cost) for found, left, cost in zip(bins, free_in, costs, strict=True)]


def spread_within(items: Sequence[SequenceItem], count: int, budget: int) -> list[Bin] | None:
    """Items, dearest first, over `count` bins of at most `budget` tokens, each into the cheapest one with room.

    None if an item finds no room, or if finding it takes too long.
    """
    heap = [(0, 0, b) for b in range(count)]  # (cost, tokens, bin)
    bins: list[list[SequenceItem]] = [[] for _ in range(count)]
    sums = [(0, 0)] * count  # tokens and cost of each bin
    least = min(item.tokens for item in items)
    patience = 16 * len(items) + 64
    for item in items:
        _, more_tokens, more_cost = item
        full = []
        while heap and heap[0][1] + more_tokens > budget:
            full.append(heapq.heappop(heap))
        patience -= len(full)
        if not heap or patience < 0:
            return None
        cost, tokens, b = heap[0]
        bins[b].append(item)
        cost, tokens = cost + more_cost, tokens + more_tokens
        sums[b] = tokens, cost
        heapq.heapreplace(heap, (cost, tokens, b))
        for entry in full:
            if entry[1] + least <= budget:
                heapq.heappush(heap, entry)
    return [Bin(tuple(members), *both) for members, both in zip(bins, sums, strict=True) if members]
