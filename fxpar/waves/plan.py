"""`plan_waves`: which layers of which MetaOps run when, on which devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import FitsNoDevicesError
from fxpar.waves.bound import Relaxed, relaxed
from fxpar.waves.improve import improved, tidied
from fxpar.waves.level_free import level_free
from fxpar.waves.order import Piece, Problem
from fxpar.waves.place import Placed, Placer
from fxpar.waves.spindle import EXTENSIONS, SORTS, waves
from fxpar.waves.step import Step, step_of
from fxpar.waves.work import TaskGraph

EFFORT = 60_000  # pieces that each local search times
_AGAIN = 2  # local searches from the best that was found
_WAVES, _SEQUENTIAL = "waves", "one after the other"


@dataclass(frozen=True)
class WavePlan:
    """Pieces of MetaOps on the first `devices` of a cluster, in the order of their forwards, and the step of them.

    No plan of this graph takes less than `bound_ms` (transfers, reductions and memory aside); Spindle's waves, placed
    and timed alike, take `spindle_ms` (inf if memory does not suffice for them), all MetaOps one after the other on all
    devices `sequential_ms`, without what they send each other. `found_by` names the start that led to the plan.
    """

    graph: TaskGraph
    cluster: ClusterSpec
    devices: int
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
        """The part of the step that devices spend receiving from other pieces, on average."""
        return sum(self.step.received_ms) / len(self.step.received_ms) / self.ms

    @cached_property
    def waves(self) -> tuple[tuple[int, ...], ...]:
        """Places of pieces by wave: one more than the latest wave of what it receives from and of whose forward ran on
        its devices before. Pieces of a wave are on disjoint devices and do not need each other.
        """
        on_device: dict[int, int] = {}
        wave: dict[int, int] = {}
        for at in (run.piece for run in self.step.runs if not run.backward):
            piece = self.pieces[at]
            before = [wave[one] for one in piece.sources] + [on_device.get(one, -1) for one in piece.devices]
            wave[at] = max(before) + 1
            on_device |= dict.fromkeys(piece.devices, wave[at])
        return tuple(tuple(i for i in sorted(wave) if wave[i] == number) for number in range(max(wave.values()) + 1))


def plan_waves(
    graph: TaskGraph,
    cluster: ClusterSpec,
    devices: int | None = None,
    *,
    memory_bytes: float | None = None,
    held_bytes: float = 0.0,
    effort: int = EFFORT,
) -> WavePlan:
    """Plan one training step of all tasks of `graph`, which is Spindle's problem (arXiv 2409.03365, section 3), on so
    many devices of the cluster (None: all). Each holds `memory_bytes` (None: as the cluster says), of which
    `held_bytes` are taken whatever the plan is.

    Starts are Spindle's waves under each of its rules, of which the shortest is taken, and orders without levels. Each
    is improved by local searches of so much `effort`, and the best of them again; all are placed and timed, and the
    shortest step is kept, of equal ones that of fewest pieces. Spindle's own are among them, and all MetaOps one
    after the other, so a plan is never longer. Equal arguments give equal plans.

    Raises ClusterError for more devices than the cluster has, TaskGraphError for a number that cannot be,
    FitsNoDevicesError.
    """
    problem = Problem(graph, cluster, devices, memory_bytes, held_bytes)
    problem.check_fits()
    bound = relaxed(graph, problem.curves, problem.devices)
    found: dict[str, tuple[list[Placed], Step]] = {}
    for name, order in _both_ways(problem, _orders(problem, bound, effort)):
        placed = Placer(problem, order).place()
        if placed is not None:
            found[name] = placed, step_of(problem, placed)
    if not found:
        raise _no_room(problem, bound)
    best = min(found, key=lambda name: (round(found[name][1].ms, 6), len(found[name][0])))
    placed, step = found[best]
    sequential = sum(curve.least_ms * count for curve, count in zip(problem.curves, problem.layers, strict=True))
    sequential += found[_SEQUENTIAL][1].exposed_ms if _SEQUENTIAL in found else 0.0
    spindle_ms = found[_WAVES][1].ms if _WAVES in found else math.inf
    return WavePlan(graph, cluster, problem.devices, tuple(placed), step, bound.bound_ms, spindle_ms, sequential, best)


def _both_ways(problem: Problem, orders: Iterator[tuple[str, list[Piece]]]) -> Iterator[tuple[str, list[Piece]]]:
    """Where nobody reads from another also each order turned around: it decides whose gradients are added up last."""
    for name, order in orders:
        yield name, order
        if not problem.graph.edges:
            yield f"{name}, turned around", order[::-1]


def _orders(problem: Problem, bound: Relaxed, effort: int) -> Iterator[tuple[str, list[Piece]]]:
    """(name, pieces in order) of all that is placed and timed."""
    starts = {_WAVES: min(_spindle(problem), key=lambda found: _ms(problem, found))}
    starts["level-free"] = tidied(problem, level_free(problem, bound.metaop_ms))
    if problem.graph.edges:  # without them there is nothing behind a MetaOp
        starts["level-free, anew"] = tidied(problem, level_free(problem, bound.metaop_ms, anew=True))
    yield from starts.items()
    enough = bound.bound_ms * (1 + 1e-9)
    better = {name: improved(problem, start, effort, enough) for name, start in starts.items()}
    found = {f"{name}, improved": order for name, order in better.items()}
    name = min(better, key=lambda one: _ms(problem, better[one]))
    for seed in range(1, _AGAIN + 1):
        found[f"{name}, improved again {seed}"] = improved(problem, better[name], effort, enough, seed)
    found[f"{name}, with loans"] = improved(problem, starts[name], effort, enough, loans=True)
    for seed in range(1, _AGAIN + 1):
        best = min(found.values(), key=lambda one: _ms(problem, one))
        found[f"the best, with loans {seed}"] = improved(problem, best, effort, enough, seed, loans=True)
    yield from found.items()
    yield "whole", _whole(problem, bound)
    yield _SEQUENTIAL, _one_by_one(problem)


def _spindle(problem: Problem) -> Iterator[list[Piece]]:
    """The pieces of Spindle's waves under each pair of rules."""
    for sort in SORTS:
        for extension in EXTENSIONS:
            yield [piece for wave in waves(problem, sort, extension) for piece in wave]


