"""Which task runs where in a step that `fxpar train` can follow: each on consecutive ranks, wave after wave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_TASKS = 10  # that are spread over waves in all ways; more of them stay in the order of their times


@dataclass(frozen=True)
class Option:
    """A way to run a task: ms of its step on `width` ranks under `strategy`, which may have stages for its towers."""

    width: int
    ms: float
    strategy: str


@dataclass(frozen=True)
class TaskRun:
    """A task on its ranks, which are consecutive."""

    task: str
    ranks: tuple[int, ...]
    option: Option


@dataclass(frozen=True)
class RunPlan:
    """Waves of tasks side by side, each of which begins when the one before it has ended, as steps of a run do.
    `sequential_ms`: all tasks one after the other on all ranks, no tower on ranks of its own.
    """

    devices: int
    waves: tuple[tuple[TaskRun, ...], ...]
    sequential_ms: float

    @property
    def ms(self) -> float:
        return sum(max(run.option.ms for run in wave) for wave in self.waves)

    @property
    def runs(self) -> tuple[TaskRun, ...]:
        """In the order in which a run has to be given the tasks."""
        return tuple(run for wave in self.waves for run in wave)


def plan_runs(options: Mapping[str, Sequence[Option]], devices: int, sequential_ms: float) -> RunPlan:
    """The shortest step of tasks with these options, of which each has one of `devices` ranks or fewer. Exact for up to
    MOST_TASKS; of more, tasks of similar times run side by side. Equal arguments give equal plans.
    """
    names = list(options)
    if len(names) > MOST_TASKS:
        least = {name: min(one.ms for one in options[name]) for name in names}
        names.sort(key=lambda name: (-least[name], name))
        splits = _neighbours(len(names))
    else:
        splits = _subsets(len(names))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by set of tasks, as bits: ms and waves
    waves: dict[int, list[Option] | None] = {}
    for done, wave in splits:
        if wave not in waves:
            waves[wave] = _side_by_side([options[name] for name in _members(names, wave)], devices)
        found = waves[wave]
        if found is None or done ^ wave not in best:
            continue
        before_ms, before = best[done ^ wave]
        ms = before_ms + max(one.ms for one in found)
        if done not in best or ms < best[done][0] * (1 - 1e-9):
            best[done] = ms, (*before, wave)
    chosen = best[(1 << len(names)) - 1][1]
    placed = []
    for wave in chosen:
        first, runs = 0, []
        for name, one in zip(_members(names, wave), waves[wave] or [], strict=True):
            runs.append(TaskRun(name, tuple(range(first, first + one.width)), one))
            first += one.width
        placed.append(tuple(runs))
    return RunPlan(devices, tuple(placed), sequential_ms)


def _members(names: Sequence[str], bits: int) -> list[str]:
    return [name for i, name in enumerate(names) if bits >> i & 1]


def _subsets(count: int) -> Iterator[tuple[int, int]]:
    """(set, part of it that is its last wave) of all sets, each behind its own subsets."""
    for done in range(1, 1 << count):
        wave = done
        while wave:
            yield done, wave
            wave = (wave - 1) & done


def _neighbours(count: int) -> Iterator[tuple[int, int]]:
    """The same of sets of the first ones, with waves of neighbours."""
    for first, last in sorted(combinations(range(count + 1), 2), key=lambda one: one[::-1]):
        yield (1 << last) - 1, (1 << last) - (1 << first)


def _side_by_side(tasks: Sequence[Sequence[Option]], devices: int) -> list[Option] | None:
    """An option for each task, on ranks of its own, so that the slowest is as fast as can be; None if they do not fit.
    A task that is not the slowest has the fewest ranks that suffice.
    """
    for ms in sorted({one.ms for task in tasks for one in task}):
        found = []
        for task in tasks:
            enough = [one for one in task if one.ms <= ms]
            if not enough:
                break
            found.append(min(enough, key=lambda one: (one.width, one.ms, one.strategy)))
        if len(found) == len(tasks) and sum(one.width for one in found) <= devices:
            return found
    return None
