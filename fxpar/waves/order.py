"""Pieces in an order: when each begins on devices that are only counted, and what the last one ends at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import FitsNoDevicesError, TaskGraphError
from fxpar.waves.bound import Curve
from fxpar.waves.work import TaskGraph


class Piece(NamedTuple):
    """So many next layers of a MetaOp (its place in the graph) on `width` devices."""

    metaop: int
    width: int
    layers: int


class Problem:
    """A graph on the first `devices` of a cluster (None: all), as plain numbers. By place of a MetaOp: curves, and what
    comes before and after; `sent_ms[m]` is what handing on the output of a layer takes one device for all of it,
    forward and backward, within a node and to another. `ms_per_byte` is what a device takes to send within its node,
    and to others. A device holds `memory_bytes`, of which `held_bytes` are taken; inf where nobody says it.

    Raises ClusterError for more devices than there are, TaskGraphError for a number that cannot be.
    """

    def __init__(
        self,
        graph: TaskGraph,
        cluster: ClusterSpec,
        devices: int | None = None,
        memory_bytes: float | None = None,
        held_bytes: float = 0.0,
    ) -> None:
        self.graph, self.cluster = graph, cluster
        self.devices = cluster.world if devices is None else devices
        cluster.require(self.devices)
        self.per_node = cluster.devices_per_node
        self.nodes = -(-self.devices // self.per_node)
        if memory_bytes is None:
            memory_bytes = cluster.sustained.memory_bytes or math.inf
        self.memory_bytes, self.held_bytes = memory_bytes, held_bytes
        for key, can_be in (
            ("devices", self.devices >= 1),
            ("memory_bytes", memory_bytes > 0),
            ("held_bytes", 0 <= held_bytes < math.inf),
        ):
            if not can_be:
                raise TaskGraphError(key, f"{getattr(self, key)!r} cannot be", "Write a number above 0")
        within, between = (1e-6 / float(cluster.bytes_per_s(one) / 10**9) for one in (False, True))
        self.ms_per_byte = within, between
        self.curves = [Curve.of(one, self.devices) for one in graph.metaops]
        self.layer_ms = [curve.ms for curve in self.curves]
        self.layers = [one.layers for one in graph.metaops]
        self.before, self.after = graph.before, graph.after
        self.sent_ms = [tuple(2 * one.output_bytes * rate for rate in self.ms_per_byte) for one in graph.metaops]

    def check_fits(self) -> None:
        """Raises FitsNoDevicesError for a MetaOp of which no allowed number of devices can run a layer."""
        for one in self.graph.metaops:
            allowed = [width for width in one.layer_ms if width <= self.devices]
            if not allowed:
                widths = " or ".join(map(str, sorted(one.layer_ms)[:6]))
                why = f"it runs on {widths} devices, and there are {self.devices}"
                raise FitsNoDevicesError(one.name, why, "Plan for more devices, or give it a time on fewer")
            least, held = min(one.state_bytes + one.saved_bytes / width for width in allowed), self.held_bytes
            if least + held > self.memory_bytes:
                why = f"one layer takes {least / 2**30:.2f} GiB of a device that has {self.memory_bytes / 2**30:.2f}"
                why += f", of which {held / 2**30:.2f} are taken" if held else ""
                raise FitsNoDevicesError(one.name, why, "Give each device more memory, or it a time on more devices")

    def handed_ms(self, metaop: int, width: int, to_width: int) -> float:
        """An estimate of what it takes to hand the output of a layer of `metaop` from one number of devices to others
        before it is known which: all bytes move, within a node if that has room for both.
        """
        between = max(width, to_width) > self.per_node
        return self.sent_ms[metaop][between] / min(width, to_width)

    def times(self, pieces: Sequence[Piece], limit: float = math.inf) -> tuple[list[float], list[float]]:
        """(starts, ends) in ms. A piece begins when the piece before it in the order has begun, what it reads from is
        done, and enough devices are free; it receives first, then runs. Where a piece ends after `limit`, it is the
        last one.
        """
        layer_ms, before, handed_ms = self.layer_ms, self.before, self.handed_ms
        done = [0.0] * len(before)
        last = [0] * len(before)  # width of the piece before
        running: list[tuple[float, int]] = []
        free, now = self.devices, 0.0
        starts, ends = [], []
        for metaop, width, layers in pieces:
            took = layers * layer_ms[metaop][width]
            if last[metaop]:
                if done[metaop] > now:
                    now = done[metaop]
                if last[metaop] != width:
                    took += handed_ms(metaop, last[metaop], width)
            else:
                for one in before[metaop]:
                    if done[one] > now:
                        now = done[one]
                    took += handed_ms(one, last[one], width)
            while running and (free < width or running[0][0] <= now):
                end, freed = heappop(running)
                free += freed
                if end > now:
                    now = end
            done[metaop] = end = now + took
            starts.append(now)
            ends.append(end)
            if end > limit:
                break
            last[metaop] = width
            free -= width
            heappush(running, (end, width))
        return starts, ends
