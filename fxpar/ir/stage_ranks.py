"""On which ranks pipeline stages are that are written one by one: behind those of the stage before, or where '@' says.

`cp2 > cp2 > cp4@0` has a stage on ranks 0 and 1, one on ranks 2 and 3, and one on all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

from fxpar.errors import StrategySyntaxError
from fxpar.ir.axes import BINS, STAGES
from fxpar.ir.strategy_text import Pipeline, split_rules

_IN_TURN = ("1f1b", "zb_h1")  # how micro-batches go through stages that share ranks: one after the other


class Stage(Protocol):
    """What is asked of the strategy of a stage."""

    @property
    def at(self) -> int | None: ...

    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def tokens(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    def most(self, flag: str) -> Any: ...


def spans_of(stages: Sequence[Stage]) -> tuple[range, ...]:
    """The ranks of each stage, counted from the first one of the pipeline."""
    found: list[range] = []
    for stage in stages:
        first = stage.at if stage.at is not None else found[-1].stop if found else 0
        found.append(range(first, first + stage.world))
    return tuple(found)


def places_of(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Of each stage the places in the pipeline that run it, where stages share ranks; () where none do. A place is all
    ranks that have the same stages; places count in the order of their first ranks.
    """
    spans = spans_of(stages)
    ends = sorted({end for span in spans for end in (span.start, span.stop)})
    runs = [tuple(i for i, span in enumerate(spans) if first in span) for first, _ in pairwise(ends)]
    if all(len(run) == 1 for run in runs):
        return ()
    places = list(dict.fromkeys(runs))
    return tuple(tuple(at for at, mine in enumerate(places) if i in mine) for i in range(len(spans)))


def parse_first(text: str, part: str, axis_text: str, flags: Sequence[str]) -> tuple[str, int | None]:
    """The axes of a stage, and the rank that it begins at, if that is written. Raises StrategySyntaxError."""
    axes, sign, first = axis_text.partition("@")
    if any("@" in flag for flag in flags):
        why = "'@' stands behind the axes of a stage, before its flags, such as cp4@0+remat"
        raise StrategySyntaxError(text, part, why)
    if sign and not (first.isascii() and first.isdecimal() and len(first) < 8):
        raise StrategySyntaxError(text, part, "behind '@' stands the rank at which a stage begins, such as cp4@0")
    return axes, int(first) if sign else None


def check_stages(text: str, written: Sequence[str], stages: Sequence[Stage]) -> None:
    """See that stages, `written` so, make a pipeline. Raises StrategySyntaxError."""
    first = stages[0]
    for part, stage in zip(written, stages, strict=True):
        if STAGES in dict(stage.axes):
            raise StrategySyntaxError(text, part, f"what stands between '>' is one stage, without a {STAGES} axis")
        default = "1f1b" in split_rules(part)[0].split("+")  # which a stage without a schedule has too
        if stage is not first and (default or stage.pipeline != Pipeline() or stage.tokens):
            why = "a schedule, cuts and tokens(...) are of all stages; write them with the first"
            raise StrategySyntaxError(text, part, why)
        if stage is not stages[-1] and stage.most("chunks") > 1:
            raise StrategySyntaxError(text, part, "the loss is on the last stage; write its chunks there")
        if stage.replicas != first.replicas:
            why = f"all stages have as many replicas, the first one {first.replicas} and this one {stage.replicas}"
            raise StrategySyntaxError(text, part, f"{why}; what cuts the tokens of a replica is {BINS}")
    if first.pipeline.virtual > 1:
        raise StrategySyntaxError(text, written[0], "a stage that is written has one place: 1f1b, gpipe or zb_h1")
    _check_ranks(text, written, stages)


def _check_ranks(text: str, written: Sequence[str], stages: Sequence[Stage]) -> None:
    end = 0
    for span, part in sorted(zip(spans_of(stages), written, strict=True), key=lambda one: one[0].start):
        if span.start > end:
            raise StrategySyntaxError(text, part, f"no stage is on rank {end}, where an earlier one has to begin")
        end = max(end, span.stop)
    if places_of(stages):
        if stages[0].replicas > 1:
            why = "stages that share ranks have one replica; what cuts a batch within a stage is cp"
            raise StrategySyntaxError(text, written[0], why)
        if stages[0].pipeline.schedule not in _IN_TURN:
            why = f"stages that share ranks run one micro-batch after the other: {' or '.join(_IN_TURN)}"
            raise StrategySyntaxError(text, written[0], why)
