"""Rules per module for the strategies that a search has settled on: proposed from what is known, decided by programs.

runs     per shape, some layers of each stage recompute more than the others: between two strategies that differ in that
         alone, time and memory are taken to be on the line, and the number of layers is the best that memory allows
roles    positions are the modules of a layer, and those outside of layers. What it takes to run one of them under other
         roles is what a program with that one rule takes more, borders included. Attention is tried with documents in
         bins too, where these hold the longest one. Dynamic programming over positions keeps what no other choice
         beats in memory, seconds of a micro-batch, and seconds of the gradient sync
decision the best proposals are lowered, and a set with one of them is planned as any other set is

A set with rules is taken only where it is faster, so with rules no plan gets worse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.ir.module_rules import Axes, ModuleRule
from fxpar.ir.strategy import Strategy
from fxpar.search.blends import Blend, Changed
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.fronts import undominated
from fxpar.search.known import KnownModel, Said
from fxpar.search.positions import globs_of_attention, globs_of_weight, with_run
from fxpar.search.price import Priced
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.space import (
    in_bins,
    layout_of_ranks,
    layout_rule,
    role_layouts,
    single_axis,
    with_layout,
    without_stages,
)
from fxpar.search.staged import StagedGuess

TRIED = 3  # proposals that are lowered for a strategy, of either kind
NEAR = 2  # numbers of layers that are looked at on either side of the best guess
SMALL = 0.05  # of a model's seconds and of its weights: a position with less is left as it is; of a set's seconds
WORTH = 0.002  # of a group's seconds: what rules must promise to be lowered, and of a set's what they must win
ZERO = 3  # the level that a position may have beside that of the strategy
Chosen = Sequence[tuple[int, Priced]]
Point = tuple[tuple[ModuleRule, Priced], ...]


@dataclass(frozen=True)
class Proposal:
    """Strategies with rules that take the same programs, and the seconds of the best one's groups as guessed."""

    seconds: float
    strategies: tuple[Strategy, ...]


@dataclass
class _Group:
    """What a strategy of a set runs: as much as its groups, up to `limit`; `chosen` is the set."""

    chosen: Chosen
    name: str
    load: Intervals
    pricer: SetPricer

    @property
    def limit(self) -> int:
        return self.load.edges[-1]

    def with_(self, one: Priced) -> Chosen:
        return [(limit, one if other.name == self.name else other) for limit, other in self.chosen]

    def seconds(self, one: Priced) -> float:
        """Of a mean mini-batch in place of the strategy, at least, with what its weights and gradients take; infinite
        if it does not fit into the set.
        """
        groups = self.pricer.groups(self.with_(one))
        if groups is None:
            return np.inf
        budget = next(g.token_budget for g in groups if g.limit == self.limit)
        return self._least_s(one, budget) + self._border_s(one)

    def at_best(self, one: Priced) -> float:
        """With all memory in the world."""
        return self._least_s(one, max(self.limit, self.pricer.largest)) + self._border_s(one)

    def _least_s(self, one: Priced, budget: int) -> float:
        return float(least_seconds(one.cost, one.strategy, [budget], self.load)[:, 0, 0].mean())

    def _border_s(self, one: Priced) -> float:
        """A guess, as sets are ranked with: weights come and gradients leave over the slowest link of a rank."""
        cluster = self.pricer.cluster
        return 2 * one.stays.weight_bytes / float(cluster.bytes_per_s(between=cluster.nodes > 1))


