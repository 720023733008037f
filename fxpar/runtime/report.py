"""What one mini-batch did, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from fxpar.ir.graph import COUNT
from fxpar.runtime.spans import StepTrace


@dataclass(frozen=True)
class GroupReport:
    """One length group of a mini-batch. Times are this rank's wall seconds; bytes are those of all ranks together.

    `switch_s` and `reduce_s` are what the rank spent on the switch and the reduction or waited for them: a part of what
    they took where they run beside other groups.

    `micro_batches` is the largest number on a replica; `tokens` are without padding. The three predictions are those
    that the mini-batch was planned with: of the micro-batches, the switch and the reduction. `lengths` counts the
    sequences of 2**(k-1) < tokens <= 2**k as (2**k, sequences). `unit` says what `tokens` and lengths count: of batches
    of images, say, "rows".
    """

    limit: int
    strategy: str
    sequences: int
    tokens: int
    longest: int
    micro_batches: int
    wall_s: float
    switch_s: float
    switch_bytes: int
    reduce_s: float
    reduce_bytes: int
    predicted_s: float = 0.0
    predicted_switch_s: float = 0.0
    predicted_reduce_s: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    unit: str = "tokens"

    @property
    def compute_s(self) -> float:
        """Forward, backward, and collectives inside the graph."""
        return self.wall_s - self.switch_s - self.reduce_s


@dataclass(frozen=True)
class ExpertLoad:
    """How even the work of one module's experts was in a mini-batch: rows that went to each expert, and rows that each
    rank of the world has computed. A row is a token for one of its experts; padding counts if the model gives it any.
    `wanted` are the rows that the router sent to each expert where a capacity has left some out, else (). `residual` is
    how far rows are from the means that experts have seen in their place, over how long they are (roots of sums of
    squares); None without `lsh`.
    """

    module: str
    experts: tuple[float, ...]
    ranks: tuple[float, ...]
    wanted: tuple[float, ...] = ()
    residual: float | None = None

    @property
    def dropped(self) -> float:
        """The share of rows that a capacity has left out."""
        return 1.0 - math.fsum(self.experts) / math.fsum(self.wanted) if self.wanted else 0.0

    @property
    def expert_balance(self) -> float:
        """Rows of the fullest expert over the mean; 1 is even."""
        return max(self.experts) / (math.fsum(self.experts) / len(self.experts))

    def figures(self) -> dict[str, float]:
        """What a record of a run has of it."""
        found = {"experts": self.expert_balance, "ranks": self.rank_balance}
        found |= {"dropped": self.dropped} if self.wanted else {}
        return found if self.residual is None else {**found, "residual": self.residual}

    @property
    def rank_balance(self) -> float:
        """Rows of the fullest rank over the mean of those that have had any; 1 is even."""
        ranks = [rows for rows in self.ranks if rows]
        return max(ranks) / (math.fsum(ranks) / len(ranks))


@dataclass(frozen=True)
class StepReport:
    """One mini-batch: `loss` is the mean over its valid tokens (with a denominator, the sum divided by that), the same
    on every rank; groups in order of running. `metrics` are those that the loss function returns beside the loss, over
    the whole mini-batch and the same on every rank: sums, or for pairs quotients of sums (NaN for 0/0).

    `predicted_s` is what the mini-batch was predicted to take: of `wall_s` all but `plan_s`.
    `packed`: several sequences may have shared a row; if not, each ran alone.
    `experts` has the loads of all modules with experts, in the order of the model, over the whole mini-batch (also of
    all tasks) and the same on every rank; not with `compile="inductor"`, whose graphs nobody looks into.
    `trace` is there if spans are recorded (`parallelize(..., record=True)`).
    `tasks` has a report of each task that had a batch, by name: what is of the whole mini-batch (times, `skipped`) is
    in each, its `loss` is without its weight. The whole has the weighted sum, and metrics called "task/metric".
    """

    step: int
    loss: float
    sequences: int
    tokens: int
    valid_tokens: int
    wall_s: float
    plan_s: float
    groups: tuple[GroupReport, ...]
    merged: tuple[tuple[int, int], ...] = ()  # limits (from, into)
    predicted_s: float = 0.0
    rides: tuple[tuple[int, int, int], ...] = ()  # (limit from, limit into, sequences)
    skipped: bool = False
    packed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, StepReport] = field(default_factory=dict)
    experts: tuple[ExpertLoad, ...] = ()
    trace: StepTrace | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace."""
        found = asdict(replace(self, trace=None))
        del found["trace"]
        return found


def merged_text(joined: int, into: int) -> str:
    """What a pair of `StepReport.merged` means."""
    return f"<={joined} joined <={into}: too small to be worth a switch of its own"


def ride_text(own: int, into: int) -> str:
    """What an entry of `StepReport.rides` means."""
    return f"sequences of <={own} ride in <={into} where the mini-batch is predicted to be faster so"


class Evaluated(float):
    """What `evaluate` returns: the mean loss, a float; `metrics` as in `StepReport`."""

    metrics: Mapping[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float] | None = None) -> Self:
        found = super().__new__(cls, loss)
        found.metrics = dict(metrics or {})
        return found


def metrics_of(groups: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a mini-batch by name, from the sums of its groups (by the names of the graph's results)."""
    sums = {name: math.fsum(found[name] for found in groups) for name in (groups[0] if groups else {})}
    found = {}
    for name, value in sums.items():
        if not name.endswith(COUNT):
            count = sums.get(name + COUNT, 1.0)
            found[name] = value / count if count else math.nan
    return found
