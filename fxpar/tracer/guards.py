"""What tracing took for granted about the dynamic dims: bounds are kept, anything else is an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from fxpar.errors import SpecializedShapeError
from fxpar.ir.graph import Dim, dim_symbol
from fxpar.torch_api.expressions import expression_classes
from fxpar.torch_api.symbolic import FakeWorld, Guard
from fxpar.tracer.provenance import is_user_file


def check_guards(world: FakeWorld, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The dims with the bounds that the guards of a trace imply; raises SpecializedShapeError for other guards.

    A bound is a comparison that is linear in one dim, such as `T <= 512` from a table of 512 positions.
    """
    named = {symbol: dim_symbol(name) for symbol, name in world.names().items()}
    bounds = {dim.symbol: dim for dim in dims}
    for guard in world.guards:
        condition = guard.condition.xreplace(named)
        if condition in (sympy.true, True) or _is_general(condition, guard):
            continue
        for part in sympy.And.make_args(condition):
            for one in _without_quotient(part, bounds):
                _narrow(one, bounds, guard)
    return tuple(bounds.values())


def _is_general(condition: sympy.Basic, guard: Guard) -> bool:
    """Whether torch only asked if some size is 0 or 1, and it is not.

    Inside torch such a question picks a shortcut; the general way that was traced gives the same at 1.
    """
    if guard.by_user:
        return False
    if isinstance(condition, sympy.Ne) and condition.rhs in (0, 1):
        return True
    return _holds(condition, _SAMPLES[1:])


def _without_quotient(condition: Any, bounds: dict[sympy.Symbol, Dim]) -> list[Any]:
    """`a // b + m == n` as what it means for b > 0: (n - m) b <= a < (n - m + 1) b, both linear where a and b are.

    Only what says something is left: nothing of `(4 * T - 1) // T == 3`, which holds for every T >= 1. It is left as it
    is if small sizes would be lost too: then the dim is all but fixed.
    """
    if not isinstance(condition, sympy.Eq):
        return [condition]
    left: Any = condition.lhs
    more, quotient = left.as_coeff_Add()
    number: Any = condition.rhs - more
    if _NAMES.get(quotient.func) != "torch.FloorDiv" or not number.is_Integer:
        return [condition]
    a, b = quotient.args
    meaning = (
        sympy.Gt(b, 0),
        sympy.Ge(sympy.expand(a - number * b), 0),
        sympy.Lt(sympy.expand(a - (number + 1) * b), 0),
    )
    parts = [part for part in meaning if part is not sympy.true]
    found = [bound for bound in map(_linear, parts) if bound is not None]
    fixes = any(low is not None and low > bounds[symbol].minimum for symbol, low, _ in found)
    return [condition] if fixes else parts


def _narrow(condition: sympy.Basic, bounds: dict[sympy.Symbol, Dim], guard: Guard) -> None:
    """Tighten `bounds` by one condition."""
    found = _linear(condition) or _another(condition, bounds)
    if found is None and isinstance(condition, _COMPARISONS) and _holds(condition, _sizes_for(condition, guard)):
        return
    found = found or _of_steps(condition)
    if found is None:
        names = " and ".join(sorted(map(str, condition.free_symbols))) or "a dim"
        raise SpecializedShapeError(names, str(condition), guard.place)
    symbol, low, high = found
    dim = bounds[symbol]
    place = guard.place if guard.asked_in is not None and is_user_file(guard.asked_in) else None
    of_call = guard.place if guard.asked_in is None else None
    if low is not None and low > dim.minimum:
        bounds[symbol] = dim = replace(dim, minimum=int(low), minimum_at=place, minimum_in=of_call)
    if high is not None and (dim.maximum is None or high < dim.maximum):
        bounds[symbol] = replace(dim, maximum=int(high), maximum_at=place, maximum_in=of_call)


_Bound = tuple[sympy.Symbol, int | None, int | None]  # dim, least, greatest


def _another(condition: sympy.Basic, bounds: dict[sympy.Symbol, Dim]) -> _Bound | None:
    """(dim, least, None) of `dim != n` where n is at most the least so far, such as `T != 1`; None for any other."""
    if not isinstance(condition, sympy.Ne) or len(condition.free_symbols) != 1:
        return None
    symbol: Any = next(iter(condition.free_symbols))
    left: Any = condition.lhs
    difference: Any = sympy.expand(left - condition.rhs)
    a, b = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
    if not a.is_number or a == 0 or sympy.expand(difference - a * symbol - b) != 0:
        return None
    least, excluded = bounds[symbol].minimum, sympy.Rational(-b, a)
    return (symbol, least + (excluded == least), None) if excluded <= least else None


