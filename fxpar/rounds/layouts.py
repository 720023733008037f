"""Layouts: how many teams of each degree a round has; and on which ranks they stand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

MOST_LAYOUTS = 2000  # that are tried one by one: all binary partitions of 64 devices are 1,828


def count_layouts(devices: int, degrees: Sequence[int]) -> int:
    """How many layouts use the devices as far as the degrees allow, or some more: those with every sum count."""
    ways = [1] + [0] * devices
    for degree in degrees:
        for total in range(degree, devices + 1):
            ways[total] += ways[total - degree]
    return ways[devices] if min(degrees) == 1 or devices % min(degrees) == 0 else sum(ways)


@lru_cache(maxsize=32)
def all_layouts(devices: int, degrees: tuple[int, ...], devices_per_node: int) -> np.ndarray:
    """[L, D] number of teams of each degree (largest first), of all layouts to which no team can be added and that can
    be placed. More teams never make a round longer.
    """
    found: list[tuple[int, ...]] = []
    smallest = degrees[-1]

    def extend(rest: int, row: int, counts: tuple[int, ...]) -> None:
        if row == len(degrees) - 1:
            found.append((*counts, rest // smallest))
            return
        for count in range(rest // degrees[row], -1, -1):
            extend(rest - count * degrees[row], row + 1, (*counts, count))

    extend(devices, 0, ())
    if not _always_placed(degrees, devices_per_node):
        found = [one for one in found if place(one, degrees, devices, devices_per_node)]
    return np.array(found, dtype=np.int64).reshape(-1, len(degrees))


def _always_placed(degrees: Sequence[int], devices_per_node: int) -> bool:
    """Powers of two, the largest first, stand on multiples of themselves."""
    return all(size & (size - 1) == 0 for size in (*degrees, devices_per_node))


def place(counts: Sequence[int], degrees: Sequence[int], devices: int, devices_per_node: int) -> list[list[int]] | None:
    """First rank of each team by row of `degrees` (largest first), so that no team of up to a node's devices stands on
    two nodes; None if that cannot be. Larger ones begin a node; smaller ones go to the first node with room.
    """
    rests = [min(devices_per_node, devices - first) for first in range(0, devices, devices_per_node)]
    found: list[list[int]] = []
    node = 0
    for count, degree in zip(counts, degrees, strict=True):
        firsts: list[int] = []
        at = 0  # teams of a degree go to later and later nodes
        for _ in range(count):
            if degree > devices_per_node:
                first, left = node * devices_per_node, degree
                while left:
                    if node == len(rests):
                        return None
                    taken = min(left, rests[node])
                    rests[node] -= taken
                    left -= taken
                    node += 1
            else:
                while at < len(rests) and rests[at] < degree:
                    at += 1
                if at == len(rests):
                    return None
                first = min((at + 1) * devices_per_node, devices) - rests[at]
                rests[at] -= degree
            firsts.append(first)
        found.append(firsts)
    return found


def placeable(counts: Sequence[int], degrees: Sequence[int], devices: int, devices_per_node: int) -> tuple[int, ...]:
    """The layout without as many of its smallest teams as have no place, and with teams on devices that are left: the
    largest first, of up to a node.
    """
    found = list(counts)

    def fits() -> bool:
        return place(found, degrees, devices, devices_per_node) is not None

    while not fits():
        found[max(row for row, count in enumerate(found) if count)] -= 1
    for row, degree in enumerate(degrees):
        left = devices - sum(n * d for n, d in zip(found, degrees, strict=True))
        for _ in range(left // degree if degree <= devices_per_node else 0):
            found[row] += 1
            if not fits():
                found[row] -= 1
                break
    return tuple(found)
