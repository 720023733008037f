"""What another package's rule may answer; `register_op` holds it to this, at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fxpar.errors import OpContractError
from fxpar.ir.dist_config import REDUCTIONS, OuterShard, Partial, Replicate, Shard
from fxpar.ops.traits import ask
from fxpar.rules.option import ABSENT, Factor, Option, OpView, Shape


def checked_rule(op: Any, rule: Callable[[OpView], Any]) -> Callable[[OpView], list[Factor]]:
    """`rule`, whose answers are looked at. It raises OpContractError for what are no loops of the call."""

    @functools.wraps(rule)
    def asked(view: OpView) -> list[Factor]:
        found = _several(op, "rule", ask(op, "rule", rule, view), Factor)
        for factor in found:
            _check_factor(op, view, factor)
        return found

    return asked


def checked_partials(op: Any, partials: Callable[[OpView], Any]) -> Callable[[OpView], list[Option]]:
    """`partials`, whose answers are looked at. It raises OpContractError for what are no options of the call."""

    @functools.wraps(partials)
    def asked(view: OpView) -> list[Option]:
        found = _several(op, "partials", ask(op, "partials", partials, view), Option)
        for option in found:
            for given, shapes, what in _sides(option.inputs, option.outputs, view):
                _check_count(op, option, given, shapes, what)
                for placement, shape in zip(given, shapes, strict=True):
                    if not _is_placement(placement, len(shape)):
                        raise OpContractError(str(op), f"its {option} has {placement!r}, no placement of {shape}")
        return found

    return asked


def _several(op: Any, argument: str, found: Any, kind: type) -> list[Any]:
    if not isinstance(found, list | tuple) or not all(isinstance(one, kind) for one in found):
        raise OpContractError(str(op), f"its {argument}= returned {found!r}, no list of {kind.__name__}s")
    return list(found)


def _sides(inputs: Any, outputs: Any, view: OpView) -> tuple[tuple[Any, tuple[Shape, ...], str], ...]:
    return (inputs, view.inputs, "operands"), (outputs, view.outputs, "results")


def _check_count(op: Any, what_is: object, given: Any, shapes: tuple[Shape, ...], what: str) -> None:
    if not isinstance(given, tuple) or len(given) != len(shapes):
        raise OpContractError(str(op), f"{what_is} is not for the {len(shapes)} {what} of this call: {given!r}")


def _check_factor(op: Any, view: OpView, factor: Factor) -> None:
    for given, shapes, what in _sides(factor.inputs, factor.outputs, view):
        _check_count(op, factor, given, shapes, what)
        words = (ABSENT, *REDUCTIONS) if what == "results" else ()
        for dim, shape in zip(given, shapes, strict=True):
            if dim is None or dim in words or (type(dim) is int and 0 <= dim < len(shape)):
                continue
            also = f", and no word of {', '.join(words)}" if words else ""
            raise OpContractError(str(op), f"{factor}: {dim!r} is not a dim of the shape {shape}{also}")


def _is_placement(given: Any, rank: int) -> bool:
    if isinstance(given, Partial):
        return given.op in REDUCTIONS
    return isinstance(given, Replicate) or (isinstance(given, Shard | OuterShard) and 0 <= given.dim < rank)
