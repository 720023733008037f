"""What a search does not lower for now: strategies that save memory, and take longer than others even at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fxpar.cost.group_cost import GroupCost
from fxpar.ir.strategy import Strategy
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.floors import Floors
from fxpar.search.known import KnownModel, Said
from fxpar.search.price import Priced
from fxpar.search.pricing import SetPricer, guessed_border_s
from fxpar.search.problem import Problem
from fxpar.search.sets import PER_INTERVAL
from fxpar.search.space import FASTER_SCHEDULE, rescheduled, with_savings, without_stages
from fxpar.search.staged import StagedGuess

Tried = tuple[Strategy, int]  # a shape, and a level of what saves memory


@dataclass(frozen=True)
class Bound:
    """Seconds [mini-batches, i, j] that a strategy takes at least, also under the schedule that waits least, and what
    its borders are guessed to take.
    """

    seconds: np.ndarray
    fastest: np.ndarray
    border_s: float

    def may_lead(self, known: Sequence[np.ndarray], least: np.ndarray, found: Intervals) -> bool:
        """Whether it could be faster than all of the `known` ones, or than what is `least`, for some lengths."""
        some = found.tokens > 0
        leads = (self.seconds < np.stack(known).min(axis=0)) | (self.fastest < least)
        return bool(leads[some].any())

    def may_rank(self, known: Sequence[np.ndarray], borders_s: Sequence[float], found: Intervals) -> bool:
        """Whether it could be among the PER_INTERVAL strategies that sets are made of for some lengths: with borders,
        or without, as a single strategy.
        """
        if len(known) < PER_INTERVAL:
            return True
        means, mine = np.stack([one.mean(axis=0) for one in known]), self.seconds.mean(axis=0)
        some = np.isfinite(mine) & (found.tokens > 0).any(axis=0)
        for count in (0, 1):
            columns = means + count * np.array(borders_s)[:, None, None]
            last = np.partition(columns, PER_INTERVAL - 1, axis=0)[PER_INTERVAL - 1]
            if bool((mine + count * self.border_s <= last)[some].any()):
                return True
        return False


@dataclass
class PutOff:
    """Of a search among single strategies without rules: sets are ranked as if all were lowered."""

    problem: Problem
    known: KnownModel
    pricer: SetPricer
    found: Intervals
    said: Said
    waiting: list[tuple[Tried, Bound]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.floors = Floors(self.problem.cluster)

    def put_off(
        self, tried: Tried, lowered: Sequence[Priced], seconds: Sequence[np.ndarray], least: np.ndarray
    ) -> bool:
        """Whether it can wait, beside the strategies that were `lowered`; then it does. Not before one of them
        holds all lengths: till then it is open what fits at all.
        """
        if self.problem.rules or self.problem.teams or self.problem.rounds or not np.isfinite(least[:, 0, -1]).all():
            return False
        bound = self._bound(tried, lowered)
        if bound is None or bound.may_lead(seconds, least, self.found):
            return False
        if bound.may_rank(seconds, self._borders(lowered), self.found):
            return False
        self.waiting.append((tried, bound))
        return True

    def due(self, lowered: Sequence[Priced], seconds: Sequence[np.ndarray]) -> list[Tried]:
        """What need not wait any more, as guesses have turned out to take longer."""
        borders = self._borders(lowered) if self.waiting else []
        late = [one for one in self.waiting if one[1].may_rank(seconds, borders, self.found)]
        self.waiting = [one for one in self.waiting if not any(one is other for other in late)]
        return [tried for tried, _ in late]

    def _borders(self, lowered: Sequence[Priced]) -> list[float]:
        return [guessed_border_s(one, self.problem.cluster) for one in lowered]

    def _bound(self, tried: Tried, lowered: Sequence[Priced]) -> Bound | None:
        """None where nothing can be said."""
        shape, level = tried
        strategy, cluster = with_savings(shape, level), self.problem.cluster
        plain = self.known.candidate(without_stages(replace(shape, chunks=1)), self.said)
        if strategy is None or plain is None:
            return None
        mine = [other for other in lowered if other.strategy.axes == shape.axes]
        whole_loss = all(one.strategy.chunks == 1 for one in mine)  # else chunks of it save memory
        floor = self.floors.least(plain, without_stages(strategy), whole_loss)
        if floor is None:
            return None
        one = StagedGuess(strategy, cluster, floor.anchors, floor) if strategy.pipeline_size > 1 else floor
        costs, limits = [one.group_cost, mine[0].group_cost], self.pricer.budgets(one, self.found.edges)
        return Bound(
            self._least(costs, strategy, limits),
            self._least([_faster(cost, strategy) for cost in costs], strategy, limits),
            guessed_border_s(one, cluster),
        )

    def _least(self, costs: Sequence[GroupCost], strategy: Strategy, limits: Sequence[int | None]) -> np.ndarray:
        return np.maximum(*(least_seconds(cost, strategy, limits, self.found) for cost in costs))


def _faster(cost: GroupCost, strategy: Strategy) -> GroupCost:
    return replace(cost, schedule=FASTER_SCHEDULE) if rescheduled(strategy) else cost


__all__ = ["Bound", "PutOff", "Tried"]
