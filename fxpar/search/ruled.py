"""Rules per module for the strategies that a search has settled on: proposed from what is known, decided by programs.

stages   how many layers save memory in which way, stages that differ and their cuts, see `fxpar.search.stages`
roles    positions are the modules of a layer, and those outside of layers. What it takes to run one of them under other
         roles is what a program with that one rule takes more, borders included. Attention is tried with documents in
         bins too, where these hold the longest one, what has experts with these apart, and where memory is short the
         head with the loss in chunks. Dynamic programming over positions keeps what no other choice beats in memory,
         seconds of a micro-batch, and seconds of the gradient sync
layers   where memory is short layers may differ in their roles and in what they save, see `fxpar.search.layer_roles`
decision the best proposals are lowered, and a set with one of them is planned as any other set is

A set with rules is taken only where it is faster, so with rules no plan gets worse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.mesh import Axes
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.strategy import Strategy
from fxpar.search.blends import Changed
from fxpar.search.bounds import Intervals
from fxpar.search.chunked import useful_chunks
from fxpar.search.fronts import undominated
from fxpar.search.known import KnownModel, Said
from fxpar.search.layer_list import Layers
from fxpar.search.layer_roles import LayerSearch
from fxpar.search.positions import child_of, experts_by_glob, glob_of_head, globs_of_attention, globs_of_weight
from fxpar.search.price import Candidate, Priced
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.proposals import WORTH, Chosen, Group, Proposal
from fxpar.search.space import (
    SAVINGS,
    in_bins,
    layout_of_ranks,
    layout_rule,
    role_layouts,
    single_axis,
    with_layout,
    with_savings,
    without_stages,
)
from fxpar.search.staged import StagedGuess
from fxpar.search.stages import StageSearch

TRIED = 3  # proposals that are lowered for a strategy, of either kind
SMALL = 0.05  # of a model's seconds and of its weights: a position with less is left as it is; of a set's seconds
ZERO = 3  # the level that a position may have beside that of the strategy
Point = tuple[tuple[ModuleRule, Priced], ...]


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
        for proposals in (self._stages, self._roles, self._layers):
            for one in list({one.name: one for _, one in chosen if not one.strategy.teams}.values()):
                group = self._group(chosen, one, best)
                if group is not None:
                    chosen, best = self._decided(group, list(proposals(group, one)), best)
        return best, chosen

    def _group(self, chosen: Chosen, one: Priced, best: PricedSet) -> Group | None:
        """None for a strategy that runs hardly anything."""
        mine = [limit for limit, other in chosen if other.name == one.name]
        if sum(g.seconds for g in best.groups if g.limit in mine) < SMALL * best.predicted_s:
            return None
        limits = [0, *(limit for limit, _ in chosen)]
        ranges = [(low, high) for low, high in itertools.pairwise(limits) if high in mine]
        batches = tuple(tuple(n for n in b if any(lo < n <= hi for lo, hi in ranges)) for b in self.pricer.batches)
        return Group(chosen, one.name, Intervals((mine[-1],), batches), self.pricer)

    def _decided(self, group: Group, proposals: list[Proposal], best: PricedSet) -> tuple[Chosen, PricedSet]:
        """With the best proposal that, lowered, makes the set faster."""
        chosen, must_s = group.chosen, (1 - WORTH) * best.predicted_s
        for proposal in sorted(proposals, key=lambda p: p.seconds)[:TRIED]:
            self.lowered += 1
            found = self._lowered(proposal)
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

    def _lowered(self, proposal: Proposal) -> list[Candidate]:
        found = [one for text in proposal.strategies if (one := self.known.candidate(text, self.said)) is not None]
        if found and proposal.closer is not None:
            return list(proposal.closer(found[0]))
        return found

    def _stages(self, group: Group, one: Priced) -> Iterator[Proposal]:
        now = self._alone(one.strategy)
        if now is not None:
            search = StageSearch(self.known, self.candidates, self.said)
            yield from search.proposals(group, group.seconds(now))

    # ------------------------------------------------------------------------------------------------------ roles
    def _roles(self, group: Group, one: Priced) -> Iterator[Proposal]:
        """What no other choice of roles beats. All ranks of a replica are on one axis: what several positions split of
        it is moved together, which two axes are not.
        """
        if one.strategy.by_stage:
            return
        plain = replace(one.strategy, rules=())
        inside = layout_of_ranks(plain)
        layouts = self._layouts(plain)
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

    def _front(self, group: Group, base: Strategy, alone: Priced, layouts: Sequence[Axes]) -> list[Point]:
        """Rules for some positions, with what each takes alone; none is beaten in memory, seconds and sync at once."""
        flat, layers = self.known.candidate(without_stages(base), self.said), self.known.layers
        if flat is None or layers is None:
            return []
        points: list[Point] = [()]
        sums = np.zeros((1, 3))
        for _, priced in self._positions(group, base, alone, layouts, flat, layers):
            options: list[tuple[Point, np.ndarray]] = [((), np.zeros(3))]
            for rule, one in priced:
                options.append((((rule, one),), _taken(one, group.limit) - _taken(alone, group.limit)))
            new = (sums[:, None] + np.array([more for _, more in options])).reshape(-1, 3)
            nbytes = np.rint(new[:, 0]).astype(np.int64)
            keep = undominated(nbytes, new[:, 1], new[:, 2], np.zeros(len(new), np.int64))
            points = [points[at // len(options)] + options[at % len(options)][0] for at in keep.tolist()]
            sums = new[keep]
        return [point for point in points if point]

    def _positions(
        self, group: Group, base: Strategy, alone: Priced, layouts: Sequence[Axes], flat: Candidate, layers: Layers
    ) -> Iterator[tuple[str, Point]]:
        """Each with its rules, and what the model takes with one of these. `flat` is `base` without stages."""
        attention, experts = globs_of_attention(flat, layers), experts_by_glob(flat, layers)
        head, chunks = glob_of_head(flat, layers), self._chunks(group, flat, alone)
        for glob in globs_of_weight(flat, layers, SMALL):
            others = [in_bins(layout) for layout in layouts if glob in attention]
            others += self._layouts(base, experts.get(glob, 1))
            found = []
            for rule in self._rules(base, glob, list(dict.fromkeys([*layouts, *others])), chunks * (glob == head)):
                priced = self._alone(replace(base, rules=(rule,)))
                # In chunks of the loss there may be room for bins.
                if priced is not None and (priced.strategy.bins == 1 or chunks > 1 or group.seconds(priced) < np.inf):
                    found.append((rule, priced))
            yield glob, tuple(found)

    def _layers(self, group: Group, one: Priced) -> Iterator[Proposal]:
        """Layers that differ in roles and savings: only memory makes equal layers run otherwise."""
        layers, plain = self.known.layers, replace(one.strategy, rules=())
        if layers is None or plain.by_stage or plain.pipeline.virtual > 1 or not self._is_short(group, one):
            return
        ranks = layout_of_ranks(plain)
        base = with_layout(plain, single_axis(ranks)) if len(ranks) > 1 else plain
        flats = [self.known.candidate(without_stages(level), self.said) for level in _levels(base, self.pricer.cluster)]
        levels = [flat for flat in flats if flat is not None and len(flat.samples) == 2]
        alone = self._alone(_saving_as(base, levels[0].strategy)) if levels else None
        if alone is None:
            return
        positions, own = [], []
        for glob, priced in self._positions(group, alone.strategy, alone, self._layouts(plain), levels[0], layers):
            pairs = [(rule, one.flat if isinstance(one, StagedGuess) else one) for rule, one in priced]
            some = tuple((rule, flat) for rule, flat in pairs if isinstance(flat, Candidate))
            if some and child_of(some[0][0], layers) != "":  # a layer has what it saves as its rule
                positions.append(some)
                own += [rule for rule, _ in some if rule == layout_rule(glob, ranks, None)]
        search = LayerSearch(self.known, levels, positions, tuple(own), layers, self.said)
        yield from search.proposals(group, one)

    def _layouts(self, strategy: Strategy, experts: int = 1) -> list[Axes]:
        """Of the ranks of a replica."""
        ranks = math.prod(degree for _, degree in layout_of_ranks(strategy))
        return role_layouts(ranks, self.pricer.cluster.devices_per_node, experts)

    def _chunks(self, group: Group, flat: Candidate, alone: Priced) -> int:
        """In how many chunks the loss may help; 1 where it does already, or memory is not short, for bins neither."""
        budget = group.budget(alone)
        bins = math.prod(degree for _, degree in layout_of_ranks(alone.strategy))
        short = budget is None or budget < max(self.pricer.largest, bins * group.limit)
        return useful_chunks(flat, budget or group.limit) if short and flat.strategy.chunks == 1 else 1

    def _is_short(self, group: Group, one: Priced) -> bool:
        """Whether a strategy would run otherwise with more memory: it saves some, or its micro-batches are small."""
        budget, strategy = group.budget(one), one.strategy
        saves = bool(strategy.zero or strategy.remat or strategy.offload)
        saves |= any(rule.zero or rule.remat or rule.offload for rule in strategy.rules)
        return saves or budget is None or (self.pricer.packed and budget < self.pricer.largest)

    def _rules(self, base: Strategy, glob: str, layouts: Sequence[Axes], chunks: int) -> Iterator[ModuleRule]:
        """All that a position may do otherwise; with `chunks` above 1 it may run in so many."""
        zeros, parts = (None, ZERO)[: 1 + (base.zero != ZERO)], (None, chunks)[: 1 + (chunks > 1)]
        for axes, zero, count in itertools.product(layouts, zeros, parts):
            same = axes == layout_of_ranks(base)
            if not same or zero is not None or count is not None:
                yield layout_rule(glob, () if same else axes, zero, count)

    def _alone(self, strategy: Strategy) -> Priced | None:
        """As it is known, or guessed from the strategy without stages."""
        if strategy.pipeline_size == 1 or strategy.by_stage:
            return self.known.candidate(strategy, self.said)
        flat = self.known.candidate(without_stages(strategy), self.said)
        if flat is None or len(flat.samples) == 1:
            return None
        return StagedGuess(strategy, self.pricer.cluster, self.known.anchors, flat)


def _levels(base: Strategy, cluster: ClusterSpec) -> list[Strategy]:
    """`base` with what saves memory in a layer. First what roles are tried beside: what it saves itself, or nothing
    where that is all, as roles then hold alike.
    """
    free = replace(base, remat=None, offload=0.0)
    whole = base.remat is not None and base.remat.mode == "full"
    found = [free if whole else base, free, base]
    found += [one for level in range(len(SAVINGS)) if (one := with_savings(free, level)) is not None]
    if cluster.sustained.overlap_slowdown is not None:
        found += [replace(one, offload=1.0) for one in found if one.remat is None or one.remat.mode != "full"]
    return list(dict.fromkeys(found))


def _saving_as(base: Strategy, other: Strategy) -> Strategy:
    return replace(base, zero=other.zero, remat=other.remat, offload=other.offload)


def _taken(one: Priced, tokens: int) -> np.ndarray:
    """Bytes at the peak, seconds of a micro-batch without gradient sync, seconds of that."""
    return np.array([one.memory(tokens).peak_bytes, one.group_cost.seconds([tokens]), one.reduce_s])
