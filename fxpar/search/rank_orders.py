"""Which physical rank plays which part: the orders of ranks with which a set switches fastest.

Two orders are compared only if all ranks of a node stay together: then each group has as many ranks on as many nodes,
and programs take the same. So the digits inside of nodes are permuted among themselves, and so are those between nodes.
With tp outside of dp in a node, for example, what a rank has under tp4 holds what it has under tp8: nothing is sent.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from typing import Any

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.axes import EXPERTS, REPLICAS, ROLE_AXES, STAGES
from fxpar.ir.mesh import Axes
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import SINGLE, Strategy
from fxpar.ir.strategy_text import joined_digits
from fxpar.search.border_guess import BorderGuess, Travels
from fxpar.search.going_home import Moved, terms_of
from fxpar.search.known import KnownModel, Said
from fxpar.search.ordered import Ordered
from fxpar.search.price import Candidate, Priced, extrapolated
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.proposals import Chosen
from fxpar.search.switching import KnownSwitches, ModelSwitches, SetSwitches
from fxpar.search.traffic import SetTraffic
from fxpar.store import home_layout, home_of, param_specs
from fxpar.switch.layout import ParamLayout
from fxpar.switch.order import EXHAUSTIVE

MOST_FACTORS = 6  # prime factors inside of a node, or axes between nodes, that are permuted: 64 devices, 720 orders
MOST_RANKS = 256  # of a cluster: with more, pricing a set again takes many seconds
MOST_ORDERS = 24  # of a strategy
WORTH = 0.0005  # of a mini-batch: what a guess must promise, as pricing a set takes a second
MOST_SETS = 64  # of orders that are compared; else they are chosen for one strategy after the other


def orders_of(strategy: Strategy, cluster: ClusterSpec) -> list[Strategy]:
    """The strategy, then the same with its ranks in other orders. Blocks that are written one by one keep theirs, and
    so do rules that spread experts, which want ranks in the order of these.
    """
    spread = any(axis == EXPERTS for rule in strategy.rules for axis, _ in rule.axes)
    fixed = bool(strategy.blocks or strategy.digits or spread)
    parts = None if fixed else _split(strategy, cluster.devices_per_node)
    if parts is None:
        return [strategy]
    found = {strategy: None}
    outer, inner = parts
    factors = [(name, prime) for name, degree in inner for prime in _primes(degree)]
    for between in _permuted(outer):
        for within in _permuted(factors if len(factors) <= MOST_FACTORS else inner):
            one = _of_digits(strategy, (*between, *within))
            if not strategy.rules or _roles(one) == _roles(strategy):  # rules count ranks in the order of these
                found[one] = None
    return list(found)[:MOST_ORDERS]


def _split(strategy: Strategy, devices: int) -> tuple[Axes, Axes] | None:
    """The axes of a stage, apart: what lies between nodes, what inside of one. None where nodes are cut unevenly."""
    left = math.gcd(strategy.world // strategy.pipeline_size, devices)
    if left not in (devices, strategy.world // strategy.pipeline_size):
        return None
    outer: list[tuple[str, int]] = []
    inner: list[tuple[str, int]] = []
    for name, degree in reversed([axis for axis in strategy.axes if axis[0] != STAGES]):
        here = math.gcd(degree, left)
        if here not in (degree, left):
            return None
        inner.insert(0, (name, here))
        outer.insert(0, (name, degree // here))
        left //= here
    return tuple(one for one in outer if one[1] > 1), tuple(one for one in inner if one[1] > 1)


def _primes(degree: int) -> Iterator[int]:
    prime = 2
    while degree > 1:
        while degree % prime == 0:
            yield prime
            degree //= prime
        prime += 1


def _permuted(digits: Sequence[tuple[str, int]]) -> list[Axes]:
    return list(dict.fromkeys(permutations(digits))) if len(digits) <= MOST_FACTORS else [tuple(digits)]


def _of_digits(strategy: Strategy, digits: Iterable[tuple[str, int]]) -> Strategy:
    """With these digits, stages behind replicas that come first."""
    found: list[tuple[str, int]] = []
    for name, degree in digits:
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1] * degree
        else:
            found.append((name, degree))
    if strategy.pipeline_size > 1:
        found.insert(int(bool(found) and found[0][0] == REPLICAS), (STAGES, strategy.pipeline_size))
    places = tuple(found) or SINGLE.axes
    return replace(strategy, axes=joined_digits(places), digits=places)


def _roles(strategy: Strategy) -> Axes:
    return tuple(axis for axis in strategy.axes if axis[0] in ROLE_AXES)


def in_best_order(settled: PricedSet, known: KnownModel, pricer: SetPricer, said: Said) -> PricedSet:
    """A settled set of a search with its ranks in the orders that take least; `settled` where none is faster."""
    found = [(group.limit, known.priced(Strategy.parse(group.strategy), said)) for group in settled.groups]
    chosen = [(limit, one) for limit, one in found if one is not None]
    return with_best_orders(chosen, settled, pricer) if len(chosen) == len(found) else settled


def with_best_orders(chosen: Chosen, settled: PricedSet, pricer: SetPricer) -> PricedSet:
    """A settled set with the orders of ranks that take least; `settled` where none is faster. Orders are chosen by a
    guess at switches and reductions; the best ones are then priced as sets are.
    """
    if pricer.switches is None or settled.traffic is None or pricer.cluster.world > MOST_RANKS:
        return settled
    orders = _Orders(pricer, pricer.switches, chosen, settled.traffic)
    # Weights that nest share memory, so that they may stay where they did not.
    ways = dict.fromkeys((bool(settled.traffic.switching.resident), True))
    tried, saved = max(map(orders.best, ways), key=lambda one: one[1])
    priced = pricer.price(tried, settle=True) if saved > WORTH * settled.predicted_s else None
    if priced is None or priced.predicted_s >= settled.predicted_s:
        return settled
    return replace(priced, usual=settled)


@dataclass
class _Orders:
    """Of a set in the usual order. Placements are those of its small models, see `ModelSwitches`."""

    pricer: SetPricer
    switches: ModelSwitches
    chosen: Chosen
    traffic: SetTraffic
    _known: dict[tuple[Any, ...], list[Travels]] = field(default_factory=dict)

    def best(self, stay: bool) -> tuple[list[tuple[int, Priced]], float]:
        """The set in the best orders, and the seconds that it is guessed to save; `stay`: weights are resident."""
        usual = {one.name: one for _, one in self.chosen}
        kinds: dict[Axes, dict[Axes, dict[str, Priced]]] = {}  # those that lie alike go together
        for name, one in usual.items():
            orders = kinds.setdefault(one.strategy.axes, {})
            for digits, other in _reordered(one).items():
                orders.setdefault(digits, {})[name] = other
        first = usual
        if math.prod(map(len, kinds.values())) > MOST_SETS:  # one kind after the other
            for orders in kinds.values():
                first = min((first | order for order in orders.values()), key=lambda one: self._cost(one, stay))
            kinds = {}
        every = (
            functools.reduce(operator.or_, orders, first) for orders in product(*(k.values() for k in kinds.values()))
        )
        best = min((usual, *every), key=lambda one: self._cost(one, stay))
        saved = self._cost(usual, stay) - self._cost(best, stay)
        return [(limit, best[one.name]) for limit, one in self.chosen], saved

    def _cost(self, orders: Mapping[str, Priced], stay: bool) -> float:
        """Seconds of the switches and reductions of a mean mini-batch, by the strategies in their usual order."""
        found = (self._mini_batch_s([orders[name] for name in names], stay) * n for names, n in self._running.items())
        return sum(found) / sum(self._running.values())

    def _mini_batch_s(self, mine: Sequence[Priced], stay: bool) -> float:
        """Seconds of the switches to each of these, in the best order if weights stay, and of their reductions."""
        reduced = sum(map(self._reduce_s, mine))
        if not stay or len(mine) > EXHAUSTIVE:
            return reduced + sum(self._switch_s(one, ()) for one in mine)
        every = permutations(mine)
        return reduced + min(sum(self._switch_s(one, a[:i]) for i, one in enumerate(a)) for a in every)

    def _switch_s(self, target: Priced, sources: Sequence[Priced]) -> float:
        key = target.name, *sorted(one.name for one in sources)
        if key not in self._known:
            self._known[key] = [
                self._guess.switch([home, *(known.layout(one) for one in sources)], known.layout(target))
                for known, home in self._samples
            ]
        found = [self._guess.seconds([one]) for one in self._known[key]]
        return max(0.0, extrapolated(found, self._steps))

    def _reduce_s(self, one: Priced) -> float:
        base, moved = (one.base, one.moved) if isinstance(one, Ordered) else (one, None)
        if not isinstance(base, Candidate):
            return 0.0  # in any order: it has only the usual one
        key = "gradients", one.name
        if key not in self._known:
            self._known[key] = [self._reduction(program, moved) for program in base.programs]
        return extrapolated([self._guess.seconds([one]) for one in self._known[key]], float(base.steps))

    def _reduction(self, program: TrainGraph, moved: Moved | None) -> Travels:
        terms = terms_of(program, moved)
        home = home_layout(param_specs(program), self.pricer.cluster.world)
        return self._guess.reduction(terms.values(), (home.params[fqn] for fqn in terms))

    @cached_property
    def _running(self) -> Counter[tuple[str, ...]]:
        """Which strategies mini-batches run, and how many do."""
        names = [one.name for _, one in self.chosen]
        return Counter(tuple(sorted({names[g] for g in plan.order})) for plan in self.traffic.plans)

    @cached_property
    def _guess(self) -> BorderGuess:
        return BorderGuess(self.pricer.cluster, self.pricer.cluster.world)

    @cached_property
    def _set(self) -> SetSwitches:
        unique = {one.name: one for _, one in self.chosen}
        return self.switches.of_set(unique, (), guess=False)

    @property
    def _steps(self) -> float:
        return self._set.steps

    @cached_property
    def _samples(self) -> list[tuple[KnownSwitches, ParamLayout]]:
        """With the home of each."""
        first = self.chosen[0][1]
        return [(known, home_of(known.layout(first))[1]) for known in self._set.known]


def _reordered(one: Priced) -> dict[Axes, Priced]:
    """What was lowered as it is, with its ranks in each order."""
    found: dict[Axes, Priced] = {one.strategy.all_digits: one}
    if type(one) is Candidate:
        orders = orders_of(one.strategy, one.cluster)[1:]
        found |= {each.all_digits: Ordered(each, one.cluster, one.anchors, one) for each in orders}
    return found


__all__ = ["in_best_order", "orders_of", "with_best_orders"]
