"""`BatchPlan`: which sequences of a mini-batch run where, in which micro-batch. Plain data, equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MicroBatch:
    """One run of an ExecGraph on one replica: indices into the mini-batch in the order of packing, and their tokens."""

    sequences: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class GroupPlan:
    """The micro-batches of one length group.

    `group` is the index of the LengthGroup; `replicas[d]` is the list of data-parallel replica d, longest run first.
    Lists may differ in length and may be empty. With `lockstep`, the micro-batches at one position run side by side and
    replicas whose list has ended run idle. Both times are predictions without switches, the bubble of a pipeline
    included; no plan of the same sequences on the same replicas can take less than `lower_bound_s`.
    """

    group: int
    replicas: tuple[tuple[MicroBatch, ...], ...]
    predicted_s: float
    lower_bound_s: float = 0.0
    lockstep: bool = False

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

    `merged` lists (from, into): all sequences of group `from` run in group `into`. `switch_s` is the predicted time
    that switches and reductions add, `predicted_s` the time of everything.
    """

    groups: tuple[GroupPlan, ...]
    merged: tuple[tuple[int, int], ...] = ()
    switch_s: float = 0.0
    predicted_s: float = 0.0

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the length groups that run, ascending."""
        return tuple(group.group for group in self.groups)

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    def fingerprint(self) -> str:
        """Hash of who runs what; ranks whose hashes differ would deadlock."""
        chosen = [(g.group, [[m.sequences for m in micros] for micros in g.replicas]) for g in self.groups]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted_s": self.predicted_s,
            "switch_s": self.switch_s,
            "merged": [list(pair) for pair in self.merged],
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
