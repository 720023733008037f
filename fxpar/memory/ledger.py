"""`Ledger`: what a rank holds, by stage and purpose, and when it held most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from fxpar.memory.liveness import Peak

_KINDS = ("forward", "again", "backward", "result", "message")


@dataclass
class _Best:
    total: int = -1
    node: str = ""
    workspace: int = 0
    sums: dict[str, int] = field(default_factory=dict)

    def peak(self, saved_bytes: int) -> Peak:
        found = {f"{kind}_bytes": self.sums.get(kind, 0) for kind in _KINDS}
        return Peak(self.node, **found, workspace_bytes=self.workspace, saved_bytes=saved_bytes)


@dataclass
class Ledger:
    """Storages with their holders counted, as Python counts references: one without any is free."""

    holders: Counter[Hashable] = field(default_factory=Counter)
    held: dict[Hashable, tuple[int, str, int]] = field(default_factory=dict)  # key -> stage, kind, bytes
    sums: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    totals: Counter[int] = field(default_factory=Counter)
    best: dict[int | None, _Best] = field(default_factory=lambda: defaultdict(_Best))  # None: of the rank

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
        """What is held is for something else now."""
        stage, before, nbytes = self.held[key]
        self._add(stage, before, -nbytes)
        self._add(stage, kind, nbytes)
        self.held[key] = (stage, kind, nbytes)

    def nbytes(self, keys: Iterable[Hashable]) -> int:
        """Bytes of different storages."""
        return sum(self.held[key][2] for key in set(keys))

    def look(self, stage: int, node: str, workspace: int = 0) -> None:
        """Note the moment if the rank, or the stage, has never held as much."""
        total = sum(self.totals.values()) + workspace
        if total > self.best[None].total:
            whole: Counter[str] = sum(self.sums.values(), Counter())
            self.best[None] = _Best(total, node, workspace, dict(whole))
        mine = self.totals[stage] + workspace
        if mine > self.best[stage].total:
            self.best[stage] = _Best(mine, node, workspace, dict(self.sums[stage]))

    def _add(self, stage: int, kind: str, nbytes: int) -> None:
        self.sums[stage][kind] += nbytes
        self.totals[stage] += nbytes
