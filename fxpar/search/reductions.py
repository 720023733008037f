"""Gradients of the strategies of a set: who adds to whose, and how they go home."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from fxpar.search.price import Memory, Priced
from fxpar.search.switching import placement_of
from fxpar.store.memory import reserved_gradients


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
        return cls(seconds, {name: accumulators_of(one) for name, one in unique.items()})

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


def accumulators_of(one: Priced) -> str:
    """As `fxpar.switch.terms.accumulators_of` tells programs apart: what saves memory leaves gradients where they are.
    Those that are only final behind the micro-batches are a strategy's own.
    """
    return one.name if one.pace is None else placement_of(one.strategy)


def accumulator_bytes(found: Collection[Priced], overlap: bool) -> int:
    """What a session reserves for those of these strategies whose weights all stay."""
    held: dict[str, Memory] = {accumulators_of(one): one.stays for one in found}
    return reserved_gradients([memory.gradient_bytes for memory in held.values()], overlap)