def _whole(problem: Problem, bound: Relaxed) -> list[Piece]:
    """Each MetaOp in one piece, on as many devices as it has in the relaxed solution, rounded down: few devices hold
    its layers, so it may fit where nothing else does.
    """
    found = []
    for m in problem.graph.order:
        curve = problem.curves[m]
        low, _, _ = curve.neighbours(bound.metaop_ms[m] / problem.layers[m] * (1 + 1e-9))
        found.append(Piece(m, max(low, curve.widths[0]), problem.layers[m]))
    return found


def _one_by_one(problem: Problem) -> list[Piece]:
    """Each MetaOp in one piece, on the devices on which its layers take least time."""
    return [Piece(m, problem.curves[m].widths[-1], problem.layers[m]) for m in problem.graph.order]


def _ms(problem: Problem, pieces: Sequence[Piece]) -> float:
    return max(problem.times(pieces)[1])


def _no_room(problem: Problem, bound: Relaxed) -> FitsNoDevicesError:
    """Each MetaOp fits, but no order was found in which they fit together. Says what memory would do for one."""
    devices, room = problem.devices, problem.memory_bytes - problem.held_bytes
    states = {one.parameters: one.layers * one.state_bytes for one in problem.graph.metaops}
    total = sum(states.values()) + sum(one.layers * one.saved_bytes for one in problem.graph.metaops)
    largest = max(problem.graph.metaops, key=lambda one: one.layers * (one.state_bytes + one.saved_bytes))
    why = (
        f"no order was found that has room for it beside the others. All together take {total / 2**30:.2f} GiB or "
        f"more, and {devices} devices have {devices * room / 2**30:.2f}"
    )
    roomy = Problem(problem.graph, problem.cluster, devices, math.inf, problem.held_bytes)
    enough = min(_held_bytes(roomy, order) for order in (_whole(roomy, bound), _one_by_one(roomy)))
    gib = math.ceil(100 * enough / 2**30) / 100
    do = f"{gib:.2f} GiB for each device would do. Or plan for more devices, or for smaller batches"
    return FitsNoDevicesError(largest.name, why, do)


def _held_bytes(problem: Problem, order: Sequence[Piece]) -> float:
    """Of the fullest device, where no choice is taken back."""
    placer = Placer(problem, order)
    placer.place()
    return float(placer.used.max())
