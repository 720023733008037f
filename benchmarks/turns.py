"""Time and memory of several ways to do the same, which take turns, and whether they did the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def timed(run: Callable[[], object], steps: int, device: torch.device) -> tuple[float, float]:
    """(ms per step, peak MB) of `steps` steps; no MB on a CPU."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(steps):
            run()
        return 1e3 * (time.perf_counter() - begun) / steps, 0.0
    torch.cuda.reset_peak_memory_stats(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps, torch.cuda.max_memory_allocated(device) / 1e6


def cpu_ms_of_all(ways: Mapping[str, Callable[[], object]], steps: int, rounds: int) -> dict[str, list[float]]:
    """CPU ms per step of each way and round, summed over the ranks, which all call it."""
    ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            dist.barrier()
            begun = time.process_time()
            for _ in range(steps):
                run()
            spent = torch.tensor(time.process_time() - begun, dtype=torch.float64)
            dist.all_reduce(spent)
            ms[name].append(1e3 * float(spent) / steps)
    return ms


def in_turns(
    ways: Mapping[str, Callable[[], object]], steps: int, rounds: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """(ms, peak MB) of each way, which have run before: the median and the largest over rounds."""
    ms: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0.0)
    for _ in range(rounds):
        for name, run in ways.items():
            took, peak = timed(run, steps, device)
            ms[name].append(took)
            peaks[name] = max(peaks[name], peak)
    return {name: (statistics.median(ms[name]), peaks[name]) for name in ways}


def apart(found: Tensor, expected: Tensor) -> float:
    """Relative difference in the 2-norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def accept(what: str, error: float, tolerance: float) -> float:
    """`error`. Raises SystemExit if it is too large, or no number."""
    if not error <= tolerance:
        raise SystemExit(f"{what} is wrong by {error:.1e}, more than {tolerance:.0e}")
    return error
