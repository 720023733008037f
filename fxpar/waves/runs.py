"""Which task runs where in a step that `fxpar train` can follow: each on consecutive ranks, wave after wave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST_TASKS = 10  # that are spread over waves in all ways; more of them stay in the order of their times
_UNITS = 64  # that ranks are counted in; of more ranks a unit is several
_MOST_HELD = 32  # amounts of memory that are tried for weights


@dataclass(frozen=True)
class Option:
    """A way to run a task: ms of its runs in a step on `width` ranks under `strategy`, which may have stages for its
    towers. All ranks take part in what is moved before and behind it, weights and gradients, for `moved_ms`.

    On its fullest rank weights and the sums of their gradients take `held_bytes`, what runs `active_bytes` beside.
    """

    width: int
    ms: float
    strategy: str
    moved_ms: float = 0.0
    held_bytes: float = 0.0
    active_bytes: float = 0.0


@dataclass(frozen=True)
class TaskRun:
    """A task on its ranks, which are consecutive."""

    task: str
    ranks: tuple[int, ...]
    option: Option


@dataclass(frozen=True)
class RunPlan:
    """Waves of tasks, each of which begins when the one before it has ended, as steps of a run do: weights of its tasks
    come, they run, their gradients leave. Tasks of a wave run side by side, or where they have a rank in common one
    after the other, in this order. `sequential_ms`: all tasks one after the other, no tower on ranks of its own.

    `rank_bytes`: what each rank holds at its fullest, of which `optimizer_bytes` are the optimizer's; () where nobody
    asked. `in_turns`: weights of tasks take the same memory one after the other. `needs_budget`: a run holds no more
    only if it is told what it may hold.
    """

    devices: int
    waves: tuple[tuple[TaskRun, ...], ...]
    sequential_ms: float
    rank_bytes: tuple[float, ...] = ()
    optimizer_bytes: float = 0.0
    in_turns: bool = False
    needs_budget: bool = False

    @property
    def ms(self) -> float:
        return self.moved_ms + sum(_makespan(wave) for wave in self.waves)

    @property
    def moved_ms(self) -> float:
        """Of the step, what all ranks spend on moving weights and gradients."""
        return sum(run.option.moved_ms for run in self.runs)

    @property
    def runs(self) -> tuple[TaskRun, ...]:
        """In the order in which a run has to be given the tasks."""
        return tuple(run for wave in self.waves for run in wave)

    @property
    def levels(self) -> tuple[int, ...]:
        """Of each of `runs`, how many it waits for one after the other."""
        found: list[int] = []
        for wave in self.waves:
            first = max(found, default=-1) + 1
            on_rank: dict[int, int] = {}
            for run in wave:
                level = max((on_rank[rank] + 1 for rank in run.ranks if rank in on_rank), default=first)
                found.append(level)
                on_rank |= dict.fromkeys(run.ranks, level)
        return tuple(found)


def _makespan(wave: Sequence[TaskRun]) -> float:
    free: dict[int, float] = {}
    for run in wave:
        end = max(free.get(rank, 0.0) for rank in run.ranks) + run.option.ms
        free |= dict.fromkeys(run.ranks, end)
    return max(free.values())


def plan_runs(
    options: Mapping[str, Sequence[Option]], devices: int, sequential_ms: float, room_bytes: float = math.inf
) -> RunPlan | None:
    """The shortest step of tasks with these options, of which each has one of `devices` ranks or fewer. A rank has
    `room_bytes` for the weights of the task that holds most and the activations of the one that needs most; None where
    that does not suffice for any choice.

    Exact for up to MOST_TASKS tasks and 64 ranks; of more tasks those of similar times run side by side, and more ranks
    are counted in units. Equal arguments give equal plans.
    """
    free = _Waves(options, devices).plan(sequential_ms)
    if needed_bytes(free.runs) <= room_bytes:
        return free
    best: RunPlan | None = None
    for most in _held(options, room_bytes):
        fitting = {
            name: [one for one in mine if one.held_bytes <= most and one.active_bytes <= room_bytes - most]
            for name, mine in options.items()
        }
        if all(fitting.values()):
            plan = _Waves(fitting, devices).plan(sequential_ms)
            if best is None or plan.ms < best.ms * (1 - 1e-9):
                best = plan
    return best


def needed_bytes(runs: Sequence[TaskRun]) -> float:
    """For the weights of the task that holds most, and the activations of the one that needs most."""
    return max(run.option.held_bytes for run in runs) + max(run.option.active_bytes for run in runs)


def least_bytes(options: Mapping[str, Sequence[Option]]) -> tuple[float, tuple[str, Option], tuple[str, Option]]:
    """The least room that suffices for some choice, with the task and option that hold most of it and those that are
    most active.
    """
    least = max(min(one.held_bytes for one in mine) for mine in options.values())
    found: list[tuple[float, tuple[str, Option], tuple[str, Option]]] = []
    for most in sorted({one.held_bytes for mine in options.values() for one in mine if one.held_bytes >= least}):
        fitting = {name: [one for one in mine if one.held_bytes <= most] for name, mine in options.items()}
        chosen = [(name, min(mine, key=lambda one: (one.active_bytes, one.strategy))) for name, mine in fitting.items()]
        holds = max(chosen, key=lambda one: one[1].held_bytes)
        active = max(chosen, key=lambda one: one[1].active_bytes)
        found.append((holds[1].held_bytes + active[1].active_bytes, holds, active))
    return min(found, key=lambda one: one[0])


def _held(options: Mapping[str, Sequence[Option]], room_bytes: float) -> list[float]:
    """How much of the room may be for weights, most first."""
    least = max(min(one.held_bytes for one in mine) for mine in options.values())
    known = sorted({one.held_bytes for mine in options.values() for one in mine if one.held_bytes >= least})
    known = [one for one in known if one <= room_bytes]
    step = max(1, -(-len(known) // _MOST_HELD))
    return sorted({*known[::step], *known[-1:]}, reverse=True)


class _Waves:
    """The ways to put tasks side by side. A wave takes as long as its slowest task, and what all of them move."""

    def __init__(self, options: Mapping[str, Sequence[Option]], devices: int) -> None:
        self.devices, self.unit = devices, 1  # ranks; widths are powers of two
        while devices > self.unit * _UNITS:
            self.unit *= 2
        self.names = list(options)
        self.all_subsets = len(self.names) <= MOST_TASKS
        if not self.all_subsets:
            least = {name: min(one.ms for one in options[name]) for name in self.names}
            self.names.sort(key=lambda name: (-least[name], name))
        self.options = [undominated(options[name]) for name in self.names]
        self.limits = sorted({one.ms for mine in self.options for one in mine})

    def plan(self, sequential_ms: float) -> RunPlan:
        found = dict(self._waves())
        splits = _subsets(len(self.names)) if self.all_subsets else _neighbours(len(self.names))
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by set of tasks, as bits: ms and waves
        for done, wave in splits:
            if wave not in found or done ^ wave not in best:
                continue
            before_ms, before = best[done ^ wave]
            ms = before_ms + found[wave][0]
            if done not in best or ms < best[done][0] * (1 - 1e-9):
                best[done] = ms, (*before, wave)
        chosen = best[(1 << len(self.names)) - 1][1]
        return RunPlan(self.devices, tuple(self._placed(wave, found[wave][1]) for wave in chosen), sequential_ms)

    def _waves(self) -> Iterator[tuple[int, tuple[float, float]]]:
        """By tasks that fit side by side, as bits: (ms, those of the slowest task) of the shortest wave."""
        room, limits = self.devices // self.unit + 1, np.array(self.limits)
        moved = [self._columns(mine, limits) for mine in self.options]

        def with_more(bits: int, table: np.ndarray, last: int) -> Iterator[tuple[int, tuple[float, float]]]:
            behind = len(self.names) if self.all_subsets or not bits else min(last + 2, len(self.names))
            for task in range(last + 1, behind):
                grown = np.full_like(table, np.inf)  # [limits, units in use]: the least ms of moving
                for width, column in moved[task]:
                    if width < room:
                        np.minimum(grown[:, width:], table[:, : room - width] + column[:, None], out=grown[:, width:])
                took = limits + grown.min(1)
                slowest = int(took.argmin())
                if math.isfinite(took[slowest]):
                    yield bits | 1 << task, (float(took[slowest]), self.limits[slowest])
                    yield from with_more(bits | 1 << task, grown, task)

        nothing = np.full((len(limits), room), np.inf)
        nothing[:, 0] = 0.0
        yield from with_more(0, nothing, -1)

    def _columns(self, options: Sequence[Option], limits: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """By units of ranks: [limits] the least ms of moving of an option that takes no longer; inf for none."""
        whole = self.devices // self.unit
        units = [whole if one.width == self.devices else -(-one.width // self.unit) for one in options]
        found = []
        for width in sorted(set(units)):
            mine = [one for one, units_of in zip(options, units, strict=True) if units_of == width]
            least = [min((one.moved_ms for one in mine if one.ms <= limit), default=np.inf) for limit in limits]
            found.append((width, np.array(least)))
        return found

    def _placed(self, wave: int, limit_ms: float) -> tuple[TaskRun, ...]:
        """Tasks of a wave, none slower than that, with the least moving; of equal ones on the fewest ranks."""
        members = [task for task in range(len(self.names)) if wave >> task & 1]
        ways: dict[int, tuple[float, tuple[Option, ...]]] = {0: (0.0, ())}  # by ranks in use
        for task in members:
            longer: dict[int, tuple[float, tuple[Option, ...]]] = {}
            for used, (moved_ms, chosen) in ways.items():
                for one in (one for one in self.options[task] if one.ms <= limit_ms):
                    width, ms = used + one.width, moved_ms + one.moved_ms
                    if width <= self.devices and (width not in longer or ms < longer[width][0]):
                        longer[width] = ms, (*chosen, one)
            ways = longer
        _, chosen = ways[min(ways, key=lambda width: (round(ways[width][0], 9), width))]
        first, runs = 0, []
        for task, one in zip(members, chosen, strict=True):
            runs.append(TaskRun(self.names[task], tuple(range(first, first + one.width)), one))
            first += one.width
        return tuple(runs)


def undominated(options: Sequence[Option]) -> list[Option]:
    """Without those of which another one, on as many ranks or fewer, is no slower and moves no longer."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda one: (one.width, one.ms, one.moved_ms, one.strategy)):
        if not any(other.ms <= one.ms and other.moved_ms <= one.moved_ms for other in kept):
            kept.append(one)
    return kept


def _subsets(count: int) -> Iterator[tuple[int, int]]:
    """(set, part of it that is its last wave) of all sets, each behind its own subsets."""
    for done in range(1, 1 << count):
        wave = done
        while wave:
            yield done, wave
            wave = (wave - 1) & done


def _neighbours(count: int) -> Iterator[tuple[int, int]]:
    """The same of sets of the first ones, with waves of neighbours."""
    for last in range(1, count + 1):
        for first in range(last):
            yield (1 << last) - 1, (1 << last) - (1 << first)
