"""The memory tab: what each rank holds over a micro-batch, or over the schedule of its pipeline, and where it peaks."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.printer import op_name
from fxpar.memory import KINDS, Moment, RankMemory, memory_over_time, schedule_of
from fxpar.schedule import Schedule
from fxpar.viz.inside import Inside
from fxpar.viz.step import Lengths
from fxpar.viz.timeline import inside_of
from fxpar.viz.viewed import Viewed

MOST_POINTS = 1500
"""Of all ranks of a strategy together,"""
LEAST_POINTS = 300
"""but not fewer of each rank than this."""

LEVELS = {
    "master_bytes": "master weights",
    "optimizer_bytes": "optimizer",
    "weight_bytes": "weights",
    "home_gradient_bytes": "gradients",
    "accumulator_bytes": "accumulators",
}
MOVING = {
    "saved": "saved activations",
    "again": "recomputed or fetched",
    "forward": "forward temporaries",
    "backward": "backward temporaries",
    "result": "new gradients",
    "message": "messages and batches",
    "workspace": "workspace",
}
WHY = {
    "master weights": "sharded over all ranks",
    "optimizer": "AdamW, two fp32 moments",
    "weights": "as the graph computes with them",
    "gradients": "as the optimizer sees them",
    "accumulators": "gradients of earlier micro-batches",
    "saved activations": "forward values that the backward reads",
    "recomputed or fetched": "forward values, computed again or fetched from the host in the backward",
    "forward temporaries": "other values of the forward",
    "backward temporaries": "values of the backward",
    "new gradients": "of parameters; under pipeline stages what they add up in",
    "messages and batches": "between stages, and of micro-batches under way",
    "workspace": "of the kernel that runs",
}


Keep = Callable[[Viewed, Callable[[], dict[str, Any]]], dict[str, Any]]


def memory_section(
    views: Sequence[Viewed],
    insides: Mapping[str, Inside] | None = None,
    keep: Keep = lambda view, build: build(),
) -> dict[str, Any] | None:
    """What `fxpar.memory` predicts of each strategy, over time. None if a view has no program as a run has it.

    `insides` has the times of the views' programs by strategy, as in the timeline. `keep(view, build)` returns what
    `build()` returns, or has kept it: plain values, for which a program runs on the meta device. Raises what
    `predict_memory` raises.
    """
    if not views or any(view.stored is None for view in views):
        return None
    known = insides or inside_of(views)
    return {
        "parts": [[*LEVELS.values()], [*MOVING.values()]],
        "why": WHY,
        "by_strategy": {
            view.strategy: keep(view, functools.partial(_strategy_json, view, known[view.strategy])) for view in views
        },
    }


def _strategy_json(view: Viewed, inside: Inside) -> dict[str, Any]:
    """`sizes` are padded, `asked` are those before. `ranks` have the moments; `peak` is the fullest moment of the
    fullest rank, by part; `table` reads as `fxpar memory` prints it.
    """
    assert view.stored is not None
    program, count = view.stored, view.runs
    found = memory_over_time(program, view.sizes, micro_batches=count, cluster=view.cluster)
    if isinstance(program, PipelineGraph):
        clocks = _schedule_clocks(schedule_of(program, count), inside, view.sequences.lengths)
    else:
        clocks = [NodeClock(inside.node_ms(0, "body", view.sequences.lengths))]
    most = max(LEAST_POINTS, MOST_POINTS // len(found.ranks))
    ranks = [_rank_json(rank, clock, most) for rank, clock in zip(found.ranks, clocks, strict=True)]
    fullest = max(found.ranks, key=lambda rank: rank.prediction.peak_bytes)
    best = found.prediction
    return {
        "sizes": dict(best.sizes),
        "asked": {dim.name: (view.sizes or {}).get(dim.name, dim.example) for dim in program.dims},
        "micro_batches": best.micro_batches,
        "schedule": best.schedule,
        "peak_bytes": best.peak_bytes,
        "peak": peak_parts(fullest),
        "peak_at": "a switch" if best.switch_bytes > best.step_bytes else best.body.node,
        "table": [list(row) for row in best.rows()],
        "stages": [stage.to_json() for stage in best.stages],
        "ranks": ranks,
    }


def peak_parts(rank: RankMemory) -> dict[str, int]:
    """What a rank holds when it holds most, by part; the sum is its `peak_bytes`."""
    found = rank.prediction
    if found.switch_bytes > found.step_bytes:
        return {
            **level_parts(rank),
            LEVELS["accumulator_bytes"]: found.gradient_bytes,
            "messages of a switch": found.staging_bytes + found.sums_bytes,
        }
    fullest = max(rank.series.moments, key=lambda moment: moment.total_bytes)
    return {**level_parts(rank), **moment_parts(fullest)}


def level_parts(rank: RankMemory) -> dict[str, int]:
    """What is there all the time, by part."""
    found = rank.prediction
    sizes = {name: getattr(found, name) for name in LEVELS if name != "accumulator_bytes"}
    sizes["accumulator_bytes"] = rank.accumulator_bytes
    return {LEVELS[name]: size for name, size in sizes.items()}


def moment_parts(moment: Moment) -> dict[str, int]:
    """What is held at a moment above that, by part."""
    sums = {**dict(zip(KINDS, moment.sums, strict=True)), "workspace": moment.workspace_bytes}
    return {name: sums[kind] for kind, name in MOVING.items()}


# ------------------------------------------------------------------------------------------------------------ series
def _rank_json(rank: RankMemory, clock: Clock, most: int) -> dict[str, Any]:
    """Columns of the moments that are shown. `at` are places in `names`: node, module, op and action of each."""
    moments = rank.series.moments
    times = clock.times(moments)
    shown = thinned([moment.total_bytes for moment in moments], most)
    names: dict[str, int] = {}
    at = [[names.setdefault(word, len(names)) for word in _words(moments[i])] for i in shown]
    parts = [moment_parts(moments[i]) for i in shown]
    used = [name for name in MOVING.values() if any(part[name] for part in parts)]
    backward = next((i for i, m in enumerate(moments) if m.node is not None and is_backward(m.node)), None)
    return {
        "ranks": list(rank.ranks),
        "peak_bytes": rank.prediction.peak_bytes,
        "level": level_parts(rank),
        "moments": len(moments),
        "end_ms": clock.end_ms,
        "backward_ms": None if backward is None or moments[backward].during else round(times[backward], 6),
        "x": [round(times[i], 6) for i in shown],
        "series": {name: [part[name] for part in parts] for name in used},
        "names": list(names),
        "at": at,
    }


def _words(moment: Moment) -> tuple[str, str, str, str]:
    if moment.node is None:
        return "", "", "", moment.during
    return moment.node.name, fqn_of(moment.node), op_name(moment.node), moment.during


def thinned(values: Sequence[int], most: int) -> list[int]:
    """At most `most` places in order: of equal runs of neighbours the first largest and the first smallest of each."""
    if len(values) <= most:
        return list(range(len(values)))
    runs = most // 2
    ends = [len(values) * i // runs for i in range(runs + 1)]
    kept: set[int] = set()
    for begin, end in itertools.pairwise(ends):
        run = range(begin, end)
        kept |= {max(run, key=values.__getitem__), min(run, key=values.__getitem__)}
    return sorted(kept)


# ------------------------------------------------------------------------------------------------------------ clocks
@dataclass
class NodeClock:
    """Calls one after another, each for its predicted ms."""

    costs_ms: Mapping[str, float]
    end_ms: float = 0.0

    def times(self, moments: Sequence[Moment]) -> list[float]:
        """When each moment's call starts; `end_ms` is when the last one ends."""
        found = []
        for moment in moments:
            found.append(self.end_ms)
            self.end_ms += self.costs_ms.get(moment.node.name, 0.0) if moment.node is not None else 0.0
        return found


@dataclass
class ScheduleClock:
    """Actions of a pipeline rank as the schedule is simulated; inside of one, moments are spread evenly."""

    spans: Mapping[str, tuple[float, float]]
    end_ms: float

    def times(self, moments: Sequence[Moment]) -> list[float]:
        """When each moment is. A message is there from the end of the action before it."""
        counts = Counter(moment.during for moment in moments)
        done: Counter[str] = Counter()
        found, now = [], 0.0
        for moment in moments:
            name = moment.during
            if name in self.spans:
                start, end = self.spans[name]
                found.append(start + (end - start) * done[name] / counts[name])
                done[name] += 1
                now = end
            else:
                found.append(now)
        return found


Clock = NodeClock | ScheduleClock


def _schedule_clocks(plan: Schedule, inside: Inside, lengths: Lengths) -> list[ScheduleClock]:
    timeline = inside.timeline(plan, lengths)
    return [
        ScheduleClock({str(span.action): (span.start_ms, span.end_ms) for span in spans}, timeline.makespan_ms)
        for spans in timeline.spans
    ]
