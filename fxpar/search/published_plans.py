"""What a search finds for the cases of papers, held against the strategies that these had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxpar.ir.axes import REPLICAS, ROLE_AXES, STAGES
from fxpar.ir.strategy import Strategy
from fxpar.search.driver import find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.pricing import PricedGroup, PricedSet, SetPricer
from fxpar.search.problem import Problem
from fxpar.search.space import SAVINGS, with_savings

LOWERED = 3  # of the strategies that guesses rank best
_WEIGHTS, *_ = ROLE_AXES
OF_HOTSPA = {REPLICAS, STAGES, _WEIGHTS}  # the axes of its layouts


@dataclass(frozen=True)
class Alone:
    """A single strategy that a plan is held against: what it is, and seconds of the same mini-batches."""

    what: str
    strategy: str
    predicted_s: float


@dataclass(frozen=True)
class PlannedCase:
    """The set that was found, the seconds that no set in its space undercuts, and single strategies in its stead."""

    groups: tuple[PricedGroup, ...]
    predicted_s: float
    lower_bound_s: float
    search_cpu_s: float
    alone: tuple[Alone, ...]

    def speedup(self, one: Alone) -> float:
        """Of the set over a single strategy."""
        return one.predicted_s / self.predicted_s


def hotspa_case(problem: Problem, known: KnownModel, static: Strategy, published: Alone) -> PlannedCase:
    """The set for HotSPa's case, against its static layout as the paper has it (`published`), against the same layout
    as fxpar runs it (`static`, a shape of the problem), the best layout of HotSPa's space, and the best of all. Layouts
    may recompute, which HotSPa's did not: without, fxpar counts too many bytes for the longest sequences.
    """
    found = find_plan_of(problem, known)
    best = found.best
    pricer = SetPricer(
        problem.cluster, problem.depth, known.outlines, problem.batches, problem.memory_bytes, switches=known.switches
    )
    pricer.optimizer_s = found.best_static.optimizer_s
    layouts = [one for one in problem.shapes if {name for name, _ in one.axes} <= OF_HOTSPA]
    alone = {
        "the same layout, rows as long as fit": best_single(_with_remat([static]), problem, known, pricer),
        "the best of dp, tp and pp": best_single(_with_remat(layouts), problem, known, pricer),
        "the best of all": found.best_static,
    }
    named = (Alone(what, one.strategies[0], one.predicted_s) for what, one in alone.items() if one is not None)
    return PlannedCase(best.groups, best.predicted_s, found.lower_bound_s, found.search_cpu_s, (published, *named))


def _with_remat(shapes: Iterable[Strategy]) -> list[Strategy]:
    """Each as it is, and with all that a search may recompute."""
    levels = [level for level, (zero, _) in enumerate(SAVINGS) if not zero]
    return [one for shape in shapes for level in levels if (one := with_savings(shape, level)) is not None]


def best_single(
    strategies: Sequence[Strategy], problem: Problem, known: KnownModel, pricer: SetPricer
) -> PricedSet | None:
    """The one that takes least for all sequences; None if none of them holds the longest. Pipelines are guessed at, and
    LOWERED of them lowered.
    """
    guessed = sorted(_singles(strategies, problem, known, pricer, guess=True), key=lambda one: one.predicted_s)
    few = [Strategy.parse(one.strategies[0]) for one in guessed[:LOWERED]]
    return min(_singles(few, problem, known, pricer), key=lambda one: one.predicted_s, default=None)


def _singles(
    strategies: Iterable[Strategy], problem: Problem, known: KnownModel, pricer: SetPricer, guess: bool = False
) -> Iterator[PricedSet]:
    """Those that hold the longest sequence, each alone."""
    for strategy in strategies:
        one = (known.guessed(strategy, lambda _: None) if guess else None) or known.candidate(strategy, lambda _: None)
        priced = None if one is None else pricer.price([(problem.longest, one)], settle=not guess)
        if priced is not None:
            yield priced
