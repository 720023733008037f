"""A planner of switches."""

from __future__ import annotations

import numpy as np

from fxpar.switch.problem import SwitchProblem
from fxpar.switch.transfers import joined, rows


def nearest(problem: SwitchProblem) -> np.ndarray:
    """Whoever lacks a slice gets it from the holder whose rank is next to its own."""
    parts = []
    for cls in problem.classes:
        for piece in np.flatnonzero(cls.missing.any(1)):
            holders, receivers = np.flatnonzero(cls.held[piece]), np.flatnonzero(cls.missing[piece])
            closest = np.abs(holders - receivers[:, None]).argmin(1)
            shape = (len(cls.members), 1, len(receivers))  # [tensors of the class, slices, receivers]
            src, dst = np.broadcast_to(holders[closest], shape), np.broadcast_to(receivers, shape)
            parts.append(rows(cls, np.array([piece]), src, dst, step=0))
    return joined(parts)
