"""Tasks of a run that wait for nobody but their own ranks: which runs where, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fxpar.waves.runs import Option, RunPlan, TaskRun, undominated

_EFFORT = 2000  # orders that are timed

_Order = tuple[tuple[str, Option], ...]


def joined(plan: RunPlan, options: Mapping[str, Sequence[Option]], effort: int = _EFFORT) -> RunPlan:
    """The shortest step that a local search finds, from the waves of `plan` and from the longest tasks on: never longer
    than that. In the order of the result each task begins when all of its ranks have done what they have before; a task
    on all ranks is a wave of its own, those between two of them are one. Equal arguments give equal plans.

    Moves: another option for a task, another place in the order. Ranks are those on which it begins first.
    """
    devices, options = plan.devices, {name: undominated(mine) for name, mine in options.items()}
    waves = tuple((run.task, run.option) for run in plan.runs)
    thrifty = {name: min(mine, key=lambda one: (one.ms * one.width, one.strategy)) for name, mine in options.items()}
    longest = tuple(sorted(thrifty.items(), key=lambda one: (-one[1].ms, one[0])))
    best: tuple[float, _Order] | None = None
    for start in dict.fromkeys((waves, longest)):
        found = _improved(start, options, devices, effort)
        if best is None or found[0] < best[0] * (1 - 1e-9):
            best = found
    assert best is not None
    made = _as_plan(plan, best[1])
    return made if made.ms < plan.ms * (1 - 1e-9) else plan


def _improved(
    order: _Order, options: Mapping[str, Sequence[Option]], devices: int, effort: int
) -> tuple[float, _Order]:
    """The best neighbour, again and again."""
    ms, left = _ms(order, devices), effort
    while left > 0:
        near = list(_neighbours(order, options))
        left -= len(near)
        times = [(_ms(one, devices), place) for place, one in enumerate(near)]
        least, place = min(times, default=(ms, 0))
        if least >= ms * (1 - 1e-9):
            break
        ms, order = least, near[place]
    return ms, order


def _neighbours(order: _Order, options: Mapping[str, Sequence[Option]]) -> Iterator[_Order]:
    for at, (task, option) in enumerate(order):
        for other in options[task]:
            if other != option:
                yield (*order[:at], (task, other), *order[at + 1 :])
        rest = (*order[:at], *order[at + 1 :])
        for to in range(len(order)):
            if to != at:
                yield (*rest[:to], (task, option), *rest[to:])


def _ms(order: _Order, devices: int) -> float:
    """Of a step: all runs, and all moving."""
    free = [0.0] * devices
    for _, option in order:
        _put(free, option)
    return max(free) + sum(option.moved_ms for _, option in order)


def _put(free: list[float], option: Option) -> int:
    """The first of the ranks on which it begins first, and leaves least time unused; these are taken."""
    edges = {0, len(free) - option.width}
    for rank in range(1, len(free)):
        if free[rank] != free[rank - 1]:
            edges |= {rank, rank - option.width}
    best: tuple[float, float, int] | None = None
    for first in sorted(edges):
        if 0 <= first <= len(free) - option.width:
            mine = free[first : first + option.width]
            start = max(mine)
            found = start, option.width * start - sum(mine), first
            best = found if best is None else min(best, found)
    assert best is not None
    start, _, first = best
    free[first : first + option.width] = [start + option.ms] * option.width
    return first


def _as_plan(plan: RunPlan, order: _Order) -> RunPlan:
    free = [0.0] * plan.devices
    waves: list[list[TaskRun]] = []
    for task, option in order:
        first = _put(free, option)
        run = TaskRun(task, tuple(range(first, first + option.width)), option)
        alone = option.width == plan.devices
        if not waves or alone or len(waves[-1][0].ranks) == plan.devices:
            waves.append([])
        waves[-1].append(run)
    return replace(plan, waves=tuple(map(tuple, waves)))
