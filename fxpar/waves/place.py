"""Which devices each piece runs on: by matching positions to devices, near what it reads and holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

from fxpar.errors import PieceOrderError
from fxpar.waves.order import Piece, Problem

_MOST_TRIES = 2000  # pieces that are placed anew because memory did not suffice


@dataclass(frozen=True)
class Placed:
    """A piece with its layers, `first` to `last` (not included), and devices in the order of its rows: device p of w
    has samples p/w to (p+1)/w of the batch. `sources` are the pieces (places in the order) that it receives from.
    """

    metaop: int
    first: int
    last: int
    devices: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def layers(self) -> int:
        return self.last - self.first


def overlap(width: int, source_width: int) -> np.ndarray:
    """[width, source_width] the share of the batch that position p of `width` has in common with q of the source."""
    low = np.maximum.outer(np.arange(width) / width, np.arange(source_width) / source_width)
    high = np.minimum.outer(np.arange(1, width + 1) / width, np.arange(1, source_width + 1) / source_width)
    return np.maximum(high - low, 0)


@dataclass
class Ground:
    """What stands on the devices while pieces are placed in their order: when each is free again, the bytes in use, and
    which layers of which weights are there.
    """

    free_at: np.ndarray
    used: np.ndarray
    holders: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def copy(self) -> Ground:
        holders = {key: set(found) for key, found in self.holders.items()}
        return Ground(self.free_at.copy(), self.used.copy(), holders)


class Placer:
    """Places the pieces of an order one after the other."""

    def __init__(self, problem: Problem, pieces: Sequence[Piece]) -> None:
        self.problem, self.pieces = problem, pieces
        self.starts, self.ends = problem.times(pieces)
        self.used = np.zeros(problem.devices)
        self.firsts, self.sources = _sources(problem, pieces)
        self.nodes = np.arange(problem.devices) // problem.per_node
        within, between = problem.ms_per_byte
        self.rates = np.where(self.nodes[:, None] == self.nodes[None, :], within, between)  # ms per byte, [D, D]
        np.fill_diagonal(self.rates, 0)

    def place(self) -> list[Placed] | None:
        """The pieces with devices; None if memory does not suffice, whichever choices are taken back (a few thousand
        are tried). A choice is taken back only where a later piece has no devices with enough memory. `used` has the
        bytes by device then.
        """
        count = self.problem.devices
        ground = Ground(np.zeros(count), np.full(count, float(self.problem.held_bytes)))
        found: list[Placed] = []
        waiting: list[tuple[Ground, Iterator[tuple[int, ...]]]] = []
        tries = 0
        while len(found) < len(self.pieces):
            if len(waiting) == len(found):
                waiting.append((ground, self._choices(ground, found)))
            ground, choices = waiting[-1]
            chosen = next(choices, None)
            tries += 1
            if chosen is None:
                waiting.pop()
                if not waiting or tries > _MOST_TRIES + len(self.pieces):
                    return None
                found.pop()
                continue
            ground, placed = self._put(ground, len(found), chosen)
            found.append(placed)
        self.used = ground.used
        return found

    def _put(self, ground: Ground, at: int, chosen: tuple[int, ...]) -> tuple[Ground, Placed]:
        """The ground with the piece on these devices."""
        piece, metaop = self.pieces[at], self.problem.graph.metaops[self.pieces[at].metaop]
        first = self.firsts[at]
        found = ground.copy() if np.isfinite(self.problem.memory_bytes) else ground
        where = list(chosen)
        found.free_at[where] = self.ends[at]
        found.used[where] += piece.layers * metaop.saved_bytes / piece.width
        for layer in range(first, first + piece.layers):
            holders = found.holders.setdefault((metaop.parameters, layer), set())
            found.used[[one for one in where if one not in holders]] += metaop.state_bytes
            holders.update(where)
        return found, Placed(piece.metaop, first, first + piece.layers, chosen, self.sources[at])

    def _choices(self, ground: Ground, found: Sequence[Placed]) -> Iterator[tuple[int, ...]]:
        """Devices for the next piece, best first: on as few nodes as have room, then by what it costs in ms. Where
        memory binds, the devices with most of it are the last choice.
        """
        at = len(found)
        piece, start = self.pieces[at], self.starts[at]
        free = np.flatnonzero(ground.free_at <= start + 1e-9 * max(start, 1.0))
        cost, room = self._costs(ground, found)
        free = free[room[free]]
        whole = self._whole_nodes(free, piece.width)
        ranked = []
        for where in whole:
            rows, columns = linear_sum_assignment(cost[:, where])
            spent = float(cost[rows, where[columns]].sum())
            ranked.append((round(spent, 9), len(where), tuple(int(one) for one in where[columns])))
        yield from (devices for _, _, devices in sorted(ranked))
        if np.isfinite(self.problem.memory_bytes) and len(free) >= piece.width:
            roomy = free[np.argsort(ground.used[free], kind="stable")[: piece.width]]
            yield tuple(int(one) for one in roomy[linear_sum_assignment(cost[:, roomy])[1]])

    def _whole_nodes(self, free: np.ndarray, width: int) -> list[np.ndarray]:
        """Free devices of each node that has `width` of them; if none has, of the fewest nodes that have together."""
        by_node = [free[self.nodes[free] == node] for node in range(self.problem.nodes)]
        whole = [one for one in by_node if len(one) >= width]
        if whole or len(free) < width:
            return whole
        by_node.sort(key=lambda one: -len(one))
        together = [np.concatenate(by_node[:count]) for count in range(1, len(by_node) + 1)]
        return [np.sort(next(one for one in together if len(one) >= width))]

    def _costs(self, ground: Ground, found: Sequence[Placed]) -> tuple[np.ndarray, np.ndarray]:
        """([W, D] ms of a position on a device, [D] whether it has room): what it receives, and the gradients of
        weights that are there already elsewhere, which it would have to add.
        """
        piece, graph = self.pieces[len(found)], self.problem.graph
        metaop, count = graph.metaops[piece.metaop], self.problem.devices
        cost = np.zeros((piece.width, count))
        for source in (found[one] for one in self.sources[len(found)]):
            rate = self.rates[list(source.devices)] * 2 * graph.metaops[source.metaop].output_bytes
            cost += overlap(piece.width, len(source.devices)) @ rate
        needed = np.full(count, piece.layers * metaop.saved_bytes / piece.width)
        for layer in range(self.firsts[len(found)], self.firsts[len(found)] + piece.layers):
            holders = ground.holders.get((metaop.parameters, layer), ())
            absent = np.ones(count, dtype=bool)
            absent[list(holders)] = False
            needed[absent] += metaop.state_bytes
            if holders:
                nearest = self.rates[list(holders)].min(0)
                cost += nearest * absent * (2 * metaop.reduced_bytes)
        room = ground.used + needed <= self.problem.memory_bytes
        return cost, room


def _sources(problem: Problem, pieces: Sequence[Piece]) -> tuple[list[int], list[tuple[int, ...]]]:
    """(first layers, places of the pieces that each receives from). Raises PieceOrderError."""
    names = [one.name for one in problem.graph.metaops]
    done = [0] * len(problem.layers)
    last: dict[int, int] = {}
    firsts, sources = [], []
    for at, piece in enumerate(pieces):
        begun = piece.metaop in last
        for one in () if begun else problem.before[piece.metaop]:
            if done[one] < problem.layers[one]:
                raise PieceOrderError(names[piece.metaop], f"begins before {names[one]!r}, which it reads, is done")
        sources.append((last[piece.metaop],) if begun else tuple(last[one] for one in problem.before[piece.metaop]))
        firsts.append(done[piece.metaop])
        done[piece.metaop] += piece.layers
        last[piece.metaop] = at
    for name, count, layers in zip(names, done, problem.layers, strict=True):
        if count != layers:
            raise PieceOrderError(name, f"has {layers} layers, and {count} of them run")
    return firsts, sources
