"""`chart(timeline)`: a simulated schedule as text, one line per rank."""

from __future__ import annotations

from fxpar.schedule.actions import Action
from fxpar.schedule.simulate import Timeline

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chart(timeline: Timeline, *, columns: int = 160) -> str:
    """One line per rank, time to the right: `F3` is the forward of micro-batch 3, `=` goes on with it, `.` is idle.

    With several stages per rank a letter tells them apart, `F3b`. The scale is the coarsest at which the shortest
    action shows its name, unless the chart would then be wider than `columns`: names are then cut off.
    """
    spans = [span for done in timeline.spans for span in done]
    names = {span.action: _name(span.action, timeline) for span in spans}
    shortest = min((s.end_ms - s.start_ms for s in spans if s.end_ms > s.start_ms), default=1.0)
    wide = max((len(name) for name in names.values()), default=1) + 1
    scale = min(wide / shortest, columns / timeline.makespan_ms if timeline.makespan_ms else 1.0)
    label = len(f"rank {len(timeline.spans) - 1}")
    lines = []
    for rank, done in enumerate(timeline.spans):
        cells = ["."] * round(timeline.makespan_ms * scale)
        for span in done:
            start, end = round(span.start_ms * scale), round(span.end_ms * scale)
            cells[start:end] = list(names[span.action].ljust(end - start - 1, "=")[: max(0, end - start - 1)] + " ")[
                : end - start
            ]
        lines.append(f"{f'rank {rank}':<{label}}  {''.join(cells).rstrip()}")
    peak = ", ".join(map(str, timeline.peak_saved_on_rank))
    several = any(len({action.stage for action in done}) > 1 for done in timeline.schedule.actions)
    lines.append(
        f"{timeline.schedule}: {timeline.makespan_ms:.4g} ms, bubble {timeline.bubble_fraction:.1%}, "
        f"most saved micro-batches by rank{', each of one stage' if several else ''}: {peak}"
    )
    return "\n".join(lines)


def _name(action: Action, timeline: Timeline) -> str:
    plan = timeline.schedule
    chunk = _LETTERS[action.stage // plan.ranks % len(_LETTERS)] if plan.virtual > 1 else ""
    return f"{action.part}{action.micro_batch}{chunk}"
