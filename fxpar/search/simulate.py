"""`simulate`: what a set of strategies takes that a user names, priced as `find_plan` prices its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import PlanOptionError, SequenceFitsNowhereError, SetDoesNotFitError
from fxpar.ir.module_rules import split_outside
from fxpar.ir.strategy import Strategy
from fxpar.ir.written import LONGEST
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.driver import PLANNED
from fxpar.search.known import KnownModel
from fxpar.search.lengths import length_edges
from fxpar.search.price import Lower, Priced, anchors_of, optimizer_s
from fxpar.search.pricing import PricedSet, SetPricer
from fxpar.search.sets import ranked_sets


@dataclass(frozen=True)
class Named:
    """A strategy of the set, and the longest sequence that it runs; None: the planner chooses which lengths it runs."""

    strategy: Strategy
    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> Named:
        """`dp4` or `dp4:4096`. Raises StrategySyntaxError, PlanOptionError."""
        name = split_outside(text, ":")[0]
        colon, limit = text[len(name) : len(name) + 1], text[len(name) + 1 :]
        if colon and not (limit.isascii() and limit.isdigit() and len(limit) < 20 and 1 <= int(limit) <= LONGEST):
            why = f"write a number of tokens from 1 to {LONGEST:,} after the colon, such as {name}:4096"
            raise PlanOptionError("--strategy", text, why)
        return cls(Strategy.parse(name), int(limit) if colon else None)


@dataclass(frozen=True)
class Simulated:
    """The set, and each of its strategies alone, where it holds the longest sequence."""

    plan: PricedSet
    statics: Mapping[str, PricedSet]

    @property
    def best_static(self) -> PricedSet | None:
        """None if no strategy of the set holds all sequences alone."""
        return min(self.statics.values(), key=lambda one: one.predicted_s, default=None)

    @property
    def speedup(self) -> float | None:
        """Of the set over its best strategy alone."""
        best = self.best_static
        return None if best is None else best.predicted_s / self.plan.predicted_s


def simulate(
    named: Sequence[Named],
    longest: int,
    lower: Lower,
    pricer: SetPricer,
    inside: ClusterSpec | None = None,
    tries: int = PLANNED,
) -> Simulated:
    """Price the set on the mini-batches of `pricer`, whose sequences have at most `longest` tokens. Limits are those
    that are named; where none is, the best that dynamic programming finds, and a strategy that is of no use runs none.
    `inside` prices programs, if links sustain another rate there than in switches; `tries` sets of limits are planned.

    Raises PlanOptionError for limits that do not fit together, SequenceFitsNowhereError, and what `fxpar.lower` raises.
    """
    named = _checked(named, longest)
    anchors = (min(256, longest), max(pricer.largest, 2 * longest))
    cluster = inside or pricer.cluster
    known = KnownModel(lower, pricer.outlines, cluster, pricer.depth, anchors)
    found = [known.named(one.strategy) for one in named]
    anchors = anchors_of(found[0])
    for one in found:
        one.anchors = anchors
        if one.multiple > 1:
            why = f"it takes only lengths that are multiples of {one.multiple}; prepare such lengths, or leave it out"
            raise PlanOptionError("--strategy", one.name, why)
    pricer = replace(pricer, optimizer_s=optimizer_s(found[0], pricer.cluster))
    alone = ((one.name, pricer.price([(longest, one)], settle=True)) for one in found)
    statics = {name: priced for name, priced in alone if priced is not None}
    limited = [(one.limit or longest, priced) for one, priced in zip(named, found, strict=True)]
    if named[0].limit is not None:
        plan = pricer.price(limited, settle=True)
        if plan is None:
            raise _does_not_fit(limited, pricer)
    else:
        several = _with_best_limits(found, longest, pricer, tries)
        known = [one for one in (several, *statics.values()) if one is not None]
        plan = min(known, key=lambda one: one.predicted_s, default=None)
        if plan is None:
            raise _too_long(found, longest, pricer)
    return Simulated(plan, statics)


def _checked(named: Sequence[Named], longest: int) -> list[Named]:
    """By ascending limit; the last limit may be left out."""
    limits = [one.limit for one in named if one.limit is not None]
    if not limits:
        return list(named)
    if len(limits) < len(named) - 1:
        why = "give each strategy a limit, or none of them; the one for the longest sequences may go without"
        raise PlanOptionError("--strategy", _written(named), why)
    if len(set(limits)) < len(limits):
        raise PlanOptionError("--strategy", _written(named), "two strategies have the same limit; give each its own")
    if len(limits) == len(named) and max(limits) < longest:
        why = f"sequences have up to {longest} tokens; raise the largest limit to that, or leave it out"
        raise PlanOptionError("--strategy", _written(named), why)
    return sorted(named, key=lambda one: one.limit or max(longest, *limits) + 1)


def _written(named: Sequence[Named]) -> str:
    """As a user writes them: `dp4:512,cp4:4096`."""
    return ",".join(str(one.strategy) + (f":{one.limit}" if one.limit else "") for one in named)


def _with_best_limits(found: Sequence[Priced], longest: int, pricer: SetPricer, tries: int) -> PricedSet | None:
    intervals = Intervals(length_edges(longest), pricer.batches)
    edges = intervals.edges
    seconds = [least_seconds(one.cost, one.strategy, pricer.budgets(one, edges), intervals) for one in found]
    best: tuple[PricedSet, list[tuple[int, Priced]]] | None = None
    for ranked in ranked_sets(seconds, [0.0] * len(found), intervals, len(found))[:tries]:
        if best is not None and ranked.least_s + pricer.optimizer_s >= best[0].predicted_s:
            continue
        chosen = [(edges[edge], found[s]) for edge, s in ranked.groups]
        priced = pricer.price(chosen, settle=True)
        if priced is not None and (best is None or priced.predicted_s < best[0].predicted_s):
            best = priced, chosen
    if best is None:
        return None
    # Groups that run nothing only take memory: the next larger one takes what they would.
    plan, chosen = best
    used = [one for one, group in zip(chosen, plan.groups, strict=True) if group.tokens or one is chosen[-1]]
    return plan if len(used) == len(chosen) else pricer.price(used, settle=True)


def _does_not_fit(limited: Sequence[tuple[int, Priced]], pricer: SetPricer) -> SetDoesNotFitError:
    """For the strategy that needs most."""
    room, needs = pricer.memory_bytes or 0, pricer.needs(limited)
    (limit, one), most = max(zip(limited, needs, strict=True), key=lambda pair: pair[1])
    last = limit == limited[-1][0]  # who runs the longest sequences cannot run shorter ones only
    return SetDoesNotFitError(one.name, limit, room, most, one.memory(limit).peak_bytes, last)


def _too_long(found: Iterable[Priced], longest: int, pricer: SetPricer) -> SequenceFitsNowhereError:
    one = min(found, key=lambda each: each.memory(longest).peak_bytes)
    return SequenceFitsNowhereError(longest, pricer.memory_bytes or 0, one.name, one.memory(longest).peak_bytes)
