"""Gradients of a placed step: which devices add up which layers, and when, beside what still runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fxpar.waves.order import Problem
from fxpar.waves.place import Placed


@dataclass(frozen=True)
class Reduction:
    """The devices that hold layers `first` to `last` (not included) of the same `weights` add up their gradients: from
    `start_ms` on, when the first of these layers has all of them, to `end_ms`.
    """

    weights: str
    first: int
    last: int
    devices: tuple[int, ...]
    start_ms: float
    end_ms: float


def all_reduce_ms(problem: Problem, holders: Sequence[int], nbytes: float) -> float:
    """What adding up so many bytes on each holder takes: by rings within nodes, between which a node sends its sum over
    the links of all of its devices (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; by nodes first).
    """
    on_node = Counter(one // problem.per_node for one in holders)
    most, nodes = max(on_node.values()), len(on_node)
    within, between = problem.ms_per_byte
    between /= min(problem.per_node, problem.devices)
    return 2 * nbytes * ((most - 1) / most * within + (nodes - 1) / nodes * between)


def reductions(
    problem: Problem, placed: Sequence[Placed], backwards: Mapping[int, tuple[float, float]]
) -> tuple[Reduction, ...]:
    """Of all weights that several devices hold, in the order in which they begin. `backwards`: when the backward of
    each piece (its place) computes.

    A layer's gradients are added up as soon as the last backward of the step that makes one has left the layer. Links
    of a device within its node, and those of a node to others, carry one reduction at a time; what devices compute
    meanwhile takes no longer. (Parameter groups by the
    devices that use them: Spindle, arXiv 2409.03365, section 3.6.)
    """
    sharing: dict[str, list[int]] = defaultdict(list)
    for at, piece in enumerate(placed):
        sharing[problem.graph.metaops[piece.metaop].parameters].append(at)
    waiting: list[tuple[float, str, int, Reduction, float]] = []
    for weights, members in sharing.items():
        nbytes = problem.graph.metaops[placed[members[0]].metaop].reduced_bytes
        borders = sorted({end for at in members for end in (placed[at].first, placed[at].last)})
        for first, last in pairwise(borders if nbytes else ()):
            here = [at for at in members if placed[at].first <= first and last <= placed[at].last]
            holders = tuple(sorted({device for at in here for device in placed[at].devices}))
            if len(holders) > 1:
                ready, done = (
                    max(_left_ms(placed[at], layer, *backwards[at]) for at in here) for layer in (last - 1, first)
                )
                each = all_reduce_ms(problem, holders, nbytes)
                waiting.append((ready, weights, first, Reduction(weights, first, last, holders, ready, done), each))
    links, found = np.zeros(problem.devices + problem.nodes), []  # when each is free
    for ready, _, _, one, each in sorted(waiting, key=lambda wait: wait[:3]):
        mine = _links(problem, one.devices)
        start = max(ready, float(links[mine].max()))
        # Layers become ready evenly: they wait for the links from the first on, or the last one waits for nobody.
        end = max(start + (one.last - one.first) * each, one.end_ms + each)
        links[mine] = end
        found.append(Reduction(one.weights, one.first, one.last, one.devices, start, end))
    return tuple(found)


def _links(problem: Problem, holders: Sequence[int]) -> list[int]:
    """Places of devices, and behind them of their nodes, if there are several."""
    nodes = {one // problem.per_node for one in holders}
    return [*holders, *(problem.devices + node for node in nodes if len(nodes) > 1)]


def _left_ms(piece: Placed, layer: int, begin_ms: float, end_ms: float) -> float:
    """When the backward of a piece, which goes from its last layer to its first, has left a layer."""
    return begin_ms + (end_ms - begin_ms) * (piece.last - layer) / piece.layers
