"""Whether a set of strategies can still be among the best: it is given up as soon as it is expected not to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 2  # mini-batches that are looked at before a set is given up
SURE = 0.02  # by so much a set must be expected to be slower then


@dataclass
class Doubt:
    """Whether a set can still take less than `must_s` in a mean mini-batch, of which `least_s` are what each takes at
    least: from the first FEW on, the others are expected to take as much longer than that as those that are planned.
    """

    least_s: Sequence[float]
    must_s: float
    sure_s: float | None = None  # seconds that a set which was given up is sure to take

    def rules_out(self, bounds_s: Sequence[float]) -> bool:
        """`bounds_s` are seconds that the first mini-batches take at least, whatever their plans."""
        return self._gives_up(bounds_s, 0.0 if len(bounds_s) == len(self.least_s) else SURE)

    def gives_up(self, took_s: Sequence[float]) -> bool:
        """`took_s` are the seconds of the mini-batches that are planned."""
        return FEW <= len(took_s) < len(self.least_s) and self._gives_up(took_s, SURE)

    def _gives_up(self, seconds: Sequence[float], margin: float) -> bool:
        least_s = sum(self.least_s[: len(seconds)])
        if least_s <= 0:
            return False
        sure_s = (1 - margin) * sum(seconds) / least_s * sum(self.least_s) / len(self.least_s)
        if not self.must_s <= sure_s < math.inf:  # no number where nothing is known of what it takes at least
            return False
        self.sure_s = sure_s
        return True
