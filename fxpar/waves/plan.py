"""`plan_waves`: which layers of which MetaOps run when, on which devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpar.errors import FitsNoDevicesError
from fxpar.waves.bound import relaxed
from fxpar.waves.improve import improved
from fxpar.waves.level_free import level_free
from fxpar.waves.order import Piece, Problem
from fxpar.waves.place import Placed, Placer
from fxpar.waves.spindle import EXTENSIONS, SORTS, waves
from fxpar.waves.step import Step, step_of
from fxpar.waves.work import Devices, TaskGraph

STEPS = 2000  # of local search from each start


@dataclass(frozen=True)
class WavePlan:
    """Pieces of MetaOps on devices, in the order of their forwards, and the step that they make.

    No plan of this graph takes less than `bound_ms` (transfers and memory aside); Spindle's waves, placed and timed
    alike, take `spindle_ms` (inf if memory does not suffice for them), all MetaOps one after the other on all devices
    `sequential_ms`. `found_by` names the start that led to the plan.
    """

    graph: TaskGraph
    devices: Devices
    pieces: tuple[Placed, ...]
    step: Step
    bound_ms: float
    spindle_ms: float
    sequential_ms: float
    found_by: str

    @property
    def ms(self) -> float:
        return self.step.ms

    @property
    def gap(self) -> float:
        """By how much it takes longer than `bound_ms`: 0.01 is one percent."""
        return self.ms / self.bound_ms - 1

    @property
    def transfer_share(self) -> float:
        """The largest part of the step that a device spends receiving from pieces before."""
        return max(self.step.received_ms) / self.ms

    @cached_property
    def waves(self) -> tuple[tuple[int, ...], ...]:
        """Places of pieces by wave: one more than the latest wave of what it receives from and of what ran on its
        devices before. Pieces of a wave are on disjoint devices and do not need each other.
        """
        on_device: dict[int, int] = {}
        wave: list[int] = []
        for piece in self.pieces:
            before = [wave[one] for one in piece.sources] + [on_device.get(one, -1) for one in piece.devices]
            wave.append(max(before) + 1)
            on_device |= dict.fromkeys(piece.devices, wave[-1])
        return tuple(tuple(i for i, one in enumerate(wave) if one == number) for number in range(max(wave) + 1))


def plan_waves(graph: TaskGraph, devices: Devices, *, steps: int = STEPS) -> WavePlan:
    """Plan one training step of all tasks of `graph`, which is Spindle's problem (arXiv 2409.03365, section 3).

    Starts are Spindle's waves under each of its rules and an order without levels; the best of both kinds are improved
    by local search of so many `steps`, placed and timed, and the shortest step is kept. Spindle's own are among them,
    so a plan is never longer. Equal arguments give equal plans.

    Raises FitsNoDevicesError.
    """
    graph.check_fits(devices)
    problem = Problem(graph, devices)
    bound = relaxed(graph, problem.curves, devices.count)
    spindle = min((list(one) for one in _spindle(problem)), key=lambda found: _ms(problem, found))
    free = level_free(problem, bound.metaop_ms)
    starts = {"waves": spindle, "level-free": free}
    orders = starts | {f"{name}, improved": improved(problem, found, steps) for name, found in starts.items()}
    steps_of: dict[str, tuple[list[Placed], Step]] = {}
    for name, order in orders.items():
        placed = Placer(problem, order).place()
        if placed is not None:
            step = step_of(problem, placed)
            if max(step.peak_bytes) <= devices.memory_bytes:
                steps_of[name] = placed, step
    if not steps_of:
        raise _no_room(problem)
    best = min(steps_of, key=lambda name: steps_of[name][1].ms)
    placed, step = steps_of[best]
    sequential = sum(curve.least_ms * count for curve, count in zip(problem.curves, problem.layers, strict=True))
    spindle_ms = steps_of["waves"][1].ms if "waves" in steps_of else float("inf")
    return WavePlan(graph, devices, tuple(placed), step, bound.bound_ms, spindle_ms, sequential, best)


def _spindle(problem: Problem) -> Iterator[list[Piece]]:
    """The pieces of Spindle's waves under each pair of rules."""
    for sort in SORTS:
        for extension in EXTENSIONS:
            yield [piece for wave in waves(problem, sort, extension) for piece in wave]


def _ms(problem: Problem, pieces: Sequence[Piece]) -> float:
    return max(problem.times(pieces)[1])


def _no_room(problem: Problem) -> FitsNoDevicesError:
    """All MetaOps fit, but not together."""
    devices = problem.devices
    states = {one.parameters: one.layers * one.state_bytes for one in problem.graph.metaops}
    total = sum(states.values()) + sum(one.layers * one.saved_bytes for one in problem.graph.metaops)
    largest = max(problem.graph.metaops, key=lambda one: one.layers * (one.state_bytes + one.saved_bytes))
    why = (
        f"beside the others: all together take {total / 2**30:.1f} GiB or more, and {devices.count} devices have "
        f"{devices.count * devices.memory_bytes / 2**30:.1f}"
    )
    return FitsNoDevicesError(largest.name, why, "Plan for more devices or more memory, or for smaller batches")
