"""The run tab: what a run of `fxpar train` measured, step by step, and how the predictions did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 1000  # of a curve; longer runs are shown as means of neighbouring steps
CURVES = ("loss", "validation_loss", "tokens_per_s", "lr", "grad_norm")
"""Fields of a step that are drawn as they are."""
PHASES = ("run", "switch", "reduce")
Step = Mapping[str, Any]  # a line of metrics.jsonl


def run_section(
    steps: Sequence[Step], *, comparison: Mapping[str, Any] | None = None, environment: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The section of the lines of `metrics.jsonl`, ascending by step; None without any.

    `comparison` is that of `summary.json`; `environment` are facts for the head of the tab.
    """
    if not steps:
        return None
    bins = _bins(steps)
    groups = sorted({(int(g["limit"]), g["strategy"]) for step in steps for g in step["groups"]})
    return {
        "steps": [part[-1]["step"] for part in bins],
        "steps_per_point": max(map(len, bins)),
        "curves": {name: [_mean(part, name) for part in bins] for name in CURVES},
        "tasks": _tasks(steps, bins),
        "times": _times(bins),
        "groups": [_group(key, bins, steps) for key in groups],
        "totals": _totals(steps),
        "comparison": None if comparison is None else dict(comparison),
        "environment": list(environment),
    }


def _tasks(steps: Sequence[Step], bins: Sequence[Sequence[Step]]) -> dict[str, list[float | None]]:
    """The loss of each task, without its weight, over the steps that have it; nothing of a run of one loss."""
    names = dict.fromkeys(name for step in steps for name in step.get("tasks") or {})
    return {name: [_short_mean([step["tasks"].get(name) for step in part]) for part in bins] for name in names}


def _bins(steps: Sequence[Step]) -> list[Sequence[Step]]:
    size = -(-len(steps) // MOST_POINTS)
    return [steps[i : i + size] for i in range(0, len(steps), size)]


def _mean(part: Sequence[Step], name: str) -> float | None:
    """Mean of a field over the steps that have it."""
    return _short_mean([step.get(name) for step in part])


def _short_mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{math.fsum(found) / len(found):.7g}") if found else None


def _times(bins: Sequence[Sequence[Step]]) -> dict[str, list[float | None]]:
    """ms per step of what is not of a group: the optimizer, and all else (data, planning, logging)."""
    optimizer = [_short_mean([1e3 * step["optimizer_s"] for step in part]) for part in bins]
    other = [_short_mean([1e3 * _other_s(step) for step in part]) for part in bins]
    return {"optimizer": optimizer, "other": other}


def _other_s(step: Step) -> float:
    return max(0.0, step["wall_s"] - step["optimizer_s"] - sum(g["wall_s"] for g in step["groups"]))


def _group(key: tuple[int, str], bins: Sequence[Sequence[Step]], steps: Sequence[Step]) -> dict[str, Any]:
    """Of one length group: ms per step by phase (0 where it did not run), points, counts of lengths, means."""
    per_step = {step["step"]: _of_group(step, key) for step in steps}

    def series(phase: str) -> list[float | None]:
        return [_short_mean([_phase_ms(per_step[step["step"]], phase) for step in part]) for part in bins]

    mine = [found for found in per_step.values() if found is not None]
    later = [found for number, found in per_step.items() if found is not None and number != steps[0]["step"]] or mine
    lengths: dict[int, int] = {}
    for found in mine:
        for bound, count in found.get("lengths", ()):
            lengths[bound] = lengths.get(bound, 0) + count
    return {
        "limit": key[0],
        "strategy": key[1],
        "ms": {phase: series(phase) for phase in PHASES},
        "points": _points(later),
        "lengths": sorted(lengths.items()),
        "sequences": sum(found["sequences"] for found in mine),
        "tokens": sum(found["tokens"] for found in mine),
        "steps": len(mine),
        "switch_bytes": _short_mean([found["switch_bytes"] for found in mine]),
        "reduce_bytes": _short_mean([found["reduce_bytes"] for found in mine]),
        "measured": {phase: _short_mean([_phase_ms(found, phase) for found in later]) for phase in PHASES},
        "predicted": {phase: _short_mean([_predicted_ms(found, phase) for found in later]) for phase in PHASES},
    }


def _of_group(step: Step, key: tuple[int, str]) -> dict[str, Any] | None:
    """The group's record in a step; two groups are never alike in limit and strategy."""
    return next((g for g in step["groups"] if (int(g["limit"]), g["strategy"]) == key), None)


def _phase_ms(group: Mapping[str, Any] | None, phase: str) -> float:
    if group is None:
        return 0.0
    if phase == "run":
        return 1e3 * max(0.0, group["wall_s"] - group["switch_s"] - group["reduce_s"])
    return 1e3 * group[f"{phase}_s"]


def _predicted_ms(group: Mapping[str, Any], phase: str) -> float | None:
    value = group.get("predicted_s" if phase == "run" else f"predicted_{phase}_s")
    return None if value is None else 1e3 * value


def _points(records: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """[predicted, measured] ms of the micro-batches, of at most as many steps as a curve has points."""
    every = -(-len(records) // MOST_POINTS) if records else 1
    pairs = [(_predicted_ms(record, "run"), _phase_ms(record, "run")) for record in records[::every]]
    return [[float(f"{p:.5g}"), float(f"{m:.5g}")] for p, m in pairs if p]


def _totals(steps: Sequence[Step]) -> dict[str, Any]:
    wall_s = math.fsum(step["wall_s"] for step in steps)
    valid = sum(step["valid_tokens"] for step in steps)
    validation = [step["validation_loss"] for step in steps if step.get("validation_loss") is not None]
    return {
        "steps": len(steps),
        "skipped": sum(bool(step["skipped"]) for step in steps),
        "sequences": sum(step["sequences"] for step in steps),
        "tokens": sum(step["tokens"] for step in steps),
        "valid_tokens": valid,
        "wall_s": wall_s,
        "cpu_s": math.fsum(step["cpu_s"] for step in steps),
        "tokens_per_s": valid / wall_s if wall_s > 0 else 0.0,
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "validation_loss": validation[-1] if validation else None,
    }
