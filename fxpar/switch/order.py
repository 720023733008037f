"""Which switches a mini-batch takes, in which order its graphs run, and which of them keep their weights.

Two flows. That of a run: weights come from `home`, the optimizer's layout, which is cut over all ranks, and from graphs
that have run before; gradients leave each graph straight for home, as the terms that they are. So K graphs cost K hops
of weights and K of gradients.

HotSPa's: the first graph holds the home layout. Weights go from it to the second graph and on to the last one; the
first graph itself computes last, from its own weights. So K graphs cost K-1 hops of weights, and K-1 of gradients if
these go with them: graph to graph behind the weights, then to the home layout.

Weights do not change within a mini-batch: a graph that keeps its own is a further source of all later hops, at the
price of its memory. One that is written over by the next is none. Costs are those of plans, each made once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import OrderError, nearest
from fxpar.switch.api import AnySwitchPlan, plan_large_switch, plan_switch
from fxpar.switch.layout import ParamLayout
from fxpar.switch.least import least_seconds
from fxpar.switch.node_first import NodeFirstPlan, cheapest_reduction
from fxpar.switch.reduction import AnyReductionPlan
from fxpar.switch.terms import Placements

EXHAUSTIVE = 6  # graphs; 720 orders
MAX_KEPT = 2  # graphs that may be kept at a time, of a limited memory
HOME = "home"
Objective = Literal["bytes", "seconds"]


@dataclass(frozen=True)
class Leaving:
    """How gradients leave in a run: the `terms` of each graph by its name, to the optimizer's layout (`masters`)."""

    terms: Mapping[str, Placements]
    masters: ParamLayout


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
    kept_bytes: int  # of the fullest rank, beside those that are resident anyway: they share their storage
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
        """What the search minimises: seconds, then bytes; or bytes between nodes, then seconds. Then memory."""
        time, between = round(self.predicted_s, 9), self.inter_node_bytes
        if by == "seconds":
            return time, between + self.intra_node_bytes, self.kept_bytes
        return between, time, self.kept_bytes

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
class SwitchSchedule:
    """Orders of the graphs with these `layouts` (weights as they compute with them, in the dtypes that travel).

    `home` is the optimizer's layout in the same dtypes; None is HotSPa's flow. `resident` graphs keep their weights,
    and of the others as many as `keep_bytes` per rank allow and pay. `by` predicted seconds, or bytes between nodes
    (the network is what all else waits for and shares); the other one breaks ties. `gradients` are counted where they
    are given: as they leave in a run, or as a "chain" in HotSPa's flow. Plans are not verified: who carries one out
    does that. Where nobody will (`priced_only`), they are not kept either.
    """

    layouts: Mapping[str, ParamLayout]
    home: ParamLayout | None
    cluster: ClusterSpec
    planner: str = "auto"
    resident: Collection[str] = ()
    keep_bytes: int = 0
    by: Objective = "seconds"
    gradients: Leaving | Literal["chain", "none"] = "none"
    priced_only: bool = False
    _plans: dict[tuple[str, str, frozenset[str]], AnySwitchPlan] = field(default_factory=dict)
    _hops: dict[tuple[object, ...], Hop] = field(default_factory=dict)
    _orders: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict)

    def keeping(self, resident: Collection[str]) -> SwitchSchedule:
        """With these graphs resident; plans that both have are made once."""
        return replace(self, resident=resident, _orders={})

    def plan(self, target: str, visited: Iterable[str]) -> AnySwitchPlan:
        """The plan that fills the layout of `target` from home when the graphs `visited` have run before."""
        return self._plan(HOME, target, self.sources(visited))

    def sources(self, visited: Iterable[str]) -> frozenset[str]:
        """Those of the visited graphs that still hold their weights."""
        return frozenset(name for name in visited if name in self.resident)

    def order(self, names: Collection[str]) -> tuple[str, ...]:
        """The cheapest order of these graphs; of more than 6 that in which the next one is always the cheapest."""
        key = frozenset(names)
        if key not in self._orders:
            known = [name for name in self.layouts if name in key]
            self._orders[key] = cheapest_order(known, lambda order: self._evaluate(order).cost(self.by), self._reach)
        return self._orders[key]

    def least_s(self, names: Collection[str]) -> float:
        """Predicted seconds of all hops in that order, to 1 ns."""
        return round(self._evaluate(self.order(names)).predicted_s, 9)

    def evaluate(self, order: Sequence[str]) -> OrderPlan:
        """The costs of a given order, with the best choice of what is kept. Raises OrderError."""
        return self._evaluate(check_order(order, list(self.layouts)))

    def best(self, first: str | None = None) -> OrderPlan:
        """The best order of all graphs, above 6 by local search; `first` fixes the first. Raises OrderError."""
        names = list(self.layouts)
        if first is not None and first not in names:
            raise OrderError(f"{first!r} is none of the strategies{nearest(first, names)}")
        if len(names) <= EXHAUSTIVE:
            orders = (one for one in itertools.permutations(names) if first is None or one[0] == first)
            return self._cheapest(map(self._evaluate, orders))
        heads = names if first is None else [first]
        return self._cheapest(self._descend(_nearest_next(names, self._reach, (head,))) for head in heads)

    def _evaluate(self, order: tuple[str, ...]) -> OrderPlan:
        return self._cheapest(
            OrderPlan(order, (*stay, *more), size, tuple(self._flow(order, (*stay, *more))))
            for stay, more, size in self._choices(order)
        )

    def _choices(self, order: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], int]]:
        """Who stays anyway, and sets of others that fit, with their bytes; of those that send something later."""
        useful = order[:-1] if self.home is not None else order[:-2]  # a chain's last hop has its source anyway
        stay = tuple(name for name in useful if name in self.resident)
        yield stay, (), 0
        others = [name for name in useful if name not in stay] if self.keep_bytes else []
        for count in range(1, MAX_KEPT + 1):
            for more in itertools.combinations(others, count):
                size = sum(self._sizes[name] for name in more)
                if size <= self.keep_bytes:
                    yield stay, more, size

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of the fullest rank."""
        return {name: layout.max_bytes() for name, layout in self.layouts.items()}

    def _flow(self, order: tuple[str, ...], kept: Collection[str]) -> Iterator[Hop]:
        if self.home is not None:
            for position, name in enumerate(order):
                yield self.weights(HOME, name, frozenset(kept).intersection(order[:position]))
        else:
            for position in range(1, len(order)):
                earlier = frozenset(kept).intersection(order[: position - 1])
                yield self.weights(order[position - 1], order[position], earlier)
        if isinstance(self.gradients, Leaving):
            yield from (self._reduction(name, self.gradients) for name in order)
        elif self.gradients == "chain":
            yield from itertools.starmap(self._chained, itertools.pairwise((*order[1:], order[0])))

    def weights(self, source: str, target: str, holders: frozenset[str]) -> Hop:
        """The switch from one graph, or from home, where others hold their weights too."""
        key = (source, target, holders)
        if key not in self._hops:
            helping = tuple(name for name in self.layouts if name in holders)
            self._hops[key] = _hop("weights", source, target, self._plan(*key), helping)
        return self._hops[key]

    def least_weights_s(self, source: str, target: str, holders: frozenset[str]) -> float:
        """Seconds that this switch takes at least, and each with fewer holders."""
        return least_seconds(*self._between(source, target, holders))

    def _reduction(self, source: str, leaving: Leaving) -> Hop:
        key = ("gradients", source)
        if key not in self._hops:
            terms = leaving.terms[source]
            plan = cheapest_reduction(terms, leaving.masters.only(terms), self.cluster, source)
            self._hops[key] = _hop("gradients", source, HOME, plan)
        return self._hops[key]

    def _chained(self, source: str, target: str) -> Hop:
        key = ("gradients", source, target)
        if key not in self._hops:
            before, after = self.layouts[source].scattered(), self.layouts[target].scattered()
            plan = plan_switch(before, after, self.cluster, self.planner)
            self._hops[key] = _hop("gradients", source, target, plan)
        return self._hops[key]

    def _plan(self, source: str, target: str, holders: frozenset[str]) -> AnySwitchPlan:
        key = (source, target, holders)
        if key not in self._plans:
            before, after, cluster, further = self._between(source, target, holders)
            plan = plan_large_switch(before, after, cluster, self.planner, further)
            if self.priced_only:
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def _between(
        self, source: str, target: str, holders: frozenset[str]
    ) -> tuple[ParamLayout, ParamLayout, ClusterSpec, list[ParamLayout]]:
        """What a switch is planned from."""
        before = self.home if source == HOME and self.home is not None else self.layouts[source]
        further = [layout for name, layout in self.layouts.items() if name in holders]
        return before, self.layouts[target], self.cluster, further

    def _reach(self, name: str, before: Sequence[str]) -> float:
        """Seconds to the graph behind these."""
        source = HOME if self.home is not None else before[-1]
        return self.weights(source, name, self.sources(before) - {source}).predicted_s

    def _descend(self, order: tuple[str, ...]) -> OrderPlan:
        """Move single graphs (never the first) as long as that helps."""
        best = self._evaluate(order)
        while True:
            found = self._cheapest([best, *map(self._evaluate, _moves(best.order))])
            if found.cost(self.by) >= best.cost(self.by):
                return best
            best = found

    def _cheapest(self, plans: Iterable[OrderPlan]) -> OrderPlan:
        return min(plans, key=lambda plan: plan.cost(self.by))


def cheapest_order(
    names: Sequence[str],
    cost: Callable[[tuple[str, ...]], Any],
    reach: Callable[[str, Sequence[str]], float],
    least: Callable[[tuple[str, ...]], float] | None = None,
) -> tuple[str, ...]:
    """The order that costs least; of more than 6 names the one in which the next is always the cheapest to `reach`
    (a name, behind those before it). What each costs at `least` is asked for first, if that is given, and the cost of
    those that may cost least.
    """
    if len(names) > EXHAUSTIVE:
        return _nearest_next(names, reach)
    orders = itertools.permutations(names)
    if least is None:
        return min(orders, key=cost)
    found: list[tuple[Any, int, tuple[str, ...]]] = []
    for bound, number, order in sorted((least(order), number, order) for number, order in enumerate(orders)):
        if found and bound > min(found)[0]:
            break
        found.append((cost(order), number, order))
    return min(found)[2]


def _nearest_next(
    names: Sequence[str], reach: Callable[[str, Sequence[str]], float], first: Sequence[str] = ()
) -> tuple[str, ...]:
    order, left = [*first], [name for name in names if name not in first]
    while left:
        order.append(min(left, key=lambda name: reach(name, order)))
        left.remove(order[-1])
    return tuple(order)


def _moves(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for source, target in itertools.permutations(range(1, len(order)), 2):
        left = [*order[:source], *order[source + 1 :]]
        yield (*left[:target], order[source], *left[target:])


def _hop(
    kind: Literal["weights", "gradients"],
    source: str,
    target: str,
    plan: AnySwitchPlan | AnyReductionPlan | NodeFirstPlan,
    holders: tuple[str, ...] = (),
) -> Hop:
    sizes = plan.inter_node_bytes, plan.intra_node_bytes
    return Hop(kind, source, target, *sizes, plan.predicted_s, holders)


def check_order(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The user's order of graphs. Raises OrderError unless it names each strategy once."""
    for name in order:
        if name not in names:
            raise OrderError(f"{name!r} is none of the strategies{nearest(name, names)}")
    if sorted(order) != sorted(names):
        raise OrderError(f"each strategy must appear once: {', '.join(names)}; there is {', '.join(order)}")
    return tuple(order)
