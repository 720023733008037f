"""From points to a cluster file: what the cost room predicts with, and beside it where that comes from."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxpar.cost.cluster import MEASURED, VERSION, ClusterSpec, measured_on, ranks_per_core, usual_cluster
from fxpar.cost.device import GPU, Device
from fxpar.errors import MeasuredElsewhereError
from fxpar.profiling.points import BACKWARD, BESIDE, LEAST_TRIALS, Point
from fxpar.profiling.trials import THIN_ROWS

FASTER = 1.5  # than memory: what a cache must be to count as one
FLAT = 1.5  # times as long, at the least, is what several times the tokens take where a device is busy


@dataclass(frozen=True)
class Link:
    """A latency and a bandwidth: a message of n bytes takes latency_us + n / bandwidth."""

    latency_us: float
    gb_per_s: float


def fitted_link(points: Sequence[Point]) -> Link:
    """The line through the points that has the least sum of squared relative errors; without a latency if that would be
    negative. ValueError without points.
    """
    if not points:
        raise ValueError("no points")
    nbytes, seconds = (np.array([getattr(point, name) for point in points]) for name in ("amount", "seconds"))
    columns = np.stack([1 / seconds, nbytes / seconds], 1)
    (latency_s, per_byte_s), *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
    if latency_s < 0 or per_byte_s <= 0:
        latency_s, per_byte_s = 0.0, float(np.sum(nbytes / seconds) / np.sum((nbytes / seconds) ** 2))
    return Link(_short(latency_s * 1e6), _short(1e-9 / per_byte_s))


def described(points: Sequence[Point], device: torch.device, nodes: int, world: int, threads: int = 1) -> ClusterSpec:
    """The cluster that was measured by ranks with so many threads each. Links that nobody could measure have usual
    figures. A link is what a rank gets of it while all ranks gather or scatter at the same time, as in steps,
    switches and reductions; what messages alone take only stands in the file.
    """
    gathers = [point for point in points if point.kind in ("all_gather", "reduce_scatter")]
    links = {level: [point for point in gathers if point.of == level] for level in ("intra", "inter")}
    found = {level: fitted_link(mine) for level, mine in links.items() if mine}
    values = usual_cluster(world, world // nodes, device.type).to_json()
    values |= {f"{level}_gb_per_s": link.gb_per_s for level, link in found.items()}
    if found:
        values["latency_us"] = max(link.latency_us for link in found.values())
    sums = [point for point in points if (point.kind, point.of) == ("all_reduce", "intra")]
    if sums:
        link = fitted_link(sums)
        values |= {"all_reduce_gb_per_s": link.gb_per_s, "all_reduce_latency_us": link.latency_us}
    return ClusterSpec.from_dict(values | {"device": _device(points, device, world // nodes, threads).to_json()})


def _device(points: Sequence[Point], device: torch.device, local_world: int, threads: int) -> Device:
    by_kind = {point.kind: [one for one in points if one.kind == point.kind] for point in points}
    rates = memory_rates([*by_kind["copy"], *by_kind["add"]])
    launch_us = _short(_launch_s(by_kind, device) * 1e6)
    bare = Device(tflops=1.0, launch_us=launch_us, **rates)
    forward, backward = (_half(by_kind, half, bare) for half in ("", BACKWARD))
    return Device(
        **forward,
        **{f"backward_{name}": figure for name, figure in backward.items()},
        launch_us=launch_us,
        memory_gb=_short(memory_bytes(device, local_world) / 1e9),
        shared_by=ranks_per_core(local_world, threads) if device.type == "cpu" else 1.0,
        overlap_slowdown=_overlap_slowdown(by_kind) if device.type == "cuda" else None,
        host_gb_per_s=_short(rates["memory_gb_per_s"] / 2 if device.type == "cpu" else _host_gb_per_s(by_kind)),
        **rates,
    )


def _half(by_kind: Mapping[str, Sequence[Point]], half: str, bare: Device) -> dict[str, Any]:
    """Figures of `Device` for products and attention, of the forward or of the BACKWARD; `bare` has those of memory and
    of kernels.
    """
    products, attention = by_kind[f"{half}product"], by_kind[f"{half}attention"]
    best: dict[str, float] = {}
    for point in products:
        best[point.of] = max(best.get(point.of, 0.0), point.amount / point.seconds)
    curves = {name: fitted_attention([point for point in attention if point.of == name]) for name in best}
    return {
        "tflops": {name: _short(rate / 1e12) for name, rate in best.items()},
        "attention_tflops": {name: _short(rate / 1e12) for name, (rate, _) in curves.items()},
        "attention_block": {name: _short(block) for name, (_, block) in curves.items()},
        "exposed_traffic": _exposed_traffic(by_kind.get(f"{half}thin product", []), best, bare),
    }


def _overlap_slowdown(by_kind: Mapping[str, Sequence[Point]]) -> float | None:
    """How much slower kernels and transfers are while they run beside each other: what the two take longer than the
    longer one, of the time of the shorter one. The worst level of links counts. Copies to the host slow
    nothing down: an H200 took 1.45 ms for a product and a copy of 1.2 ms beside it, and as long without.
    """
    products = {one.amount: one.seconds for one in by_kind["product"] if one.of == "bfloat16"}
    found = []
    for point in by_kind.get(BESIDE, []):
        largest = max((one for one in by_kind["all_gather"] if one.of == point.of), key=lambda one: one.size)
        if point.amount in products:
            alone = products[point.amount], largest.seconds * point.size / largest.size
            found.append(1 + (point.seconds - max(alone)) / min(alone))
    return _short(max(1.0, *found)) if found else GPU.overlap_slowdown


def _host_gb_per_s(by_kind: Mapping[str, Sequence[Point]]) -> float:
    """Each way, of the fastest copy. (A CPU is its own host: what is moved is read and written in the same memory.)"""
    return max(one.amount / one.seconds for one in by_kind["host copy"]) / 1e9


def _launch_s(by_kind: Mapping[str, Sequence[Point]], device: torch.device) -> float:
    """What a kernel takes beside its work. A GPU is given kernels ahead, so that starting them takes no time of it: the
    rest is where the line through the two largest copies, and that through the two largest sums, meets no bytes.
    """
    if device.type != "cuda":
        return by_kind["launch"][0].seconds
    found = []
    for kind in ("copy", "add"):
        *_, small, large = sorted(by_kind[kind], key=lambda point: point.amount)
        slope = (large.seconds - small.seconds) / (large.amount - small.amount)
        found.append(max(0.0, small.seconds - slope * small.amount))
    return statistics.mean(found)


def _exposed_traffic(points: Sequence[Point], best: Mapping[str, float], bare: Device) -> float | dict[str, float]:
    """By dtype, what thin products take beyond what is sure, in the time of reading and writing their rows: as kernels
    are priced (`fxpar.cost.calls`), which pay for their launch, their operations and their weights in full.
    """
    found: dict[str, list[float]] = {}
    for point in points:
        itemsize = getattr(torch, point.of).itemsize
        rows, weight = (width * point.size * itemsize for width in (THIN_ROWS, point.size))
        rows_s, weight_s = (float(nbytes / bare.bytes_per_s_of(nbytes)) for nbytes in (rows, weight))
        products = point.amount / (2 * THIN_ROWS * point.size**2)
        sure_s = point.amount / best[point.of] + products * (float(bare.launch_s) + weight_s)
        found.setdefault(point.of, []).append((point.seconds - sure_s) / (products * 2 * rows_s))
    return {name: _short(max(0.0, statistics.median(shares))) for name, shares in found.items()} or 0.0


def fitted_attention(points: Sequence[Point]) -> tuple[float, float]:
    """(operations per second, keys of a block) of the curve (tokens**2 + block * tokens) / rate through the points that
    has the least sum of squared relative errors. Short documents that take about as long as longer ones tell how long a
    GPU is about a kernel, whatever it does: they are left out.
    """
    points = sorted(points, key=lambda point: point.size)
    while len(points) >= LEAST_TRIALS and points[1].seconds < FLAT * points[0].seconds:
        points = points[1:]
    tokens, seconds = (np.array([float(getattr(point, name)) for point in points]) for name in ("size", "seconds"))
    columns = np.stack([tokens**2 / seconds, tokens / seconds], 1)
    (square, linear), *_ = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)
    if linear < 0 or square <= 0 or len(points) == 1:
        square, linear = float(np.sum(tokens**2 / seconds) / np.sum((tokens**2 / seconds) ** 2)), 0.0
    return float(points[0].amount / tokens[0] ** 2 / square), float(linear / square)


def memory_rates(points: Sequence[Point]) -> dict[str, float]:
    """What a device's memory sustains, and its cache, if small tensors are faster than the largest by half or more. The
    cache ends between the two sizes where the rate falls most.
    """
    sizes = sorted({point.size for point in points})
    rates = [_rate([point for point in points if point.size == size]) for size in sizes]
    found = {"memory_gb_per_s": _short(rates[-1] / 1e9)}
    if len(sizes) == 1 or max(rates) < FASTER * rates[-1]:
        return found
    falls = [one / other for one, other in itertools.pairwise(rates)]
    # Of falls that are about as large the last one: what is larger is as slow as the largest.
    last = max(number for number, fall in enumerate(falls) if fall > max(falls) ** 0.5)
    inside = _rate([point for point in points if point.size <= sizes[last]])
    edge = (sizes[last] * sizes[last + 1]) ** 0.5
    return found | {"cache_mb": _short(edge / 1e6), "cache_gb_per_s": _short(inside / 1e9)}


def _rate(points: Sequence[Point]) -> float:
    """The mean over points of bytes per second, by time."""
    return len(points) / sum(point.seconds / point.amount for point in points)


def memory_bytes(device: torch.device, local_world: int) -> float:
    """Of one device: on CPUs the ranks of a node share what there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_world


