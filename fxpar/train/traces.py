"""Of which steps the spans are kept for the report: the slowest one and the last one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fxpar.runtime.spans import GroupRun, RunSpan, StepTrace


@dataclass(frozen=True)
class StepSpans:
    """What one rank did in one step; `waves` as in `StepTrace`. Plain data."""

    step: int
    groups: tuple[GroupRun, ...]
    spans: tuple[RunSpan, ...]
    waves: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Taken:
    """A step whose times are read when they are wanted."""

    step: int
    trace: StepTrace
    optimizer: RunSpan

    def spans(self) -> StepSpans:
        return StepSpans(self.step, self.trace.groups, (*self.trace.spans(), self.optimizer), self.trace.waves)


@dataclass
class StepTraces:
    """`take` what a step left, then `choose` whether to keep it; all ranks choose alike.

    The first step of a run makes connections and memory: it is never the slowest.
    """

    _taken: _Taken | None = None
    _last: _Taken | None = None
    _slowest: _Taken | None = None
    _slowest_s: float = 0.0
    _first: int | None = None

    def take(self, step: int, trace: StepTrace, begun_ms: float, ended_ms: float) -> None:
        """The trace of a step's mini-batch, and when its optimizer ran, from the begin of the mini-batch."""
        self._taken = _Taken(step, trace, RunSpan("optimizer", -1, begun_ms, ended_ms))

    def choose(self, wall_s: float) -> None:
        """Keep what was taken if it is wanted; `wall_s` of the step, the same number on all ranks."""
        taken, self._last = self._taken, self._taken
        if taken is None:
            return
        self._first = taken.step if self._first is None else self._first
        if taken.step != self._first and wall_s > self._slowest_s:
            self._slowest, self._slowest_s = taken, wall_s

    def kept(self) -> list[StepSpans]:
        """The last step, then the slowest if it is another one."""
        kept = [self._last, self._slowest if self._slowest is not self._last else None]
        return [one.spans() for one in kept if one is not None]


def gathered(traces: StepTraces) -> list[list[StepSpans]]:
    """On rank 0 what every rank has kept, by step and rank; on other ranks nothing. All ranks call it."""
    mine = traces.kept()
    if dist.get_world_size() == 1:
        return [[one] for one in mine]
    everyone: list[list[StepSpans]] | None = (
        [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    )
    dist.gather_object(mine, everyone)
    return [] if everyone is None else [list(step) for step in zip(*everyone, strict=True)]
