"""A step as its ranks recorded it."""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.runtime.spans import RunSpan
from fxpar.viz.step import Lane, StepGroup, StepSpan, StepTimeline

MOST_RANKS = 32


def measured_step(
    groups: Sequence[StepGroup], ranks: Sequence[Sequence[RunSpan]], replicas: Sequence[Sequence[int]]
) -> StepTimeline:
    """One lane per rank, of the first 32. `ranks[r]` are the spans of rank r from the begin of its step, `replicas[r]`
    its data-parallel replica in each group.

    Ranks begin a step together up to the small all-reduce before it, so their clocks are not compared.
    """
    lanes = tuple(Lane((rank,), tuple(replicas[rank])) for rank in range(min(len(ranks), MOST_RANKS)))
    spans = [
        StepSpan(lane, span.kind, span.group, span.start_ms, span.end_ms, span.micro_batch, span.stage)
        for lane in range(len(lanes))
        for span in sorted(ranks[lane], key=lambda span: span.start_ms)
    ]
    return StepTimeline("measured", tuple(groups), lanes, tuple(spans))
