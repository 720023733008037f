"""Pieces in an order: when each begins on devices that are only counted, and what the last one ends at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from fxpar.waves.bound import Curve
from fxpar.waves.work import Devices, TaskGraph


class Piece(NamedTuple):
    """So many next layers of a MetaOp (its place in the graph) on `width` devices."""

    metaop: int
    width: int
    layers: int


class Problem:
    """A graph on devices, as numbers by place: curves, and what comes before and after; `sent_ms[m]` is what handing on
    the output of a layer takes one device for all of it, forward and backward, within a node and to another.
    """

    def __init__(self, graph: TaskGraph, devices: Devices) -> None:
        self.graph, self.devices = graph, devices
        self.curves = [Curve.of(one, devices.count) for one in graph.metaops]
        self.layer_ms = [curve.ms for curve in self.curves]
        self.layers = [one.layers for one in graph.metaops]
        self.before, self.after = graph.before, graph.after
        self.sent_ms = [
            tuple(2 * one.output_bytes * devices.ms_per_byte(within) for within in (True, False))
            for one in graph.metaops
        ]

    def handed_ms(self, metaop: int, width: int, to_width: int) -> float:
        """An estimate of what it takes to hand the output of a layer of `metaop` from one number of devices to others
        before it is known which: all bytes move, within a node if that has room for both.
        """
        between = max(width, to_width) > self.devices.per_node
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
        free, now = self.devices.count, 0.0
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
