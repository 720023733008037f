"""`Ledger`: what a rank holds, by stage and purpose, at all times and when it held most."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fxpar.memory.series import HOST, KINDS, NOTHING, Moment

_PLACE = {kind: i for i, kind in enumerate(KINDS)}


def _nothing() -> list[int]:
    return [0] * len(KINDS)


Held = tuple[int, str, int]
"""Stage, kind and bytes of what is held."""


@dataclass(frozen=True)
class Effect:
    """What part of a stage does to what is held: `sums` by kind when it ends, and beside what there was when it began
    its fullest moment, and the one with most on the host, if that is another one. `results` are what it leaves.
    """

    sums: tuple[int, ...]
    moments: tuple[Moment, ...]
    results: Mapping[int, Held]


@dataclass
class Ledger:
    """Storages with their holders counted, as Python counts references: one without any is free.

    `moments` are those of the rank, all its stages together; `fullest` has one of each stage alone, `host` the most
    bytes of each in memory of the host.
    """

    holders: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    held: dict[Hashable, Held] = field(default_factory=dict)
    sums: dict[int, list[int]] = field(default_factory=lambda: defaultdict(_nothing))
    whole: list[int] = field(default_factory=_nothing)
    moments: list[Moment] = field(default_factory=list)
    fullest: dict[int, Moment] = field(default_factory=lambda: defaultdict(lambda: NOTHING))
    host: Counter[int] = field(default_factory=Counter)

    def take(self, key: Hashable, stage: int, kind: str, nbytes: int) -> None:
        """One more holder; the first one allocates."""
        if not self.holders[key]:
            self.held[key] = (stage, kind, nbytes)
            self._add(stage, kind, nbytes)
        self.holders[key] += 1

    def hold(self, key: Hashable) -> None:
        """One more holder of what is there."""
        self.take(key, *self.held[key])

    def drop(self, key: Hashable) -> None:
        """One holder less; the last one frees."""
        self.holders[key] -= 1
        if not self.holders[key]:
            stage, kind, nbytes = self.held.pop(key)
            del self.holders[key]
            self._add(stage, kind, -nbytes)

    def drop_all(self, keys: Iterable[Hashable]) -> None:
        """One holder less of each."""
        for key in keys:
            self.drop(key)

    def turn(self, key: Hashable, kind: str) -> None:
        """What is held is for something else now; what lies on the host stays what it is."""
        stage, before, nbytes = self.held[key]
        if before == HOST:
            return
        self._add(stage, before, -nbytes)
        self._add(stage, kind, nbytes)
        self.held[key] = (stage, kind, nbytes)

    def nbytes(self, keys: Iterable[Hashable]) -> int:
        """Bytes of different storages of the device."""
        return sum(nbytes for _, kind, nbytes in (self.held[key] for key in set(keys)) if kind != HOST)

    def look(self, stage: int, node: fx.Node | None, during: str, workspace: int = 0) -> None:
        """Note what the rank, and the stage, hold at this moment."""
        self.moments.append(Moment(node, tuple(self.whole), workspace, during))
        self._look_at(stage, Moment(node, tuple(self.sums[stage]), workspace, during))

    def _look_at(self, stage: int, mine: Moment) -> None:
        self.host[stage] = max(self.host[stage], mine.host_bytes)
        if mine.total_bytes > self.fullest[stage].total_bytes:
            self.fullest[stage] = mine

    def effect(self, begun: int, before: Collection[int], results: Mapping[int, Hashable]) -> Effect:
        """What has happened since there were `begun` moments and `before` was held, of which only the moments of an
        effect are kept. `results`: the keys of what it leaves.
        """
        found = self.moments[begun:]
        looked = (
            [max(found, key=lambda one: one.total_bytes), max(found, key=lambda one: one.host_bytes)] if found else []
        )
        if len(looked) == 2 and looked[0].host_bytes == looked[1].host_bytes:
            del looked[1]
        self.moments[begun:] = looked
        moments = tuple(one._replace(sums=_minus(one.sums, before)) for one in looked)
        return Effect(_minus(self.whole, before), moments, {s: self.held[key] for s, key in results.items()})

    def again(
        self, stage: int, one: Effect, during: str, owned: Iterable[Hashable], results: Mapping[int, Hashable]
    ) -> None:
        """The same once more, which lets go of what is `owned`."""
        for moment in one.moments:
            self.moments.append(moment._replace(sums=_plus(self.whole, moment.sums), during=during))
            self._look_at(stage, moment._replace(sums=_plus(self.sums[stage], moment.sums), during=during))
        for key in owned:
            self.holders[key] -= 1
            if not self.holders[key]:
                del self.holders[key], self.held[key]
        for storage, key in results.items():
            self.holders[key], self.held[key] = 1, one.results[storage]
        self.whole[:] = _plus(self.whole, one.sums)
        self.sums[stage][:] = _plus(self.sums[stage], one.sums)

    def _add(self, stage: int, kind: str, nbytes: int) -> None:
        self.sums[stage][_PLACE[kind]] += nbytes
        self.whole[_PLACE[kind]] += nbytes


def _minus(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(operator.sub, one, other))


def _plus(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(operator.add, one, other))
