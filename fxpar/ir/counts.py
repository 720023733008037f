"""Sizes that an op decides at run time, as expressions: how many copies of tokens a rank sends, or receives."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import sympy


class RunCount(sympy.Function):
    """RunCount(balanced, bound, number): a size that is known at run time. `balanced` is what it is in the mean, in the
    dynamic dims, `bound` what it is at most; counts with the same `number` are equal. With numbers for the dynamic dims
    it becomes what it is in the mean, so that memory and costs are those of balanced routes.
    """

    nargs = 3
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, *args: Any) -> Any:
        return args[0] if args[0].is_number else None

    @property
    def bound(self) -> sympy.Expr:
        """What it is at most."""
        return self.args[1]  # type: ignore[return-value]

    def _sympystr(self, printer: Any) -> str:
        return f"count{self.args[2]}"


def run_count(balanced: Fraction, bound: int, rows: Any, number: int) -> Any:
    """Of `rows` (a size) each counts `balanced` times in the mean and `bound` times at most."""
    return RunCount(rows * sympy.Rational(balanced.numerator, balanced.denominator), rows * bound, number)
