"""Where the layers of a pipeline go: which position takes over how many."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from fxpar.cost.calls import NOMINAL_TOKENS
from fxpar.cost.polynomial import Polynomial


def spread_layers(positions: Sequence[tuple[Polynomial, Polynomial]], steps: Fraction) -> list[Polynomial]:
    """Seconds of the positions of a pipeline; each has some, and so many more for each step that it takes over.

    Every step goes to the position that is then the least slow one: no other choice has a faster slowest position.
    """
    taken = [Fraction(0)] * len(positions)
    seconds = [[float(one.at(NOMINAL_TOKENS)) for one in pair] for pair in positions]
    while steps > 0:
        here = min(range(len(positions)), key=lambda i: sum(seconds[i]))
        share = min(steps, Fraction(1))
        taken[here] += share
        seconds[here][0] += seconds[here][1] * float(share)
        steps -= share
    return [few + step * count for (few, step), count in zip(positions, taken, strict=True)]
