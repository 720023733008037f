"""What a rank did and when, inside of one mini-batch. Off unless asked for: `fxpar.parallelize(..., record=True)`.

On the CPU a moment is a reading of the clock; on a GPU an event of its stream, read when the spans are asked for, so
that recording makes nobody wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

SpanKind = Literal["switch", "prologue", "micro_batch", "F", "B", "I", "W", "wait", "epilogue", "reduce", "optimizer"]
Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class RunSpan:
    """ms from the begin of the mini-batch; `group` counts in order of running, -1 outside of groups.

    `kind` "wait" is for what another pipeline stage sends; `micro_batch` and `stage` are -1 where there is none.
    """

    kind: SpanKind
    group: int
    start_ms: float
    end_ms: float
    micro_batch: int = -1
    stage: int = -1


@dataclass(frozen=True)
class GroupRun:
    """A group as it was planned: `micro_batches[replica]` lists the lengths of the sequences of each micro-batch."""

    limit: int
    strategy: str
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class StepTrace:
    """The spans of one mini-batch on this rank, and its groups in order of running; of `waves`, if there are any, so
    many groups each wait for their own ranks alone.
    """

    groups: tuple[GroupRun, ...]
    begin: Moment
    marks: tuple[tuple[SpanKind, int, Moment, Moment, int, int], ...]
    waves: tuple[int, ...] = ()

    def spans(self) -> list[RunSpan]:
        """In the order in which they ended. On a GPU it waits for what was recorded."""
        if self.marks and isinstance(self.marks[-1][3], torch.cuda.Event):
            self.marks[-1][3].synchronize()
        return [
            RunSpan(kind, group, _between_ms(self.begin, start), _between_ms(self.begin, end), micro, stage)
            for kind, group, start, end, micro, stage in self.marks
        ]


class Spans(Protocol):
    """Who is told where a span begins and ends."""

    def span(self, kind: SpanKind, micro_batch: int = -1, stage: int = -1) -> AbstractContextManager[None]: ...


class NoSpans:
    """Records nothing."""

    def span(self, kind: SpanKind, micro_batch: int = -1, stage: int = -1) -> AbstractContextManager[None]:
        return nullcontext()


NO_SPANS = NoSpans()


class Recorder:
    """Records one mini-batch at a time: `begin`, `enter` before each group, `trace` at its end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Forget what was; the mini-batch begins now."""
        self._marks: list[tuple[SpanKind, int, Moment, Moment, int, int]] = []
        self._group = -1
        self._begin = self._now()

    def enter(self, group: int) -> None:
        """What follows belongs to this group."""
        self._group = group

    @contextmanager
    def span(self, kind: SpanKind, micro_batch: int = -1, stage: int = -1) -> Iterator[None]:
        """Records the block, unless it raises."""
        start = self._now()
        yield
        self._marks.append((kind, self._group, start, self._now(), micro_batch, stage))

    def trace(self, groups: Sequence[GroupRun], waves: Sequence[int] = ()) -> StepTrace:
        """What was recorded since `begin`."""
        return StepTrace(tuple(groups), self._begin, tuple(self._marks), tuple(waves))

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_ms(start: Moment, end: Moment) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end)
    assert isinstance(end, float)
    return (end - start) * 1e3
