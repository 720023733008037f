"""Options on sub-axes: one for the outer, of `degree` ranks, inside of it one for the inner, which is what is left.

Both are options that the rule of the op has anyway: on the inner sub-axis every tensor is whole, or operands that are
terms of a sum pass through. So nothing new has to be proved of an op.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpar.ir.dist_config import OuterShard, P, Placement, R, Shard
from fxpar.rules.option import Option


def nest(outer: Option, inner: Option, degree: int) -> Option | None:
    """`outer` on a sub-axis of `degree`, `inner` on the rest; None where no placement says so."""
    pairs = (
        [_nested(o, i, degree) for o, i in zip(outer.inputs, inner.inputs, strict=True)],
        [_nested(o, i, degree) for o, i in zip(outer.outputs, inner.outputs, strict=True)],
    )
    inputs, outputs = ([p for p in placed if p is not None] for placed in pairs)
    if len(inputs) < len(outer.inputs) or len(outputs) < len(outer.outputs):
        return None
    return Option(tuple(inputs), tuple(outputs))


def _nested(outer: Placement, inner: Placement, degree: int) -> Placement | None:
    if outer == inner:  # as on the whole axis
        return outer
    if degree == 1:
        return inner
    if isinstance(outer, Shard) and not outer.sections and inner in (R, P):
        return OuterShard(outer.dim, degree, inner)  # type: ignore[arg-type]
    return None


def nest_all(outers: Iterable[Option], inners: Iterable[Option], degree: int) -> list[Option]:
    """Every outer option with every inner one, those that can be said."""
    inners = list(inners)
    nested = (nest(outer, inner, degree) for outer in outers for inner in inners)
    return [option for option in nested if option is not None]
