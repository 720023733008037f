"""`find_plan`: from a model, a cluster and lengths to the sets of strategies that take least time, and the bound.

shapes       every degree of dp, pp, cp, tp of the world; each lowered once
savings      what saves memory (remat, ZeRO-3, chunks of the loss where logits are the peak) is lowered for the lengths
             that a shape does not hold without, unless some other shape is faster there than this one could be by the
             least that it takes, see `fxpar.search.floors`
sets         dynamic programming over the limits of groups; the best guesses are planned on sample mini-batches
             with their switches and reductions, until no other set can be faster
pipelines    zb_h1 waits less and keeps more: guesses at it choose among the best sets, then tried so, with a whole loss
teams        if they may be, the best wide replicas beside the best narrow ones are strategies too
rounds       if they are asked for, which strategies the teams of each size should run, see `fxpar.search.rounds`
rules        the best set and the best static strategy get rules and stages that differ, see `fxpar.search.ruled`
orders       the ranks of these are permuted, see `fxpar.search.rank_orders`
bound        each mini-batch cut at its own best limits, without borders and rests; see `fxpar.search.ideal` for rules
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from fxpar.cost.polynomial import Polynomial
from fxpar.errors import NoCandidateError, SequenceFitsNowhereError
from fxpar.ir.collector import collector_paused
from fxpar.ir.strategy import Strategy, of_degrees
from fxpar.search.bounds import Intervals, least_mini_batch, least_seconds
from fxpar.search.chunked import ChunkSearch
from fxpar.search.doubt import Doubt
from fxpar.search.floors import Floor, again_s
from fxpar.search.ideal import Kernels, ideal_seconds
from fxpar.search.known import KnownModel, Said
from fxpar.search.lengths import length_edges
from fxpar.search.price import Candidate, Lower, Priced, optimizer_s
from fxpar.search.pricing import PricedSet, SetPricer, different, guessed_border_s
from fxpar.search.problem import Found, Problem
from fxpar.search.rank_orders import in_best_order
from fxpar.search.reductions import accumulators_key
from fxpar.search.rounds import Rounds, best_rounds
from fxpar.search.ruled import RuleSearch
from fxpar.search.sets import Groups, RankedSet, ranked_sets
from fxpar.search.space import FASTER_SCHEDULE, SAVINGS, rescheduled, with_savings, without_stages
from fxpar.search.staged import StagedGuess
from fxpar.search.switching import Outlines
from fxpar.search.teams import Teams, pairs, without_teams
from fxpar.search.variants import Variants, without_idle

PLANNED = 48  # sets that are planned at most
LOOKED_AT = 8  # of these, best first, under a faster schedule, to choose those that are lowered
GUESSES = (StagedGuess, Teams)  # nothing was lowered for them
Tried = tuple[Strategy, int]  # a shape and its level of savings
CLOSE = 0.01  # by so much a set may be slower than it was ranked


def find_plan(problem: Problem, lower: Lower, outlines: Outlines, said: Said = lambda _: None) -> Found:
    """Search. `said` is told what is being done. Raises NoCandidateError, SequenceFitsNowhereError."""
    return find_plan_of(problem, problem.known(lower, outlines), said)


def find_plan_of(problem: Problem, known: KnownModel, said: Said = lambda _: None) -> Found:
    """`find_plan` for a model of which something may be known from other problems with the same cluster."""
    begun = time.process_time()
    search = _Search(problem, known, said)
    search.lower_all()
    return search.found(begun)


@dataclass
class _Search:
    problem: Problem
    known: KnownModel
    said: Said
    candidates: list[Priced] = field(default_factory=list)
    seconds: list[np.ndarray] = field(default_factory=list)
    pruned: int = 0
    priced: dict[Groups, PricedSet | None] = field(default_factory=dict)
    settled: dict[Groups, PricedSet] = field(default_factory=dict)
    given_up: dict[Groups, float] = field(default_factory=dict)  # seconds that they are sure to take
    at_best: dict[Groups, float] = field(default_factory=dict)  # seconds under a faster schedule
    used: dict[Groups, Groups] = field(default_factory=dict)  # of sets with groups that no mini-batch has
    again: dict[Strategy, tuple[Polynomial, Polynomial]] = field(default_factory=dict)  # see `again_s`
    uniform_s: float = np.inf  # of the best set without rules

    def __post_init__(self) -> None:
        problem = self.problem
        self.intervals = Intervals(length_edges(problem.longest), problem.batches)
        self.least = np.full(self.intervals.tokens.shape, np.inf)
        self.fastest = self.least.copy()
        self.pricer = SetPricer(
            problem.cluster,
            problem.depth,
            self.known.outlines,
            problem.batches,
            problem.memory_bytes,
            problem.packed,
            problem.overlap,
            switches=self.known.switches,
        )
        self.chunked = ChunkSearch(self.known, self.pricer, problem.longest, self.said)
        self.variants = Variants(self.known, self.pricer, self.said)
        self._in_order = partial(in_best_order, known=self.known, pricer=self.pricer, said=self.said)

    # ------------------------------------------------------------------------------------------------ candidates
    def lower_all(self) -> None:
        """The shapes, then what saves memory, level by level, with the loss in chunks where that helps."""
        left: list[Tried] = [(shape, 0) for shape in self.problem.shapes]
        while left:
            following: list[Tried] = []
            # Those that gather no weights first: they make many of the others useless.
            for shape, level in sorted(left, key=lambda one: (SAVINGS[one[1]][0], one[1])):
                # Those before it in its round may have made it useless.
                tried = self._helpful(shape, level) if level or shape.chunks > 1 else (shape, level)
                further = tried and self._add(*tried)
                following += [further] if further else []
            left = following
        if not self.candidates:
            raise NoCandidateError(f"{name}: {why}" for name, why in self.known.refused.items())
        if not self.problem.teams:
            return
        for guess, least in pairs(self.candidates, self.seconds, self.pricer, self.intervals):
            self.candidates.append(guess)
            self.seconds.append(least)
            self.least = np.minimum(self.least, least)

    def _add(self, shape: Strategy, level: int) -> Tried | None:
        """Lower a strategy, if it is one; what to try next of a shape that may need more savings."""
        strategy = with_savings(shape, level)
        more = (replace(shape, chunks=1), level + 1) if level + 1 < len(SAVINGS) else None
        if strategy is None:
            return more
        with collector_paused():
            one = self.known.guessed(strategy, self.said) or self.known.candidate(strategy, self.said)
            if one is None:
                return more if shape.chunks > 1 else None
            budgets = self.pricer.budgets(one, self.intervals.edges)
            self.candidates.append(one)
            self.seconds.append(least_seconds(one.cost, strategy, budgets, self.intervals))
            self.fastest = np.minimum(self.fastest, self.seconds[-1])
            # With no less room than it has under a schedule that keeps more.
            faster = replace(one.cost, schedule=FASTER_SCHEDULE) if rescheduled(strategy) else one.cost
            self.least = np.minimum(self.least, least_seconds(faster, strategy, budgets, self.intervals))
        wanted = self.pricer.largest if self.problem.packed else 0
        if not any(budget is None or budget < wanted for budget in budgets):
            return None
        chunks = self.chunked.chunks(strategy) if shape.chunks == 1 else 1
        return (replace(shape, chunks=chunks), level) if chunks > 1 else more

    def _helpful(self, shape: Strategy, level: int) -> Tried | None:
        """This level of savings of a shape, or the first one behind it that may help; None if there is none."""
        base = next((one for one in self.candidates if one.strategy.axes == shape.axes), None)
        while base is not None and level < len(SAVINGS):
            strategy = with_savings(shape, level)
            if strategy is not None:
                if self._may_help(base, strategy):
                    return shape, level
                self.pruned += 1
            shape, level = replace(shape, chunks=1), level + 1
        return None

    def _may_help(self, base: Priced, strategy: Strategy) -> bool:
        """Whether what saves memory beside `base` could be fastest for some lengths of some mini-batch: by the least
        that it takes and holds, under either schedule; where that is not known, as fast as `base`, with all memory in
        the world.
        """
        edges, floor = self.intervals.edges, self._floor(base, strategy)
        wanted = [max(edge, self.pricer.largest) for edge in edges] if floor is None else None
        one = floor or base
        budgets = wanted or self.pricer.budgets(one, edges)
        faster = replace(one.group_cost, schedule=FASTER_SCHEDULE) if rescheduled(strategy) else one.cost
        pairs = [(one.cost, self.fastest), (faster, self.least)]
        at_best = ((least_seconds(cost, strategy, budgets, self.intervals) < known) for cost, known in pairs)
        return any(bool(found[:, self.intervals.inside].any()) for found in at_best)

    def _floor(self, base: Priced, strategy: Strategy) -> Priced | None:
        """What a strategy takes at least; None if that is not known."""
        flat = base.flat if isinstance(base, StagedGuess) else base
        if not isinstance(flat, Candidate) or len(flat.programs) == 1 or flat.strategy.pipeline_size > 1:
            return None
        if flat.strategy not in self.again:
            self.again[flat.strategy] = again_s(flat)
        alone = strategy if base is flat else without_stages(strategy)
        least = Floor(alone, flat.cluster, flat.anchors, flat, self.again[flat.strategy])
        return least if base is flat else StagedGuess(strategy, flat.cluster, flat.anchors, least)

    # ------------------------------------------------------------------------------------------------------ sets
    def found(self, begun: float) -> Found:
        """Raises SequenceFitsNowhereError."""
        bound = least_mini_batch(self.least, self.problem.max_strategies)
        if not np.isfinite(bound):
            raise self._nothing_fits()
        self.pricer.optimizer_s = optimizer_s(self.candidates[0], self.problem.cluster)
        plans, static = self._chosen()
        return Found(
            plans=tuple(plans),
            best_static=static,
            lower_bound_s=min(self._bound_with_rules() + self.pricer.optimizer_s, plans[0].predicted_s),
            uniform_bound_s=min(bound + self.pricer.optimizer_s, self.uniform_s),
            uniform_s=self.uniform_s,
            evaluated=len(self.candidates),
            pruned=self.pruned,
            planned_sets=sum(one is not None for one in self.priced.values()),
            refused=dict(self.known.refused),
            search_cpu_s=time.process_time() - begun,
            ruled=self.rules.lowered,
            rounds=self._rounds() if self.problem.rounds else None,
        )

    def _rounds(self) -> Rounds | None:
        return best_rounds(self.candidates, self.problem.longest, self.pricer, self.known, self.said)

    def _bound_with_rules(self) -> float:
        """Seconds of a mini-batch that no set undercuts, one with rules if these are searched."""
        least = self.least
        if self.problem.rules:
            whole = self.known.candidate(of_degrees(self.problem.cluster.world, 1, 1, 1), self.said)
            kernels = Kernels.of(whole)
            least = np.minimum(least, ideal_seconds(kernels, self.candidates, self.intervals, self.pricer.largest))
        return least_mini_batch(least, self.problem.max_strategies)

    def _ranked(self, most: int, teams: bool = False) -> list[RankedSet]:
        """Sets of at most so many strategies, with or without teams, whose bounds are low: they would crowd out all."""
        seconds = self.seconds if teams else without_teams(self.candidates, self.seconds)
        borders = [guessed_border_s(one, self.problem.cluster) * (most > 1) for one in self.candidates]
        return ranked_sets(seconds, borders, self.intervals, most, [*map(accumulators_key, self.candidates)])

    def _best(self, ranked: Iterable[RankedSet], keep: int) -> list[PricedSet]:
        """Planned on the sample mini-batches, best first, until no other one can be among the best `keep`; those that
        do not fit are left out.
        """
        found: list[PricedSet] = []
        tried = 0
        for one in ranked:
            worst = sorted(p.predicted_s for p in found)[keep - 1] if len(found) >= keep else np.inf
            if max(one.least_s + self.pricer.optimizer_s, self.given_up.get(one.groups, 0.0)) >= worst:
                continue
            if tried == PLANNED:
                break
            tried += 1
            self.said(f"planning set {tried}")
            priced = self._price(one.groups, worst)
            if priced is not None and not any(priced is other for other in found):
                found.append(priced)
        return sorted(found, key=_seconds)

    def _price(self, groups: Groups, must_s: float = np.inf) -> PricedSet | None:
        """Of a set, or of its groups that mini-batches have: sequences of the others run better in longer groups. None
        also for one that is expected to take more than `must_s`.
        """
        groups = self.used.get(groups, groups)
        if groups not in self.priced:
            edges = self.intervals.edges
            before = [0, *(edge + 1 for edge, _ in groups)]
            least = sum(self.seconds[s][:, i, edge] for i, (edge, s) in zip(before, groups, strict=False))
            doubt = Doubt(np.asarray(least).tolist(), must_s - self.pricer.optimizer_s)
            priced = self.pricer.price([(edges[edge], self.candidates[s]) for edge, s in groups], doubt=doubt)
            if priced is None and doubt.sure_s is not None:
                self.given_up[groups] = doubt.sure_s + self.pricer.optimizer_s
                return None
            if priced is not None and self._learns_use(groups, priced):
                return self._price(groups, must_s)
            self.priced[groups] = priced
        return self.priced[groups]

    def _learns_use(self, groups: Groups, priced: PricedSet) -> bool:
        """Whether there are groups in a set that no mini-batch has; the last one holds what is longer than all."""
        pairs = list(zip(groups, priced.groups, strict=True))
        used = (*(one for one, group in pairs[:-1] if group.tokens), groups[-1])
        if used != groups:
            self.used[groups] = used
        return used != groups

    def _chosen(self) -> tuple[list[PricedSet], PricedSet]:
        """The best sets and the best single strategy, settled. Sets are ranked again where one of them holds less than
        was thought, or takes longer with the tokens that it holds. Raises SequenceFitsNowhereError.
        """
        while True:
            static = next(iter(self._best(self._ranked(1), 1)), None)
            if static is None:
                raise self._nothing_fits()
            # It may fit alone where no ranked set does: others need room for weights and messages beside it.
            found = [static, *self._best(self._ranked(self.problem.max_strategies), self.problem.keep)]
            if self.problem.teams:
                found += self._best(self._ranked(self.problem.max_strategies, teams=True), self.problem.keep)
            found.sort(key=_seconds)
            found[:LOOKED_AT] = sorted(found[:LOOKED_AT], key=self._at_best_s)
            plans = different(found, self.pricer)
            best = [static, *plans[: self.problem.keep]]
            groups = [self._groups_of(plan) for plan in best]
            if not any([self._disappoints(one, plan) for one, plan in zip(groups, best, strict=True)]):
                break
        refined = sorted((self._refined(one, rules=number < 2) for number, one in enumerate(groups)), key=_seconds)
        # What saves memory or permutes ranks may make sets alike, or leave one strategy of two.
        static = next(one for one in refined if one.alone)
        return different(refined, self.pricer)[: self.problem.keep], static

    def _at_best_s(self, plan: PricedSet) -> float:
        """Of a set with guesses at pipelines under a faster schedule where they fit: all of them, else one by one."""
        groups = self._groups_of(plan)
        if groups not in self.at_best:
            chosen = [(self.intervals.edges[edge], self.candidates[s]) for edge, s in groups]
            faster = [(limit, self._faster(one)) for limit, one in chosen]
            changed = [i for i, one in enumerate(faster) if one[1] is not chosen[i][1]]
            best = self.pricer.price(faster) if changed else plan
            if best is None:
                singles = (self.pricer.price([*chosen[:i], faster[i], *chosen[i + 1 :]]) for i in changed)
                best = min(filter(None, singles), key=_seconds, default=plan)
            self.at_best[groups] = min(plan.predicted_s, best.predicted_s)
        return self.at_best[groups]

    def _faster(self, one: Priced) -> Priced:
        faster = rescheduled(one.strategy) if isinstance(one, StagedGuess) else None
        return one if faster is None else self.known.guessed(faster, self.said) or one

    def _refined(self, groups: Groups, rules: bool) -> PricedSet:
        """A settled set, under a faster schedule, with ranks permuted and with rules, where that takes less time."""
        settled, chosen = self.settled[groups], self._lowered(groups)
        best = without_idle(self._in_order(self.variants.best(chosen, settled)))
        self.uniform_s = min(self.uniform_s, best.predicted_s)
        if not (rules and self.problem.rules):
            return best
        ruled, chosen = self.rules.better(chosen, settled)
        other = best if ruled is settled else without_idle(self._in_order(self.variants.best(chosen, ruled)))
        return min(best, other, key=_seconds)

    @cached_property
    def rules(self) -> RuleSearch:
        alone = [one for one in self.candidates if not one.strategy.teams]
        return RuleSearch(self.known, self.pricer, alone, self.said)

    def _disappoints(self, groups: Groups, plan: PricedSet) -> bool:
        """Whether a set is not what it was ranked as, which is then put right. A set with guesses in it is only where
        it does not hold its tokens: what a guess is takes a lowering, and good sets tend to have guesses in them.
        """
        if groups in self.settled:
            return False
        guesses = {s for _, s in groups if type(self.candidates[s]) in GUESSES}
        settled = self._settled(groups)
        if settled is None:
            if not self._look_closer(guesses):
                self.priced[groups] = None
            return True
        if self._learns_use(groups, settled):
            del self.priced[groups]
            return True
        self.settled[groups] = settled
        if guesses:
            return False
        self.priced[groups] = settled
        return settled.predicted_s > (1 + CLOSE) * plan.predicted_s

    def _groups_of(self, plan: PricedSet) -> Groups:
        return next(groups for groups, priced in self.priced.items() if priced is plan)

    def _settled(self, groups: Groups) -> PricedSet | None:
        """With the tokens of micro-batches as predicted for just these; None if one of its strategies does not hold
        them.
        """
        chosen = self._lowered(groups)
        return self.pricer.price(chosen, settle=True) if len(chosen) == len(groups) else None

    def _lowered(self, groups: Groups) -> list[tuple[int, Priced]]:
        """Limits and strategies of a set, none of them guessed at; without those that cannot be lowered."""
        chosen = []
        for edge, s in groups:
            one = self.candidates[s]
            known = self.known.priced(one.strategy, self.said) if type(one) in GUESSES else one
            if known is not None:
                chosen.append((self.intervals.edges[edge], known))
        return chosen

    def _look_closer(self, guesses: set[int]) -> bool:
        """Replace these candidates by what they are; whether there was one."""
        for s in guesses:
            strategy = self.candidates[s].strategy
            one = self.known.priced(strategy, self.said)
            if one is None:  # it cannot be lowered at all
                self.seconds[s] = np.full_like(self.seconds[s], np.inf)
                continue
            self.candidates[s], budgets = one, self.pricer.budgets(one, self.intervals.edges)
            self.seconds[s] = least_seconds(one.cost, strategy, budgets, self.intervals)
        for known in (self.priced, self.used, self.given_up, self.at_best):
            for groups in [one for one in known if not guesses.isdisjoint(s for _, s in one)]:
                del known[groups]
        return bool(guesses)

    def _nothing_fits(self) -> SequenceFitsNowhereError:
        longest = self.problem.longest
        one = min(self.candidates, key=lambda c: c.memory(longest).peak_bytes)
        return SequenceFitsNowhereError(
            longest, self.problem.memory_bytes or 0, one.name, one.memory(longest).peak_bytes
        )


_seconds = operator.attrgetter("predicted_s")
