"""Cut a plan into phases: what is packed, sent and unpacked together, so that staging memory stays bounded.

A *bucket* is a run of tensors in the order of the plan (the order of use), a *phase* is one step of a bucket. Two
phases are under way at a time: while one is on the wire, the next one is packed. Of a relayed plan the second hop of a
bucket comes after the first hop of the next bucket, so that both hops run at once. All of this follows from the plan
alone, so every rank finds the same phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fxpar.schedule.mini_batch import bucket_bytes
from fxpar.switch.plan import Box
from fxpar.switch.problem import SwitchProblem


@dataclass(frozen=True, eq=False)
class TransferPhase:
    """Rows of a plan that travel together; of every slice only part `part` of `parts`, which may be empty."""

    step: int
    bucket: int
    rows: np.ndarray
    part: int = 0
    parts: int = 1


def cut_phases(
    problem: SwitchProblem,
    table: np.ndarray,
    staging_bytes: int,
    most: np.ndarray | None = None,
    bucketed: bool = False,
) -> list[TransferPhase]:
    """The phases in the order in which all ranks go through them; `bucketed`: in several buckets though it would fit
    into one.

    `most` [tensors, steps] are the bytes that no rank exceeds, for a `table` of one rank's transfers; without, the
    table has those of all ranks.

    Phase n+1 is posted before phase n is complete; what a phase sends on, arrived at least two phases before, or in
    the one before if there is only one bucket.
    """
    tensors, loads = _of_table(problem, table) if most is None else _of_bound(most)
    if not len(tensors):
        return []
    limit = _limit(loads.sum(0), staging_bytes, bucketed)
    phases = []
    for number, bucket in enumerate(_buckets(problem, table, tensors, loads, limit, exact=most is None)):
        for step in bucket.steps:
            rows = bucket.rows[table["step"][bucket.rows] == step]
            phases.append(TransferPhase(step, number, rows, bucket.part, bucket.parts))
    return sorted(phases, key=lambda phase: (2 * phase.bucket + 3 * phase.step, phase.step))


def part_of(box: Box, part: int, parts: int) -> Box:
    """Part `part` of a box that is cut into `parts` along its longest dim."""
    if parts == 1:
        return box
    d = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    start, stop = box[d]
    size = stop - start
    return (*box[:d], (start + size * part // parts, start + size * (part + 1) // parts), *box[d + 1 :])


def _loads(table: np.ndarray, keys: np.ndarray, count: int, world: int) -> np.ndarray:
    """[count, steps, ranks]: bytes sent plus received per key (tensor or slice), step and rank."""
    steps = int(table["step"].max()) + 1
    place = (keys.astype(np.int64) * steps + table["step"]) * world
    total = np.bincount(place + table["src"], table["nbytes"], count * steps * world)
    total += np.bincount(place + table["dst"], table["nbytes"], count * steps * world)
    return total.reshape(count, steps, world)


def _of_table(problem: SwitchProblem, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tensors that travel, and what each of them makes ranks send and receive: [tensors, steps, ranks]."""
    tensors, which = np.unique(table["tensor"], return_inverse=True)
    return tensors, _loads(table, which, len(tensors), problem.world) if len(table) else np.zeros((0, 1, 1))


def _of_bound(most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same, where one number stands for all ranks."""
    tensors = np.flatnonzero(most.any(1))
    return tensors, most[tensors, :, None]


def _limit(whole: np.ndarray, staging_bytes: int, bucketed: bool) -> int:
    """Bytes that a rank may send and receive in one phase, of which two have memory at a time; `whole` [steps, ranks]
    is all that there is.
    """
    if whole.shape[0] == 1 and not bucketed:
        return staging_bytes // 2
    return bucket_bytes(int(whole.max()), staging_bytes // 2)  # hops overlap but for one bucket


@dataclass(frozen=True, eq=False)
class _Bucket:
    rows: np.ndarray
    steps: list[int]
    part: int = 0
    parts: int = 1


def _buckets(
    problem: SwitchProblem, table: np.ndarray, tensors: np.ndarray, loads: np.ndarray, limit: int, exact: bool
) -> Iterator[_Bucket]:
    """Tensors in order as long as they fit; one that does not fit comes in parts.

    A part has a piece of every slice, so that all senders stay busy; slice after slice they would wait in turn.
    """
    which = np.searchsorted(tensors, table["tensor"])
    by_tensor = which.argsort(kind="stable")
    ends = np.searchsorted(which[by_tensor], np.arange(len(tensors) + 1))

    def bucket(first: int, stop: int, part: int = 0, parts: int = 1) -> _Bucket:
        steps = np.flatnonzero(loads[first:stop].any((0, 2))).tolist()
        return _Bucket(np.sort(by_tensor[ends[first] : ends[stop]]), steps, part, parts)

    first, total = 0, np.zeros(loads.shape[1:])
    for number, load in enumerate(loads):
        alone = load.max() > limit
        if first < number and (alone or (total + load).max() > limit):
            yield bucket(first, number)
            first, total = number, np.zeros(loads.shape[1:])
        if alone:
            rows = table[by_tensor[ends[number] : ends[number + 1]]]
            count = _parts(problem, rows, limit) if exact else _parts_at_most(problem, tensors[number], load, limit)
            yield from (bucket(number, number + 1, part, count) for part in range(count))
            first = number + 1
        else:
            total = total + load
    if first < len(tensors):
        yield bucket(first, len(tensors))


def _parts_at_most(problem: SwitchProblem, tensor: int, load: np.ndarray, limit: int) -> int:
    """`_parts` where only a bound on the load is known."""
    ends = problem.classes[problem.class_of[tensor]].boxes
    longest = int((ends[:, :, 1] - ends[:, :, 0]).max(initial=1))
    return min(-(-int(load.max()) // max(limit, 1)), longest)


def _parts(problem: SwitchProblem, rows: np.ndarray, limit: int) -> int:
    """Into how many parts the slices of one tensor must be cut, so that the largest part of all together fits."""
    cls = problem.classes[problem.class_of[rows["tensor"][0]]]
    slices, which = np.unique(rows["slice"], return_inverse=True)
    loads = _loads(rows, which, len(slices), problem.world)
    ends = cls.boxes[slices]
    longest = (ends[:, :, 1] - ends[:, :, 0]).max(1, initial=1)
    parts = -(-int(loads.sum(0).max()) // max(limit, 1))
    while parts < longest.max():
        largest = -(-longest // parts) / longest  # share of a slice
        if np.einsum("s,sxr->xr", largest, loads).max() <= limit:
            break
        parts += 1
    return int(min(parts, longest.max()))
