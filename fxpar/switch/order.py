"""In which order the graphs of a mini-batch run, which one is first, and what is kept.

Two flows. That of a run (`Training`): weights come from the optimizer's home layout, which is cut over all ranks, and
from graphs that have run before; gradients leave each graph straight for home, as the terms that they are. So K graphs
cost K hops of weights and K of gradients.

HotSPa's: the first graph holds the home layout. Weights go from it to the second graph and on to the last one; the
first graph itself computes last, from its own weights. So K graphs cost K-1 weight hops, and for the gradients that
they accumulate, by `gradients`:

    chain   graph to graph behind the weights, then to the home layout (as the paper does): K-1 hops
    home    from each graph straight to the home layout: K-1 hops
    none    not counted

Weights do not change within a mini-batch: a copy of an earlier graph that is kept is a further source of all later
hops, at the price of its memory. Costs are those of plans, worked out once per pair and set of sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import OrderError, nearest
from fxpar.switch.api import plan_switch
from fxpar.switch.layout import ParamLayout
from fxpar.switch.node_first import cheapest_reduction
from fxpar.switch.terms import Placements

EXHAUSTIVE = 6  # graphs; 720 orders
MAX_KEPT = 2  # graphs that may be kept at a time, of a limited memory
HOME = "home"
Gradients = Literal["chain", "home", "none"]
Objective = Literal["bytes", "seconds"]


@dataclass(frozen=True)
class Training:
    """What a run of fxpar has beside its graphs: `masters`, the optimizer's home layout; `weights`, the same in the
    dtypes that travel; `gradients`, how they leave each graph, by its name.
    """

    masters: ParamLayout
    weights: ParamLayout
    gradients: Mapping[str, Placements]


@dataclass(frozen=True)
class Hop:
    """One switch or reduction; `holders` are the kept graphs that help."""

    kind: Literal["weights", "gradients"]
    source: str
    target: str
    inter_node_bytes: int
    intra_node_bytes: int
    predicted_s: float
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class OrderPlan:
    """`order[0]` is the first graph; `kept` stay in memory beside the graph that runs."""

    order: tuple[str, ...]
    kept: tuple[str, ...]
    kept_bytes: int  # of the fullest rank; 0 where all stay: they share their storage
    hops: tuple[Hop, ...]

    @property
    def inter_node_bytes(self) -> int:
        return sum(hop.inter_node_bytes for hop in self.hops)

    @property
    def intra_node_bytes(self) -> int:
        return sum(hop.intra_node_bytes for hop in self.hops)

    @property
    def predicted_s(self) -> float:
        return sum(hop.predicted_s for hop in self.hops)

    def cost(self, by: Objective) -> tuple[float, float, int]:
        """What the search minimises: bytes between nodes, then seconds (or the other way round), then memory."""
        time, size = round(self.predicted_s, 9), self.inter_node_bytes
        return (time, size, self.kept_bytes) if by == "seconds" else (size, time, self.kept_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "order": list(self.order),
            "kept": list(self.kept),
            "kept_bytes": self.kept_bytes,
            "inter_node_bytes": self.inter_node_bytes,
            "intra_node_bytes": self.intra_node_bytes,
            "predicted_s": self.predicted_s,
            "hops": [vars(hop) | {"holders": list(hop.holders)} for hop in self.hops],
        }


@dataclass
class OrderSearch:
    """Orders of `layouts` (weights as the graphs compute with them, names unique) on a cluster.

    `keep_bytes` is the memory per rank for kept copies (0: nothing is kept; None: all are, as in a run without a memory
    budget). `by` bytes (between nodes, the default: the network is what all else waits for and shares) or predicted
    seconds; the other one breaks ties. With `training` the flow is that of a run, and `gradients` says nothing.
    Raises OrderError.
    """

    layouts: Sequence[ParamLayout]
    cluster: ClusterSpec
    planner: str = "relay"
    gradients: Gradients = "chain"
    keep_bytes: int | None = 0
    by: Objective = "bytes"
    training: Training | None = None
    _hops: dict[tuple, Hop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name = {layout.name: layout for layout in self.layouts}
        if len(self._by_name) < len(self.layouts):
            raise OrderError("two of the strategies are the same")
        if not self.layouts:
            raise OrderError("there is no strategy")
        self._scattered = {layout.name: layout.scattered() for layout in self.layouts}
        self._bytes = {layout.name: layout.max_bytes() for layout in self.layouts} if self.keep_bytes else {}

    def evaluate(self, order: Sequence[str]) -> OrderPlan:
        """The costs of a given order, with the best choice of what is kept. Raises OrderError."""
        return self._evaluate(check_order(order, list(self._by_name)))

    def best(self, first: str | None = None) -> OrderPlan:
        """The best order, all of them tried up to 6 graphs, above that by local search; `first` fixes the first."""
        if first is not None and first not in self._by_name:
            raise OrderError(f"{first!r} is none of the strategies{nearest(first, self._by_name)}")
        firsts = [first] if first is not None else list(self._by_name)
        if len(self.layouts) <= EXHAUSTIVE:
            orders = (
                (head, *tail)
                for head in firsts
                for tail in itertools.permutations(name for name in self._by_name if name != head)
            )
            return self._cheapest(self._evaluate(order) for order in orders)
        return self._cheapest(self._descend(self._nearest_neighbours(head)) for head in firsts)

    def _evaluate(self, order: tuple[str, ...]) -> OrderPlan:
        return self._cheapest(
            OrderPlan(order, kept, sum(self._bytes.get(n, 0) for n in kept), tuple(self._flow(order, kept)))
            for kept in self._choices(order)
        )

    def _choices(self, order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Sets of graphs that fit, of those that send something later."""
        useful = order[:-1] if self.training else order[:-2]  # HotSPa's last hop comes from the last but one anyway
        if self.keep_bytes is None:
            yield useful
            return
        yield ()
        if self.keep_bytes:
            for count in range(1, MAX_KEPT + 1):
                for kept in itertools.combinations(useful, count):
                    if sum(self._bytes[name] for name in kept) <= self.keep_bytes:
                        yield kept

    def _flow(self, order: tuple[str, ...], kept: tuple[str, ...]) -> Iterator[Hop]:
        if self.training is not None:
            for position, name in enumerate(order):
                yield self._weights(HOME, name, tuple(other for other in order[:position] if other in kept))
            yield from (self._reduction(name, self.training) for name in order)
            return
        for position in range(1, len(order)):
            earlier = tuple(name for name in order[: position - 1] if name in kept)
            yield self._weights(order[position - 1], order[position], earlier)
        for position in range(1, len(order) if self.gradients != "none" else 0):
            onward = self.gradients == "chain" and position + 1 < len(order)
            yield self._gradients(order[position], order[position + 1] if onward else order[0])

    def _weights(self, source: str, target: str, holders: tuple[str, ...]) -> Hop:
        key = ("weights", source, target, frozenset(holders))
        if key not in self._hops:
            further = [self._by_name[name] for name in holders]
            before = self._by_name[source] if self.training is None else self.training.weights
            self._hops[key] = self._hop("weights", before, self._by_name[target], further)
        return self._hops[key]

    def _reduction(self, source: str, training: Training) -> Hop:
        key = ("gradients", source)
        if key not in self._hops:
            terms, masters = training.gradients[source], training.masters
            trained = replace(masters, params={fqn: masters.params[fqn] for fqn in terms})
            plan = cheapest_reduction(terms, trained, self.cluster, source)
            sizes = plan.inter_node_bytes, plan.intra_node_bytes
            self._hops[key] = Hop("gradients", source, HOME, *sizes, plan.predicted_s)
        return self._hops[key]

    def _gradients(self, source: str, target: str) -> Hop:
        key = ("gradients", source, target)
        if key not in self._hops:
            self._hops[key] = self._hop("gradients", self._scattered[source], self._scattered[target], ())
        return self._hops[key]

    def _hop(
        self,
        kind: Literal["weights", "gradients"],
        source: ParamLayout,
        target: ParamLayout,
        holders: Sequence[ParamLayout],
    ) -> Hop:
        plan = plan_switch(source, target, self.cluster, self.planner, holders)
        return Hop(
            kind,
            source.name.removesuffix(" gradients"),
            target.name.removesuffix(" gradients"),
            plan.inter_node_bytes,
            plan.intra_node_bytes,
            plan.predicted_s,
            tuple(layout.name for layout in holders),
        )

    def _nearest_neighbours(self, head: str) -> tuple[str, ...]:
        """From `head` always on to the graph that is cheapest to reach."""
        order, left = [head], [name for name in self._by_name if name != head]
        while left:
            here = HOME if self.training else order[-1]
            helping = tuple(order) if self.keep_bytes is None else ()
            order.append(min(left, key=lambda name: self._weights(here, name, helping).predicted_s))
            left.remove(order[-1])
        return tuple(order)

    def _descend(self, order: tuple[str, ...]) -> OrderPlan:
        """Move single graphs (never the first) as long as that helps."""
        best = self._evaluate(order)
        while True:
            found = self._cheapest([best, *(self._evaluate(moved) for moved in _moves(best.order))])
            if found.cost(self.by) >= best.cost(self.by):
                return best
            best = found

    def _cheapest(self, plans: Iterable[OrderPlan]) -> OrderPlan:
        return min(plans, key=lambda plan: plan.cost(self.by))


def _moves(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for source, target in itertools.permutations(range(1, len(order)), 2):
        left = [*order[:source], *order[source + 1 :]]
        yield (*left[:target], order[source], *left[target:])


def check_order(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The user's order of graphs. Raises OrderError unless it names each strategy once."""
    for name in order:
        if name not in names:
            raise OrderError(f"{name!r} is none of the strategies{nearest(name, names)}")
    if sorted(order) != sorted(names):
        raise OrderError(f"each strategy must appear once: {', '.join(names)}; there is {', '.join(order)}")
    return tuple(order)
