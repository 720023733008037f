"""A training step of placed pieces: forward, backward in reverse, what is sent between them, and memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.waves.order import Problem
from fxpar.waves.place import Placed, overlap
from fxpar.waves.reduce import Reduction, reductions

FORWARD = 1 / 3  # of a layer's time; its backward takes twice as long


@dataclass(frozen=True)
class Run:
    """The forward or backward of a piece (its place in the plan): it receives from `start_ms` on, then computes from
    `begin_ms` to `end_ms`.
    """

    piece: int
    backward: bool
    start_ms: float
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Step:
    """All runs of a step in the order in which they start, the most that devices hold at a time, the time that each
    spends receiving, and what is added up of gradients.
    """

    runs: tuple[Run, ...]
    peak_bytes: tuple[float, ...]
    received_ms: tuple[float, ...]
    reductions: tuple[Reduction, ...] = ()

    @property
    def ms(self) -> float:
        return max(one.end_ms for one in (*self.runs, *self.reductions))

    @property
    def exposed_ms(self) -> float:
        """Of the reductions, what the step takes beyond its last run."""
        return self.ms - max(run.end_ms for run in self.runs)


@dataclass(frozen=True)
class _Job:
    """A run before it has a time: whose ends it awaits (places of jobs), and ms of receiving and computing."""

    devices: tuple[int, ...]
    awaits: tuple[int, ...]
    receive_ms: float
    compute_ms: float


def step_of(problem: Problem, placed: Sequence[Placed]) -> Step:
    """The shorter of two orders; if they are equal, the one that holds less.

    *Mirrored*: all forwards in the order of the plan, then all backwards in reverse. *Early*: whatever can start first
    does, so a task whose forward is done begins its backward beside the forward of others, and what it has saved is
    free earlier; of several that can start at the same time, a backward, then the one with the longest way to the end.
    """
    jobs = _jobs(problem, placed)
    found = [_step(problem, placed, jobs, order) for order in (range(len(jobs)), _early(problem, jobs))]
    return min(found, key=lambda step: (round(step.ms, 6), max(step.peak_bytes)))


def _jobs(problem: Problem, placed: Sequence[Placed]) -> list[_Job]:
    """Forwards in the order of the plan, then backwards in reverse: piece i has the jobs i and 2 * len - 1 - i."""
    count = len(placed)
    readers: list[list[int]] = [[] for _ in placed]
    for at, piece in enumerate(placed):
        for source in piece.sources:
            readers[source].append(at)
    jobs = []
    for piece in placed:
        receive = _transfer_ms(problem, piece.devices, [placed[one] for one in piece.sources], None)
        jobs.append(_Job(piece.devices, piece.sources, receive, _ms(problem, piece) * FORWARD))
    for at in reversed(range(count)):
        piece = placed[at]
        receive = _transfer_ms(problem, piece.devices, [placed[one] for one in readers[at]], piece.metaop)
        awaits = (at, *(2 * count - 1 - one for one in readers[at]))
        jobs.append(_Job(piece.devices, awaits, receive, _ms(problem, piece) * (1 - FORWARD)))
    return jobs


def _ms(problem: Problem, piece: Placed) -> float:
    return piece.layers * problem.curves[piece.metaop].ms[len(piece.devices)]


def _transfer_ms(
    problem: Problem, devices: tuple[int, ...], senders: Sequence[Placed], gradient_of: int | None
) -> float:
    """Until each of `devices` has its rows of what the senders have: as long as the device that receives or sends most
    takes. What travels is the senders' output, or the gradient of the output of a MetaOp.
    """
    spent = np.zeros(problem.devices)
    sent = np.zeros(problem.devices)
    into = np.array(devices)
    within, between = problem.ms_per_byte
    for sender in senders:
        if sender.devices == devices:
            continue
        source = np.array(sender.devices)
        size = problem.graph.metaops[sender.metaop if gradient_of is None else gradient_of].output_bytes
        same = into[:, None] // problem.per_node == source[None, :] // problem.per_node
        rate = np.where(into[:, None] == source[None, :], 0, np.where(same, within, between))
        ms = overlap(len(into), len(source)) * size * rate
        spent[into] += ms.sum(1)
        sent[source] += ms.sum(0)
    return float(max(spent.max(), sent.max()))


def _early(problem: Problem, jobs: Sequence[_Job]) -> list[int]:
    """Places of jobs in the order in which they start if each starts as soon as it can."""
    tails = [0.0] * len(jobs)
    for at in reversed(range(len(jobs))):  # whoever is awaited stands in front
        way = tails[at] + jobs[at].receive_ms + jobs[at].compute_ms
        for one in jobs[at].awaits:
            tails[one] = max(tails[one], way)
    free, ends = [0.0] * problem.devices, [0.0] * len(jobs)
    missing = [len(job.awaits) for job in jobs]
    readers: list[list[int]] = [[] for _ in jobs]
    for at, job in enumerate(jobs):
        for one in job.awaits:
            readers[one].append(at)
    ready = {at: 0.0 for at, count in enumerate(missing) if not count}
    order = []
    while ready:
        starts = {at: max(since, *(free[one] for one in jobs[at].devices)) for at, since in ready.items()}
        chosen = min(starts, key=lambda at: (starts[at], at < len(jobs) // 2, -tails[at], at))
        del ready[chosen]
        order.append(chosen)
        ends[chosen] = starts[chosen] + jobs[chosen].receive_ms + jobs[chosen].compute_ms
        for one in jobs[chosen].devices:
            free[one] = ends[chosen]
        for one in readers[chosen]:
            missing[one] -= 1
            if not missing[one]:
                ready[one] = max(ends[other] for other in jobs[one].awaits)
    return order


def _step(problem: Problem, placed: Sequence[Placed], jobs: Sequence[_Job], order: Sequence[int]) -> Step:
    """Each job in this order starts when what it awaits has ended and all of its devices are free."""
    free, ends = np.zeros(problem.devices), [0.0] * len(jobs)
    received = np.zeros(problem.devices)
    runs = []
    for at in order:
        job, devices = jobs[at], list(jobs[at].devices)
        start = max(float(free[devices].max()), *(ends[one] for one in job.awaits), 0.0)
        begin = start + job.receive_ms
        ends[at] = begin + job.compute_ms
        free[devices] = ends[at]
        received[devices] += job.receive_ms
        backward = at >= len(placed)
        runs.append(Run(2 * len(placed) - 1 - at if backward else at, backward, start, begin, ends[at]))
    runs.sort(key=lambda run: (run.start_ms, run.backward, run.piece))
    backwards = {run.piece: (run.begin_ms, run.end_ms) for run in runs if run.backward}
    peaks, sums = _peaks(problem, placed, runs), reductions(problem, placed, backwards)
    return Step(tuple(runs), peaks, tuple(map(float, received)), sums)


def _peaks(problem: Problem, placed: Sequence[Placed], runs: Sequence[Run]) -> tuple[float, ...]:
    """Bytes of each device at its fullest: what it holds in any plan, weights and their states all the time, what a
    forward saves from its start to the end of its backward.
    """
    count = problem.devices
    states = np.zeros(count)
    held: set[tuple[str, int, int]] = set()
    for piece in placed:
        metaop = problem.graph.metaops[piece.metaop]
        for device in piece.devices:
            new = {(metaop.parameters, layer, device) for layer in range(piece.first, piece.last)} - held
            states[device] += len(new) * metaop.state_bytes
            held |= new
    changes = []
    for run in runs:
        piece = placed[run.piece]
        saved = piece.layers * problem.graph.metaops[piece.metaop].saved_bytes / len(piece.devices)
        time, sign = (run.end_ms, -1) if run.backward else (run.start_ms, 1)
        changes.append((time, sign, saved, list(piece.devices)))
    now, peak = np.zeros(count), np.zeros(count)
    for _, sign, saved, devices in sorted(changes, key=lambda change: change[:2]):
        now[devices] += sign * saved
        peak = np.maximum(peak, now)
    return tuple(map(float, problem.held_bytes + states + peak))
