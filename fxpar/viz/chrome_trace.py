"""Steps in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fxpar.viz.inside import ACTION_PARTS, Inside
from fxpar.viz.step import Lengths, StepGroup, StepSpan, StepTimeline

MOST_INSIDE = 50_000  # events inside of micro-batches
GROUPS, RUNS, INSIDE = 0, 1, 2
_TRACKS = {GROUPS: "groups", RUNS: "step", INSIDE: "inside (predicted)"}
Event = dict[str, Any]


def chrome_trace(
    timelines: StepTimeline | Mapping[str, StepTimeline], insides: Mapping[str, Inside] | None = None
) -> dict[str, Any]:
    """{"traceEvents": [...]}, sorted by time: complete events with pid = rank (the first one of a lane), tid = track.

    Several timelines (by title) all begin at 0; the processes of the second one come after those of the first.
    `insides` (by strategy) puts modules under predicted micro-batches, modules of theirs, kernels and collectives under
    these: an event lies in the time of the one that it is a part of. `args` have `bytes`: of kernels what they read and
    write, of collectives what a rank sends, of switches and reductions what all ranks send; modules have both sums.
    """
    named = {"": timelines} if isinstance(timelines, StepTimeline) else timelines
    events: list[Event] = []
    first = 0
    for title, timeline in named.items():
        events += _timeline_events(timeline, title, first, insides or {})
        first += 1 + max((rank for lane in timeline.lanes for rank in lane.ranks), default=0)
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    return {
        "traceEvents": [*(e for e in events if e["ph"] == "M"), *spans],
        "displayTimeUnit": "ms",
        "otherData": {"made by": "fxpar"},
    }


def _timeline_events(timeline: StepTimeline, title: str, first: int, insides: Mapping[str, Inside]) -> Iterator[Event]:
    prefix = f"{title}: " if title else ""
    tracks = [GROUPS, RUNS, *([INSIDE] if insides and timeline.source == "predicted" else [])]
    for lane in timeline.lanes:
        pid = first + lane.ranks[0]
        yield _metadata("process_name", pid, 0, name=f"{prefix}{lane}")
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for track in tracks:
            yield _metadata("thread_name", pid, track, name=_TRACKS[track])
        for number, group in enumerate(timeline.groups):
            start, end = timeline.group_window(number)
            yield _complete(f"{group.label} {group.strategy}".strip(), "group", pid, GROUPS, start, end, group.tokens)
    left = MOST_INSIDE
    for span in timeline.spans:
        pid = first + timeline.lanes[span.lane].ranks[0]
        lengths = lengths_of(timeline, span)
        tokens = sum(lengths) * timeline.groups[span.group].rows if lengths else 0
        event = _complete(span_name(span), span.kind, pid, RUNS, span.start_ms, span.end_ms, tokens)
        if span.kind in ("switch", "reduce"):
            group = timeline.groups[span.group]
            event["args"]["bytes"] = group.switch_bytes if span.kind == "switch" else group.reduce_bytes
        yield event
        strategy = timeline.groups[span.group].strategy if span.group >= 0 else ""
        if INSIDE in tracks and strategy in insides and lengths:
            inside = _inside_events(insides[strategy], span, lengths, pid)
            if len(inside) <= left:
                left -= len(inside)
                yield from inside


def span_name(span: StepSpan) -> str:
    """`F3` for the forward of micro-batch 3, `F3 stage 1` where it says which; words for all else."""
    if span.kind in ACTION_PARTS:
        return f"{span.kind}{span.micro_batch} stage {span.stage}"
    return span.kind.replace("_", "-") + (f" {span.micro_batch}" if span.micro_batch >= 0 else "")


def lengths_of(timeline: StepTimeline, span: StepSpan) -> Lengths:
    """The sequences that a span works on; empty where it has none (idle micro-batches, switches)."""
    if span.group < 0 or span.micro_batch < 0 or span.kind == "wait":
        return ()
    group: StepGroup = timeline.groups[span.group]
    mine: Sequence[Lengths] = group.micro_batches[timeline.lanes[span.lane].replicas[span.group]]
    return mine[span.micro_batch] if span.micro_batch < len(mine) else ()


def _inside_events(inside: Inside, span: StepSpan, lengths: Lengths, pid: int) -> list[Event]:
    """Modules, kernels and collectives of a span, one after another; each module before what is inside of it."""
    part = ACTION_PARTS.get(span.kind, "body")
    events: list[Event] = []
    around: list[tuple[tuple[str, bool], Event]] = []  # modules that the row is in, the outermost first
    now = span.start_ms
    for row in inside.parts[max(span.stage, 0), part].rows:
        end, nbytes = now + row.ms.at(lengths), round(row.nbytes.at(lengths))
        path = [(module, row.backward) for module in modules_of(row.module)]
        kept = next((i for i, one in enumerate(path) if i >= len(around) or around[i][0] != one), len(path))
        del around[kept:]
        for module, backward in path[kept:]:
            event = _complete(module, "module", pid, INSIDE, now, now, None)
            event["args"] = {"bytes": 0, "sent_bytes": 0, "backward": backward}
            around.append(((module, backward), event))
            events.append(event)
        for _, event in around:
            event["dur"] = round(max(0.0, round(end * 1e3, 3) - event["ts"]), 3)
            event["args"]["bytes" if row.kind == "compute" else "sent_bytes"] += nbytes
        name = row.kind if row.kind == "compute" else f"{row.kind}@{row.axis}"
        event = _complete(name, row.kind, pid, INSIDE, now, end, None)
        event["args"] = {"bytes": nbytes, "calls": row.calls, "backward": row.backward}
        events.append(event)
        now = end
    return events


def modules_of(fqn: str) -> list[str]:
    """["layers.3", "layers.3.attention"] for "layers.3.attention": the modules from the outside in, a list of layers
    left out; "(model)" for the model itself.
    """
    names = fqn.split(".") if fqn else []
    every = [".".join(names[: i + 1]) for i in range(len(names))]
    return [one for i, one in enumerate(every) if i + 1 == len(names) or not names[i + 1].isdecimal()] or ["(model)"]


def _complete(
    name: str, category: str, pid: int, tid: int, start_ms: float, end_ms: float, tokens: int | None
) -> Event:
    args = {"tokens": tokens} if tokens else {}
    # Times in µs; whole nanoseconds, so that the end of a span is not after the begin of the next one.
    start, end = round(start_ms * 1e3, 3), round(end_ms * 1e3, 3)
    duration = round(max(0.0, end - start), 3)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
