"""What a search of rules proposes for a strategy of a set, and what that strategy has to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.cost.group_cost import Cost
from fxpar.ir.strategy import Strategy
from fxpar.search.bounds import Intervals, least_seconds
from fxpar.search.price import Candidate, Priced
from fxpar.search.pricing import SetPricer, guessed_border_s

WORTH = 0.002  # of a group's seconds: what rules must promise to be lowered, and of a set's what they must win
Chosen = Sequence[tuple[int, Priced]]


@dataclass(frozen=True)
class Proposal:
    """Strategies that take the same programs, and the seconds of the best one's groups as guessed. `closer` finds
    others that take these programs too, once the strategy is lowered.
    """

    seconds: float
    strategies: tuple[Strategy, ...]
    closer: Callable[[Candidate], Sequence[Candidate]] | None = None


@dataclass
class Group:
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
        budget = self.budget(one)
        if budget is None:
            return np.inf
        return self._least_s(one, budget, one.cost) + guessed_border_s(one, self.pricer.cluster)

    def budget(self, one: Priced) -> int | None:
        """Tokens of a micro-batch in place of the strategy; None if it does not fit into the set."""
        groups = self.pricer.groups(self.with_(one))
        return None if groups is None else next(g.token_budget for g in groups if g.limit == self.limit)

    def at_best(self, one: Priced, cost: Cost) -> float:
        """With all memory in the world, at such a cost."""
        least_s = self._least_s(one, max(self.limit, self.pricer.largest), cost)
        return least_s + guessed_border_s(one, self.pricer.cluster)

    def _least_s(self, one: Priced, budget: int, cost: Cost) -> float:
        return float(least_seconds(cost, one.strategy, [budget], self.load)[:, 0, 0].mean())
