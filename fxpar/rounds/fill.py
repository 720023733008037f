"""Filling a layout: sequences, longest first, each to the team that would end first and has room for it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from fxpar.rounds.work import Filling, Work, longest_ms

SINGLE = 40  # of the longest sequences are screened one by one, the others in bundles
BUNDLES = 20


def screened(work: Work, members: np.ndarray, layouts: np.ndarray) -> np.ndarray:
    """[L] about how long a round with these sequences takes in each layout; inf where they cannot be in it.

    Teams of a degree count as one vessel: a sequence takes a team of its own as long as there is one, and stands behind
    the mean of the others then.
    """
    counts = layouts.T.astype(np.float64)  # [D, L]
    per_team = 1 / np.maximum(counts, 1)
    rooms = work.room[:, None] * counts
    work_ms = np.zeros_like(counts)
    used = np.zeros_like(counts)
    longest = np.zeros_like(counts)
    columns = np.arange(len(layouts))
    possible = np.ones(len(layouts), dtype=bool)
    for ms, tokens, single in _items(work, members):
        if single:
            ends = np.where(used < counts, 0.0, work_ms * per_team) + ms[:, None]
        else:
            ends = (work_ms + ms[:, None]) * per_team
        ends += work.fixed[:, None]
        ends[(rooms < tokens) | (counts == 0)] = np.inf
        row = ends.argmin(0)
        possible &= np.isfinite(ends[row, columns])
        added = np.where(np.isfinite(ms[row]), ms[row], 0.0)
        work_ms[row, columns] += added
        rooms[row, columns] -= tokens
        used[row, columns] += single
        if single:
            longest[row, columns] = np.maximum(longest[row, columns], added)
    taken = np.maximum(work_ms * per_team, longest) + work.fixed[:, None]
    found = np.where(work_ms > 0, taken, 0.0).max(0)
    return np.where(possible, found, np.inf)


def _items(work: Work, members: np.ndarray) -> list[tuple[np.ndarray, int, bool]]:
    """(what it adds by degree, its tokens, whether it is a single sequence), longest first."""
    found = [(work.ms[:, one], int(work.lengths[one]), True) for one in members[:SINGLE]]
    rest = members[SINGLE:]
    if len(rest):
        sums = np.cumsum(work.lengths[rest])
        parts = np.split(rest, np.searchsorted(sums, sums[-1] * np.arange(1, BUNDLES) / BUNDLES))
        found += [(work.ms[:, one].sum(1), int(work.lengths[one].sum()), False) for one in parts if len(one)]
    return found


def filled(work: Work, members: np.ndarray, counts: Sequence[int]) -> list[Filling] | None:
    """Teams of this layout (as many as `counts` says of each degree) with these sequences; None where a sequence has no
    room.
    """
    teams: list[Filling] = []
    heaps: list[tuple[int, float, list[tuple[float, int]]]] = []  # row, fixed, (load, number of team)
    for row, count in enumerate(counts):
        first = len(teams)
        teams += [Filling(row, float(work.fixed[row])) for _ in range(count)]
        heap = [(float(work.fixed[row]), number) for number in range(first, len(teams))]
        heapify(heap)
        if heap:
            heaps.append((row, float(work.room[row]), heap))
    rows = [row for row, _, _ in heaps]
    adds = work.ms[rows][:, members].T.tolist()
    for one, mine, tokens in zip(members.tolist(), adds, work.lengths[members].tolist(), strict=True):
        best, chosen = np.inf, -1
        for number, (_, room, heap) in enumerate(heaps):
            if mine[number] >= best or tokens > room:
                continue
            if teams[heap[0][1]].tokens + tokens > room and not _to_top(teams, heap, room - tokens):
                continue
            end = teams[heap[0][1]].load_ms + mine[number]
            if end < best:
                best, chosen = end, number
        if chosen < 0:
            return None
        heap = heaps[chosen][2]
        team = heap[0][1]
        teams[team].load_ms = best
        teams[team].tokens += tokens
        teams[team].members.append(one)
        heapreplace(heap, (best, team))
    return teams


def _to_top(teams: Sequence[Filling], heap: list[tuple[float, int]], most: float) -> bool:
    """Whether a team holds at most so many tokens. The first to end of those then stands first in the heap, and those
    before it are as if they ended with it: they are too full for all but shorter sequences.
    """
    full = []
    while heap and teams[heap[0][1]].tokens > most:
        full.append(heappop(heap))
    found = bool(heap)
    if not found:
        for one in full:
            heappush(heap, one)
        return False
    top = heap[0]
    for load, number in full:
        heappush(heap, (max(load, np.nextafter(top[0], np.inf)), number))
    return True


def best_filled(work: Work, members: np.ndarray, layouts: np.ndarray, tries: int) -> list[list[Filling]]:
    """Teams in those of the `tries` layouts that look best that have room, the shortest first."""
    looks = screened(work, members, layouts)
    order = [at for at in np.argsort(looks, kind="stable")[:tries] if np.isfinite(looks[at])]
    found = [teams for at in order if (teams := filled(work, members, layouts[at])) is not None]
    return sorted(found, key=longest_ms)
