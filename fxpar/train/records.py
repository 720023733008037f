"""What is measured of each step, and the totals of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fxpar.runtime.report import GroupReport

# Fields of a step's group record that are the report's under the same names.
GROUP_FIELDS = (
    "limit",
    "strategy",
    "sequences",
    "tokens",
    "longest",
    "micro_batches",
    "wall_s",
    "switch_s",
    "switch_bytes",
    "reduce_s",
    "reduce_bytes",
    "predicted_s",
    "predicted_switch_s",
    "predicted_reduce_s",
    "lengths",
    "unit",
)


@dataclass(frozen=True)
class GroupRecord(GroupReport):
    """One length group of one mini-batch; seconds are rank 0's, bytes those of all ranks.

    `wall_s` includes `switch_s` and `reduce_s`.
    """

    @classmethod
    def of(cls, report: Any) -> GroupRecord:
        """From a group of the report of `train_step`."""
        return cls(**{name: getattr(report, name) for name in GROUP_FIELDS})


@dataclass(frozen=True)
class StepRecord:
    """One step. `step` counts from 1; `wall_s` is all of it, `engine_s` what `train_step` took; `merged` and
    `rides` as in `StepReport`.

    `cpu_s` are CPU seconds of all ranks together (of this rank, until they are added up).
    """

    step: int
    loss: float
    sequences: int
    tokens: int
    valid_tokens: int
    lr: float
    grad_norm: float | None
    skipped: bool
    wall_s: float
    cpu_s: float
    engine_s: float
    optimizer_s: float
    groups: tuple[GroupRecord, ...]
    merged: tuple[tuple[int, int], ...] = ()
    rides: tuple[tuple[int, int, int], ...] = ()
    predicted_s: float = 0.0  # of engine_s, as the mini-batch was planned
    replanned: str = ""  # what was planned otherwise after the step
    validation_loss: float | None = None  # where it was measured, after the step
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss function returns beside the loss
    validation_metrics: Mapping[str, float] = field(default_factory=dict)  # the same of the held-out documents
    tasks: Mapping[str, float] = field(default_factory=dict)  # the loss of each task, without its weight
    experts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by module, `ExpertLoad.figures`

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens per second of the whole step."""
        return self.valid_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class GroupTotal:
    """All that one length group did in a run."""

    limit: int
    strategy: str
    steps: int
    sequences: int
    tokens: int
    wall_s: float
    switch_s: float
    switch_bytes: int
    reduce_s: float
    reduce_bytes: int
    unit: str = "tokens"

    @property
    def compute_s(self) -> float:
        return max(0.0, self.wall_s - self.switch_s - self.reduce_s)


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run."""

    steps: int
    sequences: int
    tokens: int
    valid_tokens: int
    wall_s: float
    cpu_s: float
    optimizer_s: float
    groups: tuple[GroupTotal, ...]
    first_loss: float
    last_loss: float
    validation_loss: float | None
    validation_metrics: Mapping[str, float]
    skipped: int

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Totals:
        """Raises ValueError without a record."""
        if not records:
            raise ValueError("no step was run")
        parts: dict[tuple[int, str], list[GroupRecord]] = {}
        for record in records:
            for group in record.groups:
                parts.setdefault((group.limit, group.strategy), []).append(group)
        return cls(
            steps=len(records),
            sequences=sum(r.sequences for r in records),
            tokens=sum(r.tokens for r in records),
            valid_tokens=sum(r.valid_tokens for r in records),
            wall_s=sum(r.wall_s for r in records),
            cpu_s=sum(r.cpu_s for r in records),
            optimizer_s=sum(r.optimizer_s for r in records),
            groups=tuple(_group_total(parts[key]) for key in sorted(parts)),
            first_loss=records[0].loss,
            last_loss=records[-1].loss,
            validation_loss=records[-1].validation_loss,
            validation_metrics=records[-1].validation_metrics,
            skipped=sum(r.skipped for r in records),
        )

    def shares(self) -> dict[str, float]:
        """Fractions of the wall time: compute, switch, reduce, optimizer, other."""
        found = {
            "compute": sum(g.compute_s for g in self.groups),
            "switch": sum(g.switch_s for g in self.groups),
            "reduce": sum(g.reduce_s for g in self.groups),
            "optimizer": self.optimizer_s,
        }
        found["other"] = max(0.0, self.wall_s - sum(found.values()))
        return {name: seconds / self.wall_s if self.wall_s > 0 else 0.0 for name, seconds in found.items()}

    @property
    def tokens_per_s(self) -> float:
        return self.valid_tokens / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shares": self.shares(), "tokens_per_s": self.tokens_per_s}


def _group_total(records: Iterable[GroupRecord]) -> GroupTotal:
    group = list(records)
    sums = ("sequences", "tokens", "wall_s", "switch_s", "switch_bytes", "reduce_s", "reduce_bytes")
    return GroupTotal(
        limit=group[0].limit,
        strategy=group[0].strategy,
        steps=len(group),
        unit=group[0].unit,
        **{name: sum(getattr(record, name) for record in group) for name in sums},
    )