_COMPARISONS = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
_SAMPLES = (*range(1, 257), *range(4096, 4096 + 64), *range(10**6, 10**6 + 64))


def _sizes_for(condition: sympy.Basic, guard: Guard) -> Sequence[int]:
    """Sizes that decide a condition. A remainder in a user's branch repeats with its divisor, so two periods are tried;
    none for periods that are too long, of which nothing is known, and none where fractions decide: `(T * 0.01 - 3) ** 2
    < 1e-9` may hold for a single size.
    """
    if guard.by_user and condition.has(sympy.Float):
        return ()
    period = math.prod({abs(int(n)) for n in condition.atoms(sympy.Integer) if n != 0})
    if not guard.by_user or 2 * period <= _SAMPLES[255]:
        return _SAMPLES
    return (*range(1, 2 * period + 1), *_SAMPLES[256:]) if period <= _LONGEST_PERIOD else ()


_LONGEST_PERIOD = 2048


def _holds(condition: sympy.Basic, sizes: Sequence[int]) -> bool:
    """Whether a condition on one dim holds for these sizes.

    Conditions are about rounded quotients and polynomials of the dim, such as `(T + 3) // 4 <= T`, so all small sizes
    and some large ones decide.
    """
    if not isinstance(condition, (*_COMPARISONS, sympy.Ne)) or len(condition.free_symbols) != 1:
        return False
    (symbol,) = condition.free_symbols
    return bool(sizes) and all(condition.subs(symbol, size) == sympy.true for size in sizes)


_LARGEST = 2**40  # of bounds that are searched
_GROWING = {"Add", "Max", "Min", "torch.Max", "torch.Min", "floor", "ceiling"}
_GROWING |= {"torch.ToFloat", "torch.TruncToInt", "torch.CeilToInt", "torch.FloorToInt"}
_DIVIDING = {"torch.FloorDiv", "torch.CleanDiv", "torch.IntTrueDiv", "torch.FloatTrueDiv"}
_POWERS = {"Pow", "torch.PowByNatural", "torch.FloatPow"}
_NAMES = {kind: name for name, kind in expression_classes().items()}


def _of_steps(condition: Any) -> _Bound | None:
    """(dim, least, greatest) of a comparison of a number with what never falls as the dim grows, such as `T // 8 > 3`,
    `T ** 2 <= 100`; None for any other.
    """
    if not isinstance(condition, _COMPARISONS) or len(condition.free_symbols) != 1:
        return None
    symbol: Any = next(iter(condition.free_symbols))
    greater, less = condition.gts, condition.lts
    from_below = less.is_number and _grows(greater)
    if not (from_below or (greater.is_number and _grows(less))):
        return None

    def holds(size: int) -> bool:
        return bool(condition.subs(symbol, size) == sympy.true)

    low, high = 0, 1
    while holds(high) != from_below and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) == from_below else (middle, high)
    return None if high >= _LARGEST or high == 1 else (symbol, high, None) if from_below else (symbol, None, low)


def _grows(expression: Any) -> bool:
    """Whether it is known not to fall as its one size, which is at least 1, grows."""
    if expression.is_Symbol:
        return True
    name, parts = _NAMES.get(expression.func), [part for part in expression.args if not part.is_number]
    if name in _POWERS or name in _DIVIDING:
        base, by = expression.args
        plain = name in _DIVIDING or base.is_Symbol or all(part.is_Symbol for part in base.args)
        return bool(by.is_number and by > 0 and plain and _grows(base))
    if name == "Mul":
        return len(parts) == 1 and all(part > 0 for part in expression.args if part.is_number) and _grows(parts[0])
    return name in _GROWING and all(map(_grows, parts))


def _linear(condition: Any) -> _Bound | None:
    """(dim, least, greatest) of a comparison `a * dim + b <= 0` in any form; None for any other condition."""
    if not isinstance(condition, _COMPARISONS):
        return None
    symbols = condition.free_symbols
    if len(symbols) != 1:
        return None
    symbol: Any = next(iter(symbols))
    greater: Any = condition.gts
    difference: Any = sympy.expand(greater - condition.lts)  # >= 0, or > 0
    a, b = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
    if not (a.is_number and b.is_number) or sympy.expand(difference - a * symbol - b) != 0 or a == 0:
        return None
    strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
    edge: Any = sympy.Rational(-b, a)  # dim > edge or dim < edge, or equal where not strict
    if a > 0:
        return symbol, math.floor(edge) + 1 if strict else math.ceil(edge), None
    return symbol, None, math.ceil(edge) - 1 if strict else math.floor(edge)
