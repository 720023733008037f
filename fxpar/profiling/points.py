"""`Point`: one thing that was timed, and how: by all ranks at the same time, the slowest one counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxpar.profiling.kept import Kept

ROUNDS, MOST_RUNS = 3, 1000
LEAST_TRIALS = 3  # of a series: a line or a curve goes through them
BESIDE = "product beside gathers"
BACKWARD = "backward "  # begins the kind of what only a backward does
SLOW = 10  # times what a point is given: no trial takes longer but the first, so that an emulated dtype holds nobody up


@dataclass(frozen=True)
class Point:
    """`seconds` is a median. `kind` is product, thin product or attention, with BACKWARD before it or not, copy, add,
    host copy, launch, send, all_reduce, all_gather, reduce_scatter, or a product beside gathers; `of` the dtype of a
    product, "memory", "both ways", "kernel", or the level of links: "intra" (a node) or "inter". `size` is the width of
    (square) matrices, the tokens of a document or the bytes of a tensor, `amount` the operations, the bytes read and
    written, or those that a rank sends.
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

    def words(self) -> str:
        """For who waits: `product in float32, 1,024 wide`, `all-reduce inside a node, 4,096 bytes`."""
        what = f"{self.kind.replace('_', '-')} {_OF.get(self.of, f'in {self.of}')}"
        return what + _SIZES.get(self.kind.split()[-1], ", {:,} bytes").format(self.size)


_OF = {
    "both ways": "both ways",
    "inter": "between nodes",
    "intra": "inside a node",
    "kernel": "of a kernel",
}
_SIZES = {  # by the last word of a kind
    "product": ", {:,} wide",
    "attention": ", {:,} tokens",
    "launch": "",
}


def measured(
    series: Iterable[Iterator[Trial]],
    device: torch.device,
    seconds: float,
    say: Callable[[str], object],
    known: Kept | None = None,
) -> list[Point]:
    """The points of each series, whose trials become larger. About `seconds` are spent on each point: a trial that is
    expected to take longer ends its series; one of the first LEAST_TRIALS only if that is SLOW times as long. All ranks
    call it with equal series.

    All points are measured ROUNDS times, one after the other, so that what else the machine does hits all alike; the
    median counts. What is `known` is not measured again. `say` is told which measurement of how many begins.
    """
    known = Kept() if known is None else known

    lists, begun = [list(trials) for trials in series], 0

    def taken_s(trial: Trial, number: int) -> float:
        nonlocal begun
        begun += 1
        what = f"(round {number} of {ROUNDS}) {trial.words()}"
        if what not in known.seconds:
            say(f"{begun} of {ROUNDS * sum(map(len, lists))} {what}")
            known.add(what, _taken_s(trial, device, seconds / ROUNDS))
        return known.seconds[what]

    kept: list[tuple[Trial, list[float]]] = []
    for trials in lists:
        mine: list[tuple[Trial, list[float]]] = []
        for trial in tuple(trials):
            if mine:
                last, (taken,) = mine[-1]
                most_s = seconds if len(mine) >= LEAST_TRIALS else SLOW * seconds
                if taken * trial.amount / last.amount > most_s:
                    del trials[len(mine) :]  # what is left to do becomes less
                    break
            mine.append((trial, [taken_s(trial, 1)]))
        kept += mine
    for number in range(2, ROUNDS + 1):
        for trial, found in kept:
            found.append(taken_s(trial, number))
    return [Point(one.kind, one.of, one.size, one.amount, statistics.median(found)) for one, found in kept]


def _taken_s(trial: Trial, device: torch.device, seconds: float) -> float:
    """Of the slowest rank: the mean of as many runs on each rank as rank 0 can do in this time, begun by all ranks
    together. One run is no measure: where ranks take turns on a core, it may fall into a turn.
    """
    run = trial.prepare()
    _timed(run, 1, device)
    once = _timed(run, 1, device)
    runs = _of_rank_0(max(1, min(MOST_RUNS, int(seconds / max(once, 1e-9)))))
    return _slowest(_timed(run, runs, device) if runs > 1 else once) / trial.times


def _timed(run: Callable[[], object], runs: int, device: torch.device) -> float:
    """Seconds of each of so many runs."""
    if dist.is_initialized():
        dist.barrier()
    begun = time.perf_counter()
    for _ in range(runs):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / runs


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