def file_content(cluster: ClusterSpec, points: Sequence[Point], device: torch.device, threads: int) -> dict[str, Any]:
    """What stands in the file: `ClusterSpec.from_dict` reads it, and leaves the table MEASURED alone."""
    kinds = ("send", "all_reduce", "all_gather", "reduce_scatter")
    links: dict[str, dict[str, Any]] = {}
    for level in sorted({point.of for point in points} & {"intra", "inter"}):
        series = {kind: [p for p in points if (p.of, p.kind) == (level, kind)] for kind in kinds}
        links[level] = {kind: vars(fitted_link(mine)) for kind, mine in series.items() if mine}
    assumed = [f"{level}_gb_per_s" for level in ("intra", "inter") if level not in links]
    about = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "torch": torch.__version__,
        "ranks": cluster.world,
        "threads": threads,
        "assumed": assumed if links else [*assumed, "latency_us"],
        "links": links,
        "points": [point.to_json() for point in points],
    }
    return {**cluster.to_json(), MEASURED: about}


def check_measured(path: str, device: torch.device) -> None:
    """See that a cluster file, if `fxpar profile` wrote it, is of such a device with this torch.

    Raises MeasuredElsewhereError, ClusterError.
    """
    found, here = measured_on(path), (device_name(device), torch.__version__)
    if found is not None and found != here:
        raise MeasuredElsewhereError(path, " with torch ".join(found), " with torch ".join(here))


def device_name(device: torch.device) -> str:
    """Of the kind of device, not of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _short(value: float) -> float:
    """Four digits say all that a measurement knows."""
    return float(f"{value:.4g}")
