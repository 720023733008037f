"""Guesses at strategies with rules, from strategies that are known: nothing is lowered for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpar.cost.group_cost import GroupCost
from fxpar.schedule.mini_batch import Pace
from fxpar.search.price import Memory, Priced


@dataclass
class Changed(Priced):
    """A guess: `base` with what each of `changes` takes more than it."""

    base: Priced
    changes: tuple[Priced, ...]

    @property
    def multiple(self) -> int:
        return max(one.multiple for one in (self.base, *self.changes))

    @cached_property
    def cost(self) -> GroupCost:
        base = self.base.group_cost
        return _summed(base, [(one.group_cost, base, 1.0) for one in self.changes])

    @cached_property
    def reduce_s(self) -> float:
        return self.base.reduce_s + sum(one.reduce_s - self.base.reduce_s for one in self.changes)

    @property
    def pace(self) -> Pace | None:
        return self.base.pace

    def predicted(self, tokens: int) -> Memory:
        base = self.base.at(tokens).columns
        more = [one.at(tokens).columns for one in self.changes]
        return Memory(*(max(0, a + sum(one[i] - a for one in more)) for i, a in enumerate(base)))


def _summed(base: GroupCost, more: Sequence[tuple[GroupCost, GroupCost, float]]) -> GroupCost:
    """`base` with so many times the difference of two others, each."""

    def added(name: str) -> float:
        found = getattr(base, name) + sum((getattr(a, name) - getattr(b, name)) * times for a, b, times in more)
        return max(0.0, found)

    return replace(
        base,
        fixed_s=added("fixed_s"),
        per_token_s=added("per_token_s"),
        per_square_s=added("per_square_s"),
    )
