"""Switches among the strategies of a set: each is planned once, for all sets that have it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.link_bytes import LinkBytes
from fxpar.ir.exec_graph import Outline
from fxpar.ir.strategy import Strategy
from fxpar.passes.share_weights import lies_in
from fxpar.search.kinds import MixedCandidate
from fxpar.search.layouts import guessed_layout
from fxpar.search.ordered import Ordered
from fxpar.search.price import DEEPEST, Candidate, Depth, Priced, extrapolated
from fxpar.search.space import placed_alike
from fxpar.store import home_of
from fxpar.switch import ParamLayout, PlacedParam, layout_of
from fxpar.switch.boxes import refine
from fxpar.switch.order import HOME, Hop, SwitchSchedule, cheapest_order

Outlines = Callable[[Strategy, int], Outline]  # how parameters lie, of a model with so many layers


def placement_of(strategy: Strategy) -> str:
    """Names how parameters lie."""
    return str(placed_alike(strategy))


@dataclass
class KnownSwitches:
    """Layouts of a model with some number of layers by `placement_of`, and seconds of the switches between them and
    from home. Where `guess` is set, layouts are guessed if they can be.
    """

    cluster: ClusterSpec
    outlines: Outlines
    layers: int
    guess: bool
    _layouts: dict[str, ParamLayout] = field(default_factory=dict)
    _least: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)
    _outside: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)

    def add(self, strategies: Iterable[Priced]) -> None:
        """Learn how these lie. What was lowered says how all layers lie, as they repeat: nothing more is captured."""
        for one in strategies:
            name = placement_of(one.strategy)
            if name not in self._layouts and isinstance(one, Ordered):
                self.add([one.base])
                self._layouts[name] = one.layout(self._layouts[placement_of(one.base.strategy)])
            elif name not in self._layouts:
                lowered = type(one) is Candidate or (isinstance(one, MixedCandidate) and one.stands)
                found = self._of_own(one) or (guessed_layout(one, self.layers) if self.guess or lowered else None)
                self._layouts[name] = found or layout_of(self.outlines(one.strategy, self.layers), one.name)

    def layout(self, one: Priced) -> ParamLayout:
        """How parameters lie under a strategy."""
        self.add([one])
        return self._layouts[placement_of(one.strategy)]

    def _of_own(self, one: Priced) -> ParamLayout | None:
        """Of what was lowered to price it, where that has as many layers."""
        if type(one) is not Candidate or self.layers not in one.samples:
            return None
        return layout_of(one.programs[one.samples.index(self.layers)], one.name)

    def outside_bytes(self, one: str, others: Sequence[str]) -> int:
        """Of the pieces under one placement, on the fullest rank: those that are no parts of what it has under another,
        so no views of it (`fxpar.passes.share_weights`).
        """
        key = one, tuple(others)
        if key not in self._outside:
            layouts = [self._layouts[other].params for other in others]
            tensors = [
                (param, *(layout[fqn] for layout in layouts)) for fqn, param in self._layouts[one].params.items()
            ]
            # Many tensors share one description.
            several = {tuple(map(id, each)): each for each in tensors}
            counts = Counter(tuple(map(id, each)) for each in tensors)
            total = np.zeros(self._layouts[one].world, np.int64)
            for ids, (param, *theirs) in several.items():
                total += counts[ids] * _outside(param, tuple(theirs), len(total))
            self._outside[key] = int(total.max(initial=0))
        return self._outside[key]

    def switch(self, target: str, sources: Sequence[str]) -> Hop:
        """The one to the placement `target`, where `sources` still hold their weights; home always does."""
        return self._schedule.weights(HOME, target, frozenset(sources))

    def least_s(self, target: str, sources: Iterable[str]) -> float:
        """Seconds that the switch to a placement takes at least, where `sources` still hold their weights."""
        key = target, frozenset(sources)
        if key not in self._least:
            self._least[key] = self._schedule.least_weights_s(HOME, *key)
        return self._least[key]

    @cached_property
    def _schedule(self) -> SwitchSchedule:
        _, home = home_of(next(iter(self._layouts.values())))
        return SwitchSchedule(self._layouts, home, self.cluster, priced_only=True)


@lru_cache(maxsize=4096)  # models of few and of more layers have the same tensors, and so do sets
def _outside(mine: PlacedParam, theirs: tuple[PlacedParam, ...], world: int) -> np.ndarray:
    """[world]: bytes of the pieces of a tensor that are no parts of others that the rank has; not to be changed."""
    copies = [copy for other in theirs if other.dtype == mine.dtype for copy in other.copies]
    placed = (*mine.copies, *copies)
    has = refine(mine.shape, placed).holders(placed, max(one.mesh.last + 1 for one in placed)).has
    found = np.zeros(world, np.int64)
    for one in mine.copies:
        nbytes = math.prod(one.local_shape(mine.shape)) * mine.dtype.itemsize
        ranks = np.array(one.mesh.ranks)
        # Of ranks with the same pieces of all copies one is asked.
        _, first, alike = np.unique(has[:, ranks], axis=1, return_index=True, return_inverse=True)
        apart = [
            not any(rank in copy.mesh and lies_in(one, copy, mine.shape, rank) for copy in copies)
            for rank in ranks[first].tolist()
        ]
        found[ranks] += nbytes * np.array(apart)[alike.ravel()]
    return found


@dataclass
class SetSwitches:
    """Switches among the strategies of a set, home included; as `fxpar.batching.borders` asks for them. `placed` are
    their placements by name; `known` the numbers of layers from which those of the whole model follow, which has so
    many `steps` more. With `least` each takes what it takes at least.
    """

    known: Sequence[KnownSwitches]
    steps: float
    placed: Mapping[str, str]
    resident: Collection[str]
    least: bool = False
    _orders: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict)

    def at_least(self) -> SetSwitches:
        """The same with what each switch takes at least: none is planned."""
        return replace(self, least=True, _orders={})

    @cached_property
    def _at_least(self) -> SetSwitches:
        return self.at_least()

    def predicted_s(self, name: str, visited: Sequence[str]) -> float:
        sources = self._sources(name, visited)
        if sources is None:
            return 0.0
        place = self.placed[name]
        each = [
            one.least_s(place, sources) if self.least else one.switch(place, sources).predicted_s for one in self.known
        ]
        return max(0.0, extrapolated(each, self.steps))

    def sent(self, name: str, visited: Sequence[str]) -> LinkBytes:
        """What the same switch sends."""
        sources = self._sources(name, visited)
        found = [] if sources is None else [one.switch(self.placed[name], sources) for one in self.known]
        levels = [one.intra_node_bytes for one in found], [one.inter_node_bytes for one in found]
        return LinkBytes(*(extrapolated(level, self.steps) for level in levels)) if found else LinkBytes()

    def _sources(self, name: str, visited: Sequence[str]) -> list[str] | None:
        """The placements that still hold their weights; None where those of this strategy are there."""
        if (name in visited and name in self.resident) or (visited and visited[-1] == name):
            return None
        return [place for one, place in self.placed.items() if one in visited and one in self.resident]

    def order(self, names: Collection[str]) -> tuple[str, ...]:
        """The order of these strategies with the fastest switches."""
        key = frozenset(names)
        if key not in self._orders:
            mine = [name for name in self.placed if name in key]
            least = {} if self.least else {"least": self._at_least._total_s}
            self._orders[key] = cheapest_order(mine, self._total_s, self.predicted_s, **least)
        return self._orders[key]

    def _total_s(self, order: Sequence[str]) -> float:
        return sum(self.predicted_s(name, order[:number]) for number, name in enumerate(order))


@dataclass
class ModelSwitches:
    """Switches of a model, for all sets that are priced."""

    cluster: ClusterSpec
    depth: Depth
    outlines: Outlines
    _known: dict[tuple[int, bool], KnownSwitches] = field(default_factory=dict)

    def of_set(self, unique: Mapping[str, Priced], resident: Collection[str], guess: bool) -> SetSwitches:
        """Of a model with two layers for each of the most stages, and with three; with all layers where a strategy
        tells them apart. Without `guess` layouts are guessed only where more than DEEPEST layers would have to be
        captured; those of what was lowered are none.
        """
        samples = self._samples(unique)
        known = self._known_of(unique, samples, guess)
        placed = {name: placement_of(one.strategy) for name, one in unique.items()}
        return SetSwitches(known, float(self.depth.beyond(samples)), placed, resident)

    def weight_bytes(self, unique: Mapping[str, Priced], guess: bool) -> int:
        """Of all strategies of a set side by side, on the fullest rank: pieces of one that lie inside those of a larger
        one are the same memory (`fxpar.passes.share_weights`). Layouts as for `of_set`.
        """
        samples = self._samples(unique)
        known, steps = self._known_of(unique, samples, guess), float(self.depth.beyond(samples))
        largest_first = sorted(unique.values(), key=lambda one: -one.stays.weight_bytes)
        placed = dict.fromkeys(placement_of(one.strategy) for one in largest_first)
        total = largest_first[0].stays.weight_bytes
        for number, place in enumerate(placed):
            if number:
                before = tuple(placed)[:number]
                total += round(extrapolated([one.outside_bytes(place, before) for one in known], steps))
        return total

    def _samples(self, unique: Mapping[str, Priced]) -> tuple[int, ...]:
        if any(isinstance(one, MixedCandidate) and one.stands for one in unique.values()):
            return (self.depth.layers,)
        return self.depth.samples(max(one.strategy.stages for one in unique.values()))

    def _known_of(self, unique: Mapping[str, Priced], samples: Sequence[int], guess: bool) -> list[KnownSwitches]:
        known = []
        for layers in samples:
            guesses = guess or layers > DEEPEST
            fresh = KnownSwitches(self.cluster, self.outlines, layers, guesses)
            known.append(self._known.setdefault((layers, guesses), fresh))
            known[-1].add(unique.values())
        return known
