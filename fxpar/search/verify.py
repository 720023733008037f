"""A prediction held against a run: what plans took, and by which factor each kind of cost was misjudged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SHARE = 0.02  # of the predicted time: less of a kind than that says nothing about it


@dataclass(frozen=True)
class StepSeconds:
    """Of one mini-batch under a plan: predicted on devices alone (products, memory, the optimizer) and beside that on
    links (collectives, what is waited for of switches and reductions), and measured.
    """

    compute_s: float
    link_s: float
    measured_s: float


@dataclass(frozen=True)
class VerifiedPlan:
    """What a plan took, over the mini-batches that it was predicted for."""

    steps: tuple[StepSeconds, ...]

    @property
    def predicted_s(self) -> float:
        return self._mean([step.compute_s + step.link_s for step in self.steps])

    @property
    def measured_s(self) -> float:
        """A mean step."""
        return self._mean([step.measured_s for step in self.steps])

    def refitted_s(self, factors: Factors) -> float:
        """What is predicted with other factors."""
        return self._mean([factors.compute * step.compute_s + factors.link * step.link_s for step in self.steps])

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)


@dataclass(frozen=True)
class Factors:
    """By what to multiply predictions of a kind; None where the runs say nothing about it, so that it stays."""

    compute: float
    link: float
    fitted: tuple[str, ...]


def refit(plans: Sequence[VerifiedPlan]) -> Factors:
    """The two factors with the least squares of errors over all mini-batches of all plans. Where there is hardly any of
    a kind, or the fit leaves it nothing, one factor stands for both: the measured time over the predicted one.
    """
    steps = [step for plan in plans for step in plan.steps]
    parts = np.array([[step.compute_s, step.link_s] for step in steps])
    measured = np.array([step.measured_s for step in steps])
    shares = parts.sum(axis=0) / parts.sum()
    if (shares > LEAST_SHARE).all() and np.linalg.matrix_rank(parts, tol=1e-3 * parts.max()) == 2:
        found = np.linalg.lstsq(parts, measured, rcond=None)[0]
        if (found > 0).all():
            return Factors(float(found[0]), float(found[1]), ("compute", "link"))
    both = float(measured.sum() / parts.sum())
    return Factors(both, both, ("compute and link alike",))


def order_of(seconds: Sequence[float]) -> list[int]:
    """Indices, fastest first."""
    return sorted(range(len(seconds)), key=lambda index: (seconds[index], index))
