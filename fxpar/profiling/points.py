"""`Point`: one thing that was timed, and how: by all ranks at the same time, the slowest one counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

LEAST_RUNS, MOST_RUNS = 3, 50


@dataclass(frozen=True)
class Point:
    """`seconds` is a median. `kind` is product, copy, add, launch, send, all_reduce or all_gather; `of` the dtype of a
    product, "memory", "kernel", or the level of links: "intra" (a node) or "inter". `size` is the width of square
    matrices or the bytes of a tensor, `amount` the operations, the bytes read and written, or those that a rank sends.
    """

    kind: str
    of: str
    size: int
    amount: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """What will be a point: `prepare()` makes what is needed, and gives what does it `times` times."""

    kind: str
    of: str
    size: int
    amount: float
    prepare: Callable[[], Callable[[], object]]
    times: int = 1


def measured(
    series: Iterable[Iterator[Trial]], device: torch.device, seconds: float, say: Callable[[str], object]
) -> list[Point]:
    """The points of each series, whose trials become larger. About `seconds` are spent on each point: a trial that is
    expected to take longer ends its series, unless it is the first. All ranks call it with equal series.
    """
    points: list[Point] = []
    for trials in series:
        last: Point | None = None
        for trial in trials:
            if last is not None and last.seconds * trial.amount / last.amount > seconds:
                break
            say(f"{trial.kind} ({trial.of}), {trial.size:,}")
            taken = _slowest(_median_s(trial.prepare(), device, seconds)) / trial.times
            last = Point(trial.kind, trial.of, trial.size, trial.amount, taken)
            points.append(last)
    return points


def _median_s(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Of runs after the first one, as many on each rank as rank 0 can do in this time."""
    _timed(run, device)
    once = _timed(run, device)
    runs = _of_rank_0(max(LEAST_RUNS, min(MOST_RUNS, int(seconds / max(once, 1e-9)))))
    return statistics.median(_timed(run, device) for _ in range(runs))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    all_of_them = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(all_of_them, dist.ReduceOp.MAX)
    return float(all_of_them)


def _of_rank_0(count: int) -> int:
    if not dist.is_initialized():
        return count
    given = torch.tensor(count)
    dist.broadcast(given, src=0)
    return int(given)
