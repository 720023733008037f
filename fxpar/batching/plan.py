"""`BatchPlan`: which sequences of a mini-batch run where, in which micro-batch. Plain data, equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxpar.ir.columns import columns

_TITLES = ("group", "up to", "strategy", "sequences", "tokens", "micro-batches per replica", "predicted", "at least")
_RIGHT = (0, 1, 3, 4, 6, 7)


@dataclass(frozen=True)
class MicroBatch:
    """One run of an ExecGraph on one replica: indices into the mini-batch in the order of packing, and their tokens.
    Where the strategy packs bins, `bins` is how many of the sequences each has; they follow each other.
    """

    sequences: tuple[int, ...]
    tokens: int
    bins: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupPlan:
    """The micro-batches of one length group.

    `group` is the index of the LengthGroup; `replicas[d]` is the list of data-parallel replica d, longest run first.
    Lists may differ in length and may be empty. With `lockstep`, the micro-batches at one position run side by side and
    replicas whose list has ended run idle. Both times are predictions without switches, the bubble of a pipeline
    included; no plan of the same sequences on the same replicas can take less than `lower_bound_s`. `strategy` and
    `limit` are those of the LengthGroup.
    """

    group: int
    replicas: tuple[tuple[MicroBatch, ...], ...]
    predicted_s: float
    lower_bound_s: float = 0.0
    lockstep: bool = False
    strategy: str = ""
    limit: int = 0

    @property
    def slots(self) -> int:
        """Micro-batches of the longest list: how often a rank in lock step runs its graph."""
        return max(len(micros) for micros in self.replicas)

    @property
    def tokens(self) -> int:
        return sum(micro.tokens for micro in self.micro_batches())

    @property
    def sequences(self) -> tuple[int, ...]:
        """Indices of all sequences of the group, ascending."""
        return tuple(sorted(i for micro in self.micro_batches() for i in micro.sequences))

    def micro_batches(self) -> Iterator[MicroBatch]:
        return (micro for micros in self.replicas for micro in micros)


@dataclass(frozen=True)
class BatchPlan:
    """A whole mini-batch: the groups that have sequences, by ascending limit.

    `merged` lists (from, into): all sequences of group `from` run in group `into`; `rides` lists (from, into, number):
    so many of them do. `switch_s` is the predicted time that switches and reductions add, `predicted_s` the time of
    everything.
    """

    groups: tuple[GroupPlan, ...]
    merged: tuple[tuple[int, int], ...] = ()
    switch_s: float = 0.0
    predicted_s: float = 0.0
    rides: tuple[tuple[int, int, int], ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the length groups that run, ascending."""
        return tuple(group.group for group in self.groups)

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    def __str__(self) -> str:
        """A table with a line per group that runs; `print(model.plan(batch))` shows it."""
        count = sum(len(group.sequences) for group in self.groups)
        head = f"{count:,} sequences, {self.tokens:,} tokens; predicted {_ms(self.predicted_s)}"
        rows = [_TITLES, *(_row(group) for group in self.groups)]
        lines = [f"{head}, {_ms(self.switch_s)} of it switches and reductions", *columns(rows, right=_RIGHT)]
        lines += [f"the sequences of group {old} run in group {new}" for old, new in self.merged]
        lines += [f"{number:,} of the sequences of group {old} ride in group {new}" for old, new, number in self.rides]
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """Hash of who runs what; ranks whose hashes differ would deadlock."""
        chosen = [
            (g.group, [[(m.sequences, m.bins) if m.bins else m.sequences for m in ms] for ms in g.replicas])
            for g in self.groups
        ]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted_s": self.predicted_s,
            "switch_s": self.switch_s,
            "merged": [list(pair) for pair in self.merged],
            "rides": [list(ride) for ride in self.rides],
            "groups": [
                {
                    "group": g.group,
                    "predicted_s": g.predicted_s,
                    "lower_bound_s": g.lower_bound_s,
                    "lockstep": g.lockstep,
                    "replicas": [[list(m.sequences) for m in micros] for micros in g.replicas],
                }
                for g in self.groups
            ],
        }


def _row(group: GroupPlan) -> tuple[str, ...]:
    counts = sorted({len(micros) for micros in group.replicas})
    return (
        str(group.group),
        f"{group.limit:,}",
        group.strategy,
        f"{len(group.sequences):,}",
        f"{group.tokens:,}",
        str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
        _ms(group.predicted_s),
        _ms(group.lower_bound_s),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
