"""A minimum cut between what must be late and what must be early."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

LATE, EARLY = "late", "early"
_INFINITE = 1 << 30
_BUDGET = 1 << 28  # what all finite capacities together are scaled to: the solver counts in 32 bits
_HINT = 1


@dataclass
class CutNetwork:
    """Edges a -> b with a price: it is paid if a is late and b is early. Build it up, then ask for `late()`."""

    edges: dict[tuple[Hashable, Hashable], float] = field(default_factory=dict)
    hints: list[tuple[Hashable, Hashable]] = field(default_factory=list)

    def pay(self, a: Hashable, b: Hashable, price: float) -> None:
        """a late and b early costs `price`."""
        self.edges[a, b] = self.edges.get((a, b), 0.0) + price

    def forbid(self, a: Hashable, b: Hashable) -> None:
        """a late and b early must not be."""
        self.edges[a, b] = float("inf")

    def hint(self, node: Hashable, late: bool) -> None:
        """Where nothing is dearer, this node goes there."""
        self.hints.append((LATE, node) if late else (node, EARLY))

    def late(self) -> set[Hashable]:
        """The late side of the cheapest cut; of equally cheap ones that with the fewest late nodes."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        names = list(dict.fromkeys([LATE, EARLY, *(n for edge in (*self.edges, *self.hints) for n in edge)]))
        index = {name: i for i, name in enumerate(names)}
        finite = sum(price for price in self.edges.values() if price != float("inf"))
        weight = len(self.hints) + 1  # all hints together weigh less than the smallest price
        scale = min(1.0, _BUDGET / (finite * weight)) if finite else 1.0
        amounts: dict[tuple[int, int], int] = {}
        for (a, b), price in self.edges.items():
            whole = _INFINITE if price == float("inf") else (round(price * scale) + 1) * weight
            amounts[index[a], index[b]] = min(whole, _INFINITE)
        for a, b in self.hints:
            key = index[a], index[b]
            amounts[key] = min(amounts.get(key, 0) + _HINT, _INFINITE)
        rows, columns = (np.array([key[i] for key in amounts], dtype=np.int32) for i in (0, 1))
        capacity = csr_matrix((np.array(list(amounts.values()), dtype=np.int32), (rows, columns)), [len(names)] * 2)
        flow = maximum_flow(capacity, index[LATE], index[EARLY]).flow
        left = capacity - flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = breadth_first_order(left, index[LATE], return_predecessors=False)
        return {names[i] for i in reached}