@dataclass
class RuleSearch:
    """Better sets by rules. `candidates` are what the search has priced; `lowered` counts proposals."""

    known: KnownModel
    pricer: SetPricer
    candidates: Sequence[Priced]
    said: Said
    lowered: int = 0

    def better(self, chosen: Chosen, best: PricedSet) -> tuple[PricedSet, Chosen]:
        """A settled set, or a faster one of as many strategies, some of them with rules."""
        for proposals in (self._runs, self._roles):
            for one in list({one.name: one for _, one in chosen}.values()):
                group = self._group(chosen, one, best)
                if group is not None:
                    chosen, best = self._decided(group, list(proposals(group, one)), best)
        return best, chosen

    def _group(self, chosen: Chosen, one: Priced, best: PricedSet) -> _Group | None:
        """None for a strategy that runs hardly anything."""
        mine = [limit for limit, other in chosen if other.name == one.name]
        if sum(g.seconds for g in best.groups if g.limit in mine) < SMALL * best.predicted_s:
            return None
        limits = [0, *(limit for limit, _ in chosen)]
        ranges = [(low, high) for low, high in itertools.pairwise(limits) if high in mine]
        batches = tuple(tuple(n for n in b if any(lo < n <= hi for lo, hi in ranges)) for b in self.pricer.batches)
        return _Group(chosen, one.name, Intervals((mine[-1],), batches), self.pricer)

    def _decided(self, group: _Group, proposals: list[Proposal], best: PricedSet) -> tuple[Chosen, PricedSet]:
        """With the best proposal that, lowered, makes the set faster."""
        chosen, must_s = group.chosen, (1 - WORTH) * best.predicted_s
        for proposal in sorted(proposals, key=lambda p: p.seconds)[:TRIED]:
            self.lowered += 1
            found = [one for text in proposal.strategies if (one := self.known.candidate(text, self.said)) is not None]
            seconds = {one.name: group.seconds(one) for one in found}
            for one in sorted(found, key=lambda one: seconds[one.name])[:TRIED]:
                tried = group.with_(one)
                # As it is guessed first: what it holds takes longer to find than what it takes.
                for settle in (False, True):
                    priced = self.pricer.price(tried, settle)
                    if priced is None or priced.predicted_s >= min(must_s, best.predicted_s):
                        break
                else:
                    chosen, best = tried, priced
        return chosen, best

    # ------------------------------------------------------------------------------------------------------- runs
    def _runs(self, group: _Group, one: Priced) -> Iterator[Proposal]:
        """For each shape its best number of layers that recompute more, in each pair of what they may recompute."""
        layers, now = self.known.layers, self._alone(one.strategy)
        if layers is None or now is None:
            return
        now_s = group.seconds(now)
        by_shape: dict[Strategy, list[Priced]] = {}
        for other in self.candidates:
            by_shape.setdefault(replace(other.strategy, remat=None), []).append(other)
        for shape, alike in by_shape.items():
            each, left = divmod(layers.count, shape.stages)
            for less, more in itertools.combinations(alike, 2):
                if not left and group.at_best(less) < now_s:
                    guesses = [group.seconds(one) for one in _blends(less, more, each)]
                    best = int(np.argmin(guesses)) if guesses else 0
                    if guesses and guesses[best] < (1 - WORTH) * now_s:
                        counts = range(1, each)[max(0, best - NEAR) : best + NEAR + 1]
                        texts = (with_run(less.strategy, more.strategy, layers, count) for count in counts)
                        yield Proposal(guesses[best], tuple(texts))

    # ------------------------------------------------------------------------------------------------------ roles
    def _roles(self, group: _Group, one: Priced) -> Iterator[Proposal]:
        """What no other choice of roles beats. All ranks of a replica are on one axis: what several positions split of
        it is moved together, which two axes are not.
        """
        plain = replace(one.strategy, rules=())
        inside = layout_of_ranks(plain)
        layouts = role_layouts(math.prod(degree for _, degree in inside), self.pricer.cluster.devices_per_node)
        now = self._alone(plain)
        if now is None or len(layouts) < 2:
            return
        now_s = group.seconds(now)
        base = with_layout(plain, single_axis(inside))
        alone = self._alone(base)
        if alone is None:
            return
        for point in self._front(group, base, alone, layouts):
            guess = Changed(base, alone.cluster, alone.anchors, alone, tuple(priced for _, priced in point))
            seconds = group.seconds(guess)
            if seconds < (1 - WORTH) * now_s:
                rules = (*(rule for rule, _ in point), *one.strategy.rules)
                yield Proposal(seconds, (replace(base, rules=rules),))

    def _front(self, group: _Group, base: Strategy, alone: Priced, layouts: Sequence[Axes]) -> list[Point]:
        """Rules for some positions, with what each takes alone; none is beaten in memory, seconds and sync at once."""
        flat, layers = self.known.candidate(without_stages(base), self.said), self.known.layers
        if flat is None or layers is None:
            return []
        points: list[Point] = [()]
        sums = np.zeros((1, 3))
        attention = globs_of_attention(flat, layers)
        for glob in globs_of_weight(flat, layers, SMALL):
            options: list[tuple[Point, np.ndarray]] = [((), np.zeros(3))]
            bins = [in_bins(layout) for layout in layouts if glob in attention]
            for rule in self._rules(base, glob, list(dict.fromkeys([*layouts, *bins]))):
                priced = self._alone(replace(base, rules=(rule,)))
                if priced is not None and (priced.strategy.bins == 1 or group.seconds(priced) < np.inf):
                    more = _taken(priced, group.limit) - _taken(alone, group.limit)
                    options.append((((rule, priced),), more))
            new = (sums[:, None] + np.array([more for _, more in options])).reshape(-1, 3)
            nbytes = np.rint(new[:, 0]).astype(np.int64)
            keep = undominated(nbytes, new[:, 1], new[:, 2], np.zeros(len(new), np.int64))
            points = [points[at // len(options)] + options[at % len(options)][0] for at in keep.tolist()]
            sums = new[keep]
        return [point for point in points if point]

    def _rules(self, base: Strategy, glob: str, layouts: Sequence[Axes]) -> Iterator[ModuleRule]:
        """All that a position may do otherwise."""
        for axes in layouts:
            for zero in (None, ZERO) if base.zero != ZERO else (None,):
                same = axes == layout_of_ranks(base)
                if not same or zero is not None:
                    yield layout_rule(glob, () if same else axes, zero)

    def _alone(self, strategy: Strategy) -> Priced | None:
        """As it is known, or guessed from the strategy without stages."""
        if strategy.pipeline_size == 1:
            return self.known.candidate(strategy, self.said)
        flat = self.known.candidate(without_stages(strategy), self.said)
        if flat is None or len(flat.samples) == 1:
            return None
        return StagedGuess(strategy, self.pricer.cluster, self.known.anchors, flat)


def _blends(less: Priced, more: Priced, each: int) -> Iterator[Priced]:
    """With 1, 2 ... of `each` layers as under `more`."""
    for count in range(1, each):
        yield Blend(less.strategy, less.cluster, less.anchors, less, more, count / each)


def _taken(one: Priced, tokens: int) -> np.ndarray:
    """Bytes at the peak, seconds of a micro-batch without gradient sync, seconds of that."""
    return np.array([one.memory(tokens).peak_bytes, one.cost.seconds([tokens]), one.reduce_s])
