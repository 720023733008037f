"""Guesses at strategies with rules, from strategies that are known: nothing is lowered for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.schedule.mini_batch import Pace
from fxpar.search.price import Candidate, Memory, Priced


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
        base = self.base.at(tokens)
        return _held(base, [(one.at(tokens), base) for one in self.changes])


@dataclass
class Between(Priced):
    """A guess at `share` of the way from `base` to `other`, of which time and memory are taken to change evenly."""

    base: Priced
    other: Priced
    share: float

    @property
    def multiple(self) -> int:
        return self.other.multiple

    @cached_property
    def cost(self) -> GroupCost:
        base = self.base.group_cost
        return _summed(base, [(self.other.group_cost, base, self.share)])

    @property
    def reduce_s(self) -> float:
        return self.base.reduce_s + (self.other.reduce_s - self.base.reduce_s) * self.share

    @property
    def pace(self) -> Pace | None:
        return self.base.pace

    def predicted(self, tokens: int) -> Memory:
        pairs = zip(self.base.at(tokens).columns, self.other.at(tokens).columns, strict=True)
        return Memory(*(math.ceil(a + (b - a) * self.share) for a, b in pairs))


@dataclass(frozen=True)
class ChangedFlat:
    """`Changed` by layer: all of it without stages, and priced from two samples, as `base` is. To `base` comes what of
    each pair of `changes` the first takes more than the second.
    """

    strategy: Strategy
    base: Candidate
    changes: tuple[tuple[Candidate, Candidate], ...]

    @property
    def anchors(self) -> tuple[int, ...]:
        return self.base.anchors

    @property
    def reduce_s(self) -> float:
        return self.base.reduce_s + sum(one.reduce_s - other.reduce_s for one, other in self.changes)

    @property
    def samples(self) -> tuple[int, ...]:
        return self.base.samples

    @property
    def steps(self) -> Fraction:
        return self.base.steps

    @property
    def programs(self) -> tuple[TrainGraph, ...]:
        return self.base.programs

    def per_step(self) -> tuple[Polynomial, Polynomial]:
        few, step = self.base.per_step()
        for one, other in self.changes:
            (less, shorter), (more, longer) = other.per_step(), one.per_step()
            few, step = few + more + less * -1, step + longer + shorter * -1
        return few, step

    def at(self, tokens: int) -> Memory:
        return _held(self.base.at(tokens), [(one.at(tokens), other.at(tokens)) for one, other in self.changes])

    def of_first(self, tokens: int) -> Memory:
        pairs = [(one.of_first(tokens), other.of_first(tokens)) for one, other in self.changes]
        return _held(self.base.of_first(tokens), pairs)


def _held(base: Memory, changes: Sequence[tuple[Memory, Memory]]) -> Memory:
    """With what of each pair the first takes more than the second."""
    pairs = [(one.columns, other.columns) for one, other in changes]
    return Memory(*(max(0, a + sum(one[i] - other[i] for one, other in pairs)) for i, a in enumerate(base.columns)))


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
