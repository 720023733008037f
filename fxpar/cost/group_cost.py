"""`GroupCost`: what micro-batches of a strategy take, for those who plan with it. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from fxpar.errors import CostModelError, ScheduleOptionError
from fxpar.schedule import KINDS
from fxpar.schedule.mini_batch import FORWARD

ZB_H1_SHORTER = 3
"""By so many times, at most, a pipeline waits less under zb_h1 than under 1f1b: with equal micro-batches, as many as
stages or more, of whose time forward, input and weight parts take a third each (Qi et al. 2023, table 2).
"""


@dataclass(frozen=True)
class GroupCost:
    """Seconds of one micro-batch of one replica: fixed + per_token * T + per_square * sum(len**2).

    T is the sum of the lengths of its sequences; attention, which stays inside of a sequence, is quadratic in each.

    With `stages` > 1 a replica is a pipeline of that many ranks, `virtual` stages on each; the numbers are those of the
    slowest ranks, and its micro-batches c_1 >= c_2 >= ... c_m, which start in this order, take

        c_1 + ... + c_m + (stages - 1) / virtual * c_1

    The last term is the time to fill and drain the pipeline (Narayanan et al. 2021, 2.2.1; interleaved: 2.2.2), there
    for equal micro-batches. Of unequal ones the longest counts, not the mean: the ranks are a chain of equal machines,
    where all others wait while the longest passes. That is exact for gpipe; 1f1b takes no more and, in this order,
    hardly less, where the mean would promise up to 2.5 times too little. zb_h1 is exact too: a rank waits
    (stages - 1) * 2 / 3 of the longest, less the weight parts, a third each, of the next micro-batches, at most
    stages - 1 of them, which fill gaps (Qi et al. 2023, table 2, for equal ones). interleaved_1f1b is slower where
    micro-batches of one round differ. It runs in rounds of `stages`: a last round that is not full is filled up with
    idle micro-batches that cost as much as the last one.

    `shared_by` ranks take turns on a core (`fxpar.cost.device.Device`), and those that wait leave it to the others:
    then the numbers are those of the mean over a pipeline's ranks, and all replicas together take

        max(their mean, bubbles left out; the slowest of them, bubble included, / shared_by)

    Raises CostModelError for seconds that are negative or not finite, ScheduleOptionError for a count below 1.
    """

    fixed_s: float
    per_token_s: float
    per_square_s: float
    stages: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    shared_by: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "schedule":
                if value not in KINDS:
                    raise ScheduleOptionError(f"there is no kind {value!r}", f"Known are {', '.join(KINDS)}")
            elif name in ("stages", "virtual"):
                if value < 1:
                    raise ScheduleOptionError(f"{name} is {value}", "It must be 1 or more")
            elif not (math.isfinite(value) and value >= 0):
                raise CostModelError(name, value)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Time of a micro-batch of sequences with these lengths in tokens."""
        squares = sum(length * length for length in lengths)
        return self.fixed_s + self.per_token_s * sum(lengths) + self.per_square_s * squares

    def replica_s(self, micro_batches: Sequence[Sequence[int]]) -> float:
        """Time of a replica that runs micro-batches of sequences with these lengths in tokens, bubble included."""
        runs = sorted(map(self.seconds, micro_batches), reverse=True)
        if not runs:
            return 0.0
        idle = -len(runs) % self.stages if self.virtual > 1 else 0
        return sum(runs) + idle * runs[-1] + self._bubble(runs)

    def _bubble(self, runs: Sequence[float]) -> float:
        """How long ranks wait to fill and drain the pipeline."""
        if self.schedule != "zb_h1":
            return (self.stages - 1) / self.virtual * runs[0]
        weight = (1 - FORWARD) / 2
        return (self.stages - 1) * (1 - weight) * runs[0] - weight * sum(runs[1 : self.stages])

    def times(self, factor: float) -> GroupCost:
        """All seconds times a factor. Raises CostModelError as for any seconds."""
        names = ("fixed_s", "per_token_s", "per_square_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def sequence_s(self, length: int) -> float:
        """What one more sequence of this length adds."""
        return self.per_token_s * length + self.per_square_s * (length * length)


@dataclass(frozen=True)
class TeamsCost:
    """What micro-batches of strategies side by side take: those of each team, which run at the same time."""

    teams: tuple[GroupCost, ...]

    def times(self, factor: float) -> TeamsCost:
        """All seconds times a factor. Raises CostModelError as for any seconds."""
        return TeamsCost(tuple(team.times(factor) for team in self.teams))


Cost = GroupCost | TeamsCost
"""Of a strategy, whatever it consists of."""
