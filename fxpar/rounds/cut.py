"""Cuts: sequences, longest first, into rounds of neighbours; which cuts are worth a closer look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from fxpar.rounds.work import Kinds, Work

Cut = tuple[int, ...]  # where rounds begin and the last one ends: 0 < ... < K

PLACES = 24  # of the tokens, evenly, between which rounds are cut
FIRST = 8  # of the longest sequences, behind each of which a round may end, too
TIMES = 96  # that a round may take, from which one is read off
WHOLE_ABOVE = 8  # teams of a degree, of which a round holds fewer, are counted as whole ones


def grid(work: Work) -> np.ndarray:
    """[G] where a round may begin or end, ascending from 0 to K."""
    count, tokens = len(work.lengths), np.cumsum(work.lengths)
    shares = tokens[-1] * np.arange(1, PLACES) / PLACES
    even = np.searchsorted(tokens, shares) + 1
    first = np.arange(1, FIRST + 1)
    return np.unique(np.concatenate([[0, count], even[even < count], first[first < count]]))


def times(work: Work) -> np.ndarray:
    """[Q] times a round may take, ascending: from what the shortest sequence takes to all in a row, and right above
    what each of the longest takes alone, as there more degrees become possible.
    """
    finite = work.ms[:, : 2 * FIRST] + work.fixed[:, None]
    alone = np.unique(finite[np.isfinite(finite)]) * (1 + 1e-9)
    least = float((work.ms[:, -1] + work.fixed).min())
    device_ms = (work.ms * np.array(work.degrees)[:, None]).min(0)
    most = 2 * float(work.fixed.max() + device_ms.sum() / work.devices) + float(finite.min(0).max())
    return np.union1d(np.geomspace(max(least, 1e-9), max(most, 2 * least, 1e-6), TIMES), alone)


def estimated(work: Work, places: np.ndarray) -> np.ndarray:
    """[G, G] about how long a round of the sequences from one place to another takes; inf where none can be.

    For each of `times` every sequence gets the degree at which it takes the fewest devices; each degree then needs as
    many as its time or its tokens ask for. The round takes the first time for which there are enough. Teams that are
    large beside the cluster are whole; what room they have left is filled with short sequences.
    """
    spans, kinds = times(work), Kinds.of(work)
    left = spans[:, None] - work.fixed[None, :]  # [Q, D] for sequences
    device_ms = kinds.ms * np.array(work.degrees)[:, None]
    weights = np.where(kinds.ms[None] <= left[..., None], device_ms[None], np.inf)
    best, bad = weights.argmin(1), np.isinf(weights.min(1))
    need = np.zeros((len(spans), len(places), len(places)))
    small, short, spare = (np.zeros_like(need) for _ in range(3))  # devices and tokens of small teams; room of others
    for row, degree in enumerate(work.degrees):
        mine = (best == row) & ~bad
        span = np.maximum(left[:, row], 1e-9)[:, None, None]
        taken_ms = kinds.between(np.where(mine, device_ms[row], 0.0), places)
        tokens = kinds.between(np.where(mine, kinds.lengths, 0), places)
        per_device = max(work.room[row] / degree, 1e-9)
        devices = np.maximum(taken_ms / span, tokens / per_device)
        if degree * WHOLE_ABOVE <= work.devices:
            small += np.where(tokens > 0, np.maximum(devices, degree), 0.0)
            short += tokens
            continue
        whole = np.ceil(devices / degree - 1e-9) * degree
        need += whole
        per_token = max(device_ms[row, -1] / kinds.lengths[-1], 1e-12)
        spare += np.minimum(whole * per_device - tokens, (whole * span - taken_ms) / per_token)
    need += small * np.maximum(0.0, 1 - spare / np.maximum(short, 1))
    need[kinds.between(bad, places) > 0] = np.inf
    need[:, places[:, None] >= places[None, :]] = np.inf
    return _first_time(spans, need, work.devices)


def _first_time(spans: np.ndarray, need: np.ndarray, devices: int) -> np.ndarray:
    """Where `need` [Q, ...] comes down to `devices`, on a line between two times unless it drops from far above."""
    enough = need <= devices
    at = enough.argmax(0)
    before = np.maximum(at - 1, 0)
    high = np.take_along_axis(need, before[None], 0)[0]
    low = np.take_along_axis(need, at[None], 0)[0]
    near = (at > 0) & (high < 1.2 * devices) & (high > low)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(near, (high - devices) / (high - low), 1.0)
    found = spans[before] + share * (spans[at] - spans[before])
    return np.where(enough.any(0), found, np.inf)


def cuts(work: Work, most_rounds: int, count: int) -> list[Cut]:
    """The best `count` by estimate of each number of rounds, up to `most_rounds`; the best first. Those that look more
    than a tenth longer than the best are left out.

    Dynamic programming over places and rounds that keeps several per place.
    """
    places = grid(work)
    table = estimated(work, places)
    last = len(places) - 1
    ending: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, (0,))], *([] for _ in range(last))]
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(most_rounds):
        longer: list[list[tuple[float, tuple[int, ...]]]] = [[] for _ in places]
        for at in range(1, last + 1):
            options: list[tuple[float, tuple[int, ...]]] = [
                (ms + float(table[path[-1], at]), (*path, at))
                for paths in ending[:at]
                for ms, path in paths
                if np.isfinite(table[path[-1], at])
            ]
            longer[at] = sorted(options)[:count]
        found += longer[last]
        ending = longer
    good = [one for one in sorted(found) if one[0] <= 1.1 * min(found)[0]]
    return [tuple(int(places[at]) for at in path) for _, path in good]


def all_cuts(work: Work) -> list[Cut]:
    """Of few sequences every one."""
    last = len(work.lengths)
    return [(0, *inner, last) for count in range(last) for inner in combinations(range(1, last), count)]


def rounds_of(cut: Cut) -> Sequence[tuple[int, int]]:
    """First sequence of each round, and the one behind its last."""
    return list(pairwise(cut))
