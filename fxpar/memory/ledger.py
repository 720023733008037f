"""`Ledger`: what a rank holds, by stage and purpose, at all times and when it held most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from torch import fx

from fxpar.memory.series import HOST, KINDS, NOTHING, Moment

_PLACE = {kind: i for i, kind in enumerate(KINDS)}


def _nothing() -> list[int]:
    return [0] * len(KINDS)


@dataclass
class Ledger:
    """Storages with their holders counted, as Python counts references: one without any is free.

    `moments` are those of the rank, all its stages together; `fullest` has one of each stage alone, `host` the most
    bytes of each in memory of the host.
    """

    holders: Counter[Hashable] = field(default_factory=Counter)
    held: dict[Hashable, tuple[int, str, int]] = field(default_factory=dict)  # key -> stage, kind, bytes
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
        mine = Moment(node, tuple(self.sums[stage]), workspace, during)
        self.host[stage] = max(self.host[stage], mine.host_bytes)
        if mine.total_bytes > self.fullest[stage].total_bytes:
            self.fullest[stage] = mine

    def _add(self, stage: int, kind: str, nbytes: int) -> None:
        self.sums[stage][_PLACE[kind]] += nbytes
        self.whole[_PLACE[kind]] += nbytes
