"""Gradients of the strategies of a set: who adds to whose, and how they go home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from fxpar.ir.strategy import Strategy
from fxpar.search.price import Priced
from fxpar.search.switching import placement_of
from fxpar.store.memory import reserved_gradients

_CUT = (0, 0, 2, 2)  # by ZeRO level the least one that leaves gradients alike


@dataclass(frozen=True)
class SetReductions:
    """By strategy: seconds of its reduction, and what tells its accumulators apart: a group adds to those that the one
    before it has left where they are the same.
    """

    seconds: Mapping[str, float]
    accumulators: Mapping[str, str]

    @classmethod
    def of(cls, unique: Mapping[str, Priced]) -> SetReductions:
        seconds = {name: one.reduce_s for name, one in unique.items()}
        return cls(seconds, {name: accumulators_key(one) for name, one in unique.items()})

    @property
    def are_shared(self) -> bool:
        """Whether some strategies add to each other's gradients."""
        return len(set(self.accumulators.values())) < len(self.accumulators)

    def predicted_s(self, name: str) -> float:
        return self.seconds[name]

    def pass_on(self, name: str, following: str) -> bool:
        return self.accumulators[name] == self.accumulators[following]

    def leaving(self, order: Iterable[str]) -> list[str]:
        """Of strategies in the order of running those behind which gradients leave."""
        names = list(order)
        return [name for name, other in zip_longest(names, names[1:]) if other is None or not self.pass_on(name, other)]


def accumulators_key(one: Priced) -> str:
    """As `fxpar.switch.terms.accumulators_of` tells programs apart: what saves memory leaves gradients where they are,
    but for ZeRO-2, which cuts them as ZeRO-3 does. Those that are only final behind the micro-batches are a strategy's
    own.
    """
    return one.name if one.pace is None else placement_of(_cut_alike(one.strategy))


def _cut_alike(strategy: Strategy) -> Strategy:
    """The one that stands for all whose ZeRO levels leave gradients as this one's do."""
    rules = tuple(replace(rule, zero=None if rule.zero is None else _CUT[rule.zero]) for rule in strategy.rules)
    return replace(strategy, zero=_CUT[strategy.zero], rules=rules, by_stage=tuple(map(_cut_alike, strategy.by_stage)))


def accumulator_bytes(found: Collection[Priced], overlap: bool) -> int:
    """What a session reserves for the strategies of these groups, whose weights all stay. Those of stages are counted
    on the rank that holds most, which may be another one where more is saved for a backward.
    """
    held: dict[str, int] = {}
    groups = Counter(one.name for one in found)
    for one in found:
        name = accumulators_key(one)
        held[name] = max(held.get(name, 0), one.stays.gradient_bytes)
    # What one group of a strategy leaves the next one of it adds to, or runs beside.
    twice = [one.stays.gradient_bytes for one in found if one.pace is None and groups[one.name] > 1]
    return reserved_gradients([*held.values(), *twice], overlap)
