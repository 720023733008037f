"""A set of strategies on sample mini-batches: planned as the engine plans them, borders included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxpar.batching import BatchPlan, LengthGroup, RunTime, plan_batch
from fxpar.batching.borders import Borders, by_strategy, overlap_pays
from fxpar.batching.planner import BorderSeconds, KnownLoads, least_batch_s
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import largest_team
from fxpar.search.doubt import FEW, Doubt
from fxpar.search.price import Depth, Priced
from fxpar.search.reductions import SetReductions, accumulator_bytes, accumulators_key
from fxpar.search.room import settled_tokens
from fxpar.search.runs import busy_s, simulated_run_s
from fxpar.search.sets import DIFFERENT
from fxpar.search.switching import ModelSwitches, Outlines, SetSwitches
from fxpar.search.traffic import SetTraffic, lowered, orders_of


@dataclass(frozen=True)
class PricedGroup:
    """A length group of a set; `seconds` are those of its runs in a mean mini-batch, `tokens` its share of all. Those
    that are planned take all stages of a pipeline for the slowest; `simulated_s` is what the schedule of stages that
    differ takes, of a set that has settled. There are so many `micro_batches` on all replicas, which they keep a
    replica `busy_s` in the mean: else it waits, in bubbles and for slower replicas. (Of a set that has not settled,
    and of teams side by side, it is `seconds`.)
    """

    limit: int
    strategy: str
    token_budget: int
    seconds: float
    tokens: float
    simulated_s: float
    micro_batches: float
    busy_s: float


@dataclass(frozen=True)
class PricedSet:
    """Seconds of a mean mini-batch; `switch_s` and `reduce_s` are what those take, `exposed_s` what of both the step
    waits for. `memory_parts` by strategy: what a rank holds while it runs, by what for (gradients stand with the
    parameters at home; with switches what the other strategies need beyond this one).
    """

    groups: tuple[PricedGroup, ...]
    predicted_s: float
    exposed_s: float
    switch_s: float
    reduce_s: float
    optimizer_s: float
    memory_parts: Mapping[str, Mapping[str, int]]
    optimizer_bytes: int  # of them
    traffic: SetTraffic | None = field(default=None, compare=False, repr=False)  # of a set that has settled
    usual: PricedSet | None = field(default=None, compare=False, repr=False)  # before its ranks were permuted

    @property
    def memory_bytes(self) -> dict[str, int]:
        """By strategy: the peak of a rank while it runs."""
        return {name: sum(parts.values()) for name, parts in self.memory_parts.items()}

    @property
    def alone(self) -> bool:
        """Whether it is one strategy for all sequences, of one team."""
        return len(self.groups) == 1 and not Strategy.parse(self.groups[0].strategy).teams

    @property
    def simulated_s(self) -> float:
        """`predicted_s` with the schedules of pipelines simulated."""
        return self.predicted_s + sum(group.simulated_s - group.seconds for group in self.groups)

    @property
    def strategies(self) -> tuple[str, ...]:
        """By ascending limit, each once."""
        return tuple(dict.fromkeys(group.strategy for group in self.groups))


@dataclass
class SetPricer:
    """Prices sets on `batches`; a device holds `memory_bytes` (None: nobody counts). `switches` may be those that other
    sets of the model have had.
    """

    cluster: ClusterSpec
    depth: Depth
    outlines: Outlines
    batches: tuple[tuple[int, ...], ...]
    memory_bytes: int | None
    packed: bool = True
    overlap: bool = False
    optimizer_s: float = 0.0
    switches: ModelSwitches | None = None
    _loads: KnownLoads = field(default_factory=dict, init=False)

    @cached_property
    def largest(self) -> int:
        """Tokens of the largest mini-batch: no micro-batch needs more room."""
        return max(map(sum, self.batches))

    @cached_property
    def _switches(self) -> ModelSwitches:
        return self.switches or ModelSwitches(self.cluster, self.depth, self.outlines)

    @cached_property
    def mean_tokens(self) -> float:
        return sum(map(sum, self.batches)) / len(self.batches)

    def groups(
        self, chosen: Sequence[tuple[int, Priced]], settle: bool = False, overlap: bool = False
    ) -> tuple[LengthGroup, ...] | None:
        """Length groups of (limit, candidate), ascending, each with the tokens that there is memory for beside the
        weights of the largest; None if one of them cannot hold a sequence of its limit. `settle`: memory is predicted
        for just these tokens; `overlap`: gradients of one group leave while the next one runs.
        """
        found = []
        for limit, one in chosen:
            shared = max(other.stays.weight_bytes for _, other in chosen) + _beyond(one, chosen, overlap)
            budget = self._budget(limit, one, shared, settle)
            if budget is None:
                return None
            found.append(LengthGroup(limit, one.strategy, budget, one.multiple))
        return tuple(found)

    def needs(self, chosen: Sequence[tuple[int, Priced]]) -> list[int]:
        """Bytes that each group of a set needs for one sequence of its limit."""
        weights = max(one.stays.weight_bytes for _, one in chosen)
        found = [(one, one.memory(least_tokens(limit, one))) for limit, one in chosen]
        return [m.stays_bytes + weights + m.beside_bytes + _beyond(one, chosen, False) for one, m in found]

    def _wanted(self, limit: int, one: Priced) -> tuple[int, int] | None:
        """The fewest tokens of a micro-batch, and the most that one could want; None if it holds no such sequence."""
        least, said = least_tokens(limit, one), largest_team(one.strategy).tokens
        if said:
            return None if said < least else (said, said)
        return least, max(least, self.largest) if self.packed else least

    def _budget(self, limit: int, one: Priced, shared_bytes: int, settle: bool = False) -> int | None:
        """`shared_bytes` are those of weights, and what else the set reserves beyond this strategy."""
        wanted = self._wanted(limit, one)
        if wanted is None or self.memory_bytes is None:
            return wanted and wanted[1]
        least, most = wanted
        room = self.memory_bytes - one.stays.stays_bytes - shared_bytes
        tokens = one.most_tokens(least, room, most)
        return settled_tokens(one, room, least, tokens, most) if settle and tokens is not None else tokens

    def budgets(self, one: Priced, edges: Sequence[int]) -> list[int | None]:
        """Tokens of a micro-batch of a candidate alone, by limit: what it could have at best in a set."""
        found: list[int | None] = []
        before: tuple[int, int] | None = None
        for edge in edges:
            wanted = self._wanted(edge, one)
            if not found or found[-1] is None or wanted is None or before is None or wanted[1] != before[1]:
                # What does not hold a shorter sequence holds no longer one.
                held = not found or found[-1] is not None
                found.append(self._budget(edge, one, one.stays.weight_bytes) if held else None)
            else:  # as many, where these hold the longer sequence: there is room for no more
                found.append(found[-1] if wanted[0] <= found[-1] else None)
            before = wanted
        return found

    def price(
        self, chosen: Sequence[tuple[int, Priced]], settle: bool = False, doubt: Doubt | None = None
    ) -> PricedSet | None:
        """None if it does not fit, or if it is given up for `doubt`; `settle` as for `groups`. Groups overlap, if they
        may, where that is faster with the memory that it takes. Raises what planning a mini-batch raises.
        """
        may = self._may_overlap(chosen)
        ways = {overlap: self.groups(chosen, settle, overlap) for overlap in ((True, False) if may else (False,))}
        if may and ways[True] == ways[False]:
            del ways[False]  # as many tokens, and nothing is hidden
        planned = [self._planned(chosen, groups, settle, overlap, doubt) for overlap, groups in ways.items() if groups]
        found = [one for one in planned if one is not None]
        return min(found, key=lambda one: one.predicted_s, default=None)

    def at_best_s(self, chosen: Sequence[tuple[int, Priced]]) -> float:
        """Seconds of a mini-batch if memory were no matter: weights stay side by side, micro-batches are as large as
        one could want, and switches take what they must. `price` takes no less, and much longer, as it predicts what
        all of this would need.
        """
        groups = []
        for limit, one in chosen:
            wanted = self._wanted(limit, one)
            if wanted is None:
                return math.inf
            groups.append(LengthGroup(limit, one.strategy, wanted[1], one.multiple))
        unique = {one.name: one for _, one in chosen}
        switching = self._switches.of_set(unique, tuple(unique), guess=True).at_least()
        ways = (True, False) if self._may_overlap(chosen) else (False,)
        plans = [self._mini_batches(groups, chosen, self._border_s(chosen, switching, overlap)) for overlap in ways]
        return min(sum(plan.predicted_s for plan in each) / len(each) for each in plans) + self.optimizer_s

    def _may_overlap(self, chosen: Sequence[tuple[int, Priced]]) -> bool:
        return self.overlap and overlap_pays(len({accumulators_key(one) for _, one in chosen}), self.cluster)

    def _mini_batches(
        self,
        groups: Sequence[LengthGroup],
        chosen: Sequence[tuple[int, Priced]],
        border_s: BorderSeconds,
        least_border_s: BorderSeconds | None = None,
        doubt: Doubt | None = None,
    ) -> list[BatchPlan]:
        """Plans of all mini-batches, or of as many as it took to give up; borders as for `plan_batch`."""
        costs = [one.cost for _, one in chosen]
        found: list[BatchPlan] = []
        for batch in self.batches:
            # Without riders, as the bound has it: a run is predicted no slower than this.
            known = {"packed": self.packed, "ride": False, "known": self._loads, "least_border_s": least_border_s}
            found.append(plan_batch(batch, groups, costs, border_s, **known))  # type: ignore[arg-type]
            if doubt is not None and doubt.gives_up([plan.predicted_s for plan in found]):
                break
        return found

    def _borders(self, chosen: Sequence[tuple[int, Priced]], switching: SetSwitches, overlap: bool) -> Borders:
        unique = {one.name: one for _, one in chosen}
        flowing = {name: one.pace for name, one in unique.items() if one.pace is not None}
        return Borders(switching, SetReductions.of(unique), overlap, flowing)

    def _border_s(self, chosen: Sequence[tuple[int, Priced]], switching: SetSwitches, overlap: bool) -> BorderSeconds:
        """What borders of a set add to a mini-batch."""
        borders, names = self._borders(chosen, switching, overlap), [one.name for _, one in chosen]

        def border_s(running: Sequence[int], runs: Sequence[RunTime]) -> float:
            together = by_strategy([names[g] for g in running], runs)
            order = switching.order(list(together))
            return borders.exposed_s(borders.fastest(order, together, switching.least), together)

        return border_s

    def _is_ruled_out(
        self,
        chosen: Sequence[tuple[int, Priced]],
        groups: Sequence[LengthGroup],
        least_border_s: BorderSeconds,
        doubt: Doubt,
    ) -> bool:
        """Whether a set is given up for what its first mini-batches take at least: without a switch that is planned, or
        a micro-batch that is made up.
        """
        costs = [one.cost for _, one in chosen]
        known = {"packed": self.packed, "known": self._loads}
        batches = self.batches[:FEW]
        return doubt.rules_out([least_batch_s(batch, groups, costs, least_border_s, **known) for batch in batches])  # type: ignore[arg-type]

    def _planned(
        self,
        chosen: Sequence[tuple[int, Priced]],
        groups: tuple[LengthGroup, ...],
        settle: bool,
        overlap: bool,
        doubt: Doubt | None,
    ) -> PricedSet | None:
        unique = {one.name: one for _, one in chosen}
        weights = self._switches.weight_bytes(unique, guess=not settle)
        kept, reductions = self._resident(chosen, groups, weights, overlap), SetReductions.of(unique)
        if overlap and not kept and reductions.are_shared:
            return None  # weights that take turns overwrite what gradients may be views of: there is no room for all
        switching = self._switches.of_set(unique, kept, guess=not settle)
        least_s = self._border_s(chosen, switching.at_least(), overlap)
        if doubt is not None and self._is_ruled_out(chosen, groups, least_s, doubt):
            return None
        plans = self._mini_batches(groups, chosen, self._border_s(chosen, switching, overlap), least_s, doubt)
        names, count = [one.name for _, one in chosen], len(plans)
        if count < len(self.batches):
            return None
        orders = orders_of(self._borders(chosen, switching, overlap), switching, names, plans)
        switch_s = reduce_s = 0.0
        for order in orders:
            switch_s += sum(switching.predicted_s(name, order[:i]) for i, name in enumerate(order)) / count
            reduce_s += sum(map(reductions.predicted_s, reductions.leaving(order))) / count
        total = sum(plan.predicted_s for plan in plans) / count
        return PricedSet(
            groups=self._run_s(chosen, groups, plans, settle),
            predicted_s=total + self.optimizer_s,
            exposed_s=sum(plan.switch_s for plan in plans) / count,
            switch_s=switch_s,
            reduce_s=reduce_s,
            optimizer_s=self.optimizer_s,
            memory_parts=self._memory(chosen, groups, weights if kept else 0, overlap, settle),
            optimizer_bytes=max(one.stays.optimizer_bytes for _, one in chosen),
            traffic=SetTraffic(lowered(chosen), self.batches, plans, switching, reductions, orders) if settle else None,
        )

    def _run_s(
        self,
        chosen: Sequence[tuple[int, Priced]],
        groups: Sequence[LengthGroup],
        plans: Sequence[BatchPlan],
        settle: bool,
    ) -> tuple[PricedGroup, ...]:
        """Means over the mini-batches, which ran as planned."""
        seconds, tokens, simulated, runs, busy = ([0.0] * len(groups) for _ in range(5))
        for batch, plan in zip(self.batches, plans, strict=True):
            for group in plan.groups:
                found = simulated_run_s(chosen[group.group][1], group, batch) if settle else group.predicted_s
                seconds[group.group] += group.predicted_s / len(plans)
                simulated[group.group] += found / len(plans)
                tokens[group.group] += sum(m.tokens for m in group.micro_batches()) / len(plans)
                runs[group.group] += sum(map(len, group.replicas)) / len(plans)
                worked = busy_s(chosen[group.group][1].cost, group, batch) if settle else group.predicted_s
                busy[group.group] += worked / len(plans)
        return tuple(
            PricedGroup(g.limit, str(g.strategy), g.token_budget, seconds[i], tokens[i], simulated[i], runs[i], busy[i])
            for i, g in enumerate(groups)
        )

    def _resident(
        self, chosen: Sequence[tuple[int, Priced]], groups: Sequence[LengthGroup], weights: int, overlap: bool
    ) -> tuple[str, ...]:
        """All strategies if their `weights` fit side by side, else none: they take turns in an arena."""
        unique = {one.name: one for _, one in chosen}
        if self.memory_bytes is None or len(unique) == 1:
            return tuple(unique)
        pairs = [(one, one.memory(group.token_budget)) for group, (_, one) in zip(groups, chosen, strict=True)]
        beside = max(m.stays_bytes + m.beside_bytes + _beyond(one, chosen, overlap) for one, m in pairs)
        return tuple(unique) if weights + beside <= self.memory_bytes else ()

    def _memory(
        self,
        chosen: Sequence[tuple[int, Priced]],
        groups: Sequence[LengthGroup],
        held: int,
        overlap: bool,
        settle: bool,
    ) -> dict[str, dict[str, int]]:
        """Parts, by strategy; `held` are the weights of all side by side, 0 where they take turns; `settle` as for
        `groups`.
        """
        held = held or max(one.stays.weight_bytes for _, one in chosen)
        found: dict[str, dict[str, int]] = {}
        for group, (_, one) in zip(groups, chosen, strict=True):
            memory = (one.at if settle else one.memory)(group.token_budget)
            parts = {
                "home": memory.home_bytes,
                "optimizer": memory.optimizer_bytes,
                "weights": held,
                "micro_batch": memory.step_bytes,
                "switches": memory.staging_bytes + _beyond(one, chosen, overlap),
            }
            found[one.name] = max(found.get(one.name, parts), parts, key=lambda one: sum(one.values()))
        return found


def guessed_border_s(one: Priced, cluster: ClusterSpec) -> float:
    """A guess that orders sets before they are planned: weights come and gradients leave over the slowest link of a
    rank.
    """
    per_s = float(cluster.bytes_per_s(between=cluster.nodes > 1))
    return 2 * one.stays.weight_bytes / per_s if one.strategy.world > 1 else 0.0


def least_tokens(limit: int, one: Priced) -> int:
    """Tokens of a micro-batch with a sequence of the limit in each bin; of teams side by side that of the largest."""
    return limit * largest_team(one.strategy).bins


def _beyond(one: Priced, chosen: Sequence[tuple[int, Priced]], overlap: bool) -> int:
    """What a session reserves beyond what this strategy needs: room for the largest messages of the set, and for its
    accumulators.
    """
    found = [other for _, other in chosen]
    staging, gradients = max(other.stays.staging_bytes for other in found), accumulator_bytes(found, overlap)
    return staging + gradients - one.stays.staging_bytes - one.stays.gradient_bytes


def moved_tokens(plan: PricedSet, other: PricedSet) -> float:
    """Tokens of a mean mini-batch that the two sets run under different strategies."""
    mine, theirs = _tokens(plan), _tokens(other)
    names = mine.keys() | theirs.keys()
    return sum(abs(mine.get(name, 0.0) - theirs.get(name, 0.0)) for name in names) / 2


def different(plans: Sequence[PricedSet], pricer: SetPricer) -> list[PricedSet]:
    """Without sets that run nearly all tokens as a better one does, which stands before them."""
    kept: list[PricedSet] = []
    for plan in plans:
        if all(moved_tokens(plan, other) > DIFFERENT * pricer.mean_tokens for other in kept):
            kept.append(plan)
    return kept


def _tokens(plan: PricedSet) -> dict[str, float]:
    found: dict[str, float] = {}
    for group in plan.groups:
        found[group.strategy] = found.get(group.strategy, 0.0) + group.tokens
    return found
