"""Batches of a list of lengths, as FlexSP makes them: in the order of the list, padded, without the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpar.errors import BatchRangeError


@dataclass(frozen=True)
class Batch:
    """`places` [K] of its sequences in the list and their padded `lengths` [K]; `dropped` ones were too long."""

    number: int
    places: np.ndarray
    lengths: np.ndarray
    dropped: int


def batches_of(lengths: np.ndarray, numbers: range, size: int, longest: int, devices: int) -> list[Batch]:
    """Batch i is `lengths[size * i : size * (i + 1)]` without those above `longest`, each padded up to a multiple of
    2 * `devices`: so every rank of every team has two equal parts, as balanced causal attention needs.

    Raises BatchRangeError for numbers that there are not, and for a batch without sequences.
    """
    text, there = f"{numbers.start}:{numbers.stop}", -(-len(lengths) // size)
    if not numbers:
        raise BatchRangeError(text, "the range is empty", "Write FIRST:END, such as 0:10")
    if numbers[-1] >= there:
        why = f"{len(lengths):,} lengths make {there:,} batches of {size:,}"
        raise BatchRangeError(text, why, f"Write at most 0:{there}")
    unit, found = 2 * devices, []
    for number in numbers:
        first = number * size
        mine = lengths[first : first + size]
        kept = np.flatnonzero(mine <= longest)
        if not len(kept):
            why = f"no sequence of batch {number} has at most {longest:,} tokens"
            raise BatchRangeError(text, why, "Give a larger --max-length, or leave it out")
        found.append(Batch(number, first + kept, -(-mine[kept] // unit) * unit, len(mine) - len(kept)))
    return found
