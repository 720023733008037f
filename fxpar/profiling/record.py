"""From points to a cluster file: what the cost room predicts with, and beside it where that comes from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxpar.cost.cluster import MEASURED, ClusterSpec, usual_cluster
from fxpar.cost.device import Device
from fxpar.profiling.points import Point

VERSION = 1  # of the table MEASURED


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


def described(points: Sequence[Point], device: torch.device, nodes: int, world: int) -> ClusterSpec:
    """The cluster that was measured. Links that nobody could measure have usual figures."""
    links = {level: [point for point in points if point.of == level] for level in ("intra", "inter")}
    found = {level: fitted_link(mine) for level, mine in links.items() if mine}
    values = usual_cluster(world, world // nodes, device.type).to_json()
    values |= {f"{level}_gb_per_s": link.gb_per_s for level, link in found.items()}
    if found:
        values["latency_us"] = max(link.latency_us for link in found.values())
    return ClusterSpec.from_dict(values | {"device": _device(points, device, world // nodes).to_json()})


def _device(points: Sequence[Point], device: torch.device, local_world: int) -> Device:
    by_kind = {point.kind: [one for one in points if one.kind == point.kind] for point in points}
    dtypes = dict.fromkeys(point.of for point in by_kind["product"])
    best = {
        name: max(point.amount / point.seconds for point in by_kind["product"] if point.of == name) for name in dtypes
    }
    streams = [by_kind["copy"][-1], by_kind["add"][-1]]
    bandwidth = sum(point.amount for point in streams) / sum(point.seconds for point in streams)
    return Device(
        tflops={name: _short(rate / 1e12) for name, rate in best.items()},
        memory_gb_per_s=_short(bandwidth / 1e9),
        launch_us=_short(by_kind["launch"][0].seconds * 1e6),
        memory_gb=_short(memory_bytes(device, local_world) / 1e9),
    )


def memory_bytes(device: torch.device, local_world: int) -> float:
    """Of one device: on CPUs the ranks of a node share what there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_world


def file_content(cluster: ClusterSpec, points: Sequence[Point], device: torch.device, threads: int) -> dict[str, Any]:
    """What stands in the file: `ClusterSpec.from_dict` reads it, and leaves the table MEASURED alone."""
    kinds = ("send", "all_reduce", "all_gather")
    links: dict[str, dict[str, Any]] = {}
    for level in sorted({point.of for point in points} & {"intra", "inter"}):
        series = {kind: [p for p in points if (p.of, p.kind) == (level, kind)] for kind in kinds}
        links[level] = {kind: vars(fitted_link(mine)) for kind, mine in series.items()}
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
