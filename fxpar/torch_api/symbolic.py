"""Symbolic sizes: a fake mode whose dynamic dims have names, the guards that tracing takes, sizes as expressions.

What these wrap (torch 2.13): FakeTensorMode, ShapeEnv and its guards, torch's sympy functions.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fxpar.torch_api.fake_calls import RepeatingFakeMode
from fxpar.torch_api.since_2_13 import counting
from fxpar.torch_api.sizes import KnownResults, remembering

Place = Callable[[], str | None]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FAKE_IMPLS = os.path.join(_TORCH, "_subclasses", "fake_impls.py")
# Files that a condition goes through when it is decided; ours stand between those of torch.
_OURS = (__file__, os.path.join(os.path.dirname(__file__), "sizes.py"))
_SYMBOLIC = (os.path.join(_TORCH, "fx", "experimental", ""), torch.__file__, *_OURS)
_TORCHES = (_TORCH, *_OURS)


@dataclass(frozen=True)
class Guard:
    """A condition on symbolic sizes that tracing took for granted, and where ("file:line") it did."""

    condition: sympy.Basic
    place: str | None
    asked_in: str | None  # the file of Python code that decided it: the model's, or capture's; None inside torch

    @property
    def by_user(self) -> bool:
        """Whether it was decided outside of torch."""
        return self.asked_in is not None


# Functions that decide how a fake result lies in memory, which no captured value depends on.
_LAYOUT = {
    "is_contiguous",
    "is_contiguous_for_memory_format",
    "is_non_overlapping_and_dense_or_false",
    "compute_elementwise_output_logical_to_physical_perm",
    "compute_elementwise_output_strides",
    "_reshape_view_helper_core_alg",
}


def _asks_for_layout() -> bool:
    """Whether the condition that is being decided is about the memory layout of a fake tensor only."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCHES):
        if frame.f_code.co_name in _LAYOUT:
            return True
        frame = frame.f_back
    return False


def _asks_for_kernel() -> bool:
    """Whether the condition being decided chooses the kernel of a convolution, by whose layout a fake result is made:
    on a CPU another one for 16 rows or more.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "conv" and frame.f_code.co_filename == _FAKE_IMPLS


def _asked_in() -> str | None:
    """The file of Python code outside of torch (`if`, int(), range() ...) whose condition is being decided, if any."""
    frame, converted = sys._getframe(2), False
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLIC):
        # Python goes through SymBool.__bool__ and the like; C++ asks the symbolic node itself.
        converted = converted or frame.f_code.co_filename == torch.__file__
        frame = frame.f_back
    asked = converted and frame is not None and not frame.f_code.co_filename.startswith(_TORCH)
    return frame.f_code.co_filename if asked and frame is not None else None


class _RecordingShapeEnv(ShapeEnv):
    """A ShapeEnv that asks `place` for the user's line whenever it adds a guard, and does arithmetic on sizes once."""

    def __init__(self, place: Place) -> None:
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.place = place
        self.recorded: list[Guard] = []
        self.texts: dict[str, None] = {}
        self.known = KnownResults()
        self._at_one: dict[sympy.Basic, Any] = {}

    def create_symintnode(self, sym: sympy.Expr, *, hint: Any, source: Any = None) -> Any:
        """As of torch; the same object for the same expression, so that what is known of one is known of all."""
        sizes = self.known.at(self._replacements_version_counter).sizes
        if sym not in sizes:
            made = super().create_symintnode(sym, hint=hint, source=source)
            if isinstance(made, torch.SymInt):
                remembering(made.node)
            sizes[sym] = made
        return sizes[sym]

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        """As of torch; what is asked to choose a kernel binds no dim: the kernel is chosen again in every call.

        Where torch has asked whether a size is 1, it takes for known that it is not, and adds no guard when the model
        asks later: a model for which a size of 1 is another case gets its guard here.
        """
        count = len(self.recorded)
        with self.suppress_guards() if _asks_for_kernel() else nullcontext():
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
        if len(self.recorded) == count and self._is_other_at_one(orig_expr, result) and (file := _asked_in()):
            (symbol,) = orig_expr.free_symbols
            self.recorded.append(Guard(sympy.Gt(symbol, 1), self.place(), file))
        return result

    def read_as_text(self) -> None:
        """Keep the line of user code that makes a text of a size."""
        place, file = self.place(), _asked_in()
        if place is not None and file is not None and place.startswith(file):
            self.texts.setdefault(place)

    def _is_other_at_one(self, condition: sympy.Basic, result: Any) -> bool:
        """Whether a condition on one size has another truth value where the size is 1."""
        known = self._at_one.get(condition)
        if known is None:
            at_one = None
            if len(condition.free_symbols) == 1:
                with suppress(ZeroDivisionError):  # a remainder by T - 1
                    at_one = condition.subs(next(iter(condition.free_symbols)), 1)
            known = self._at_one[condition] = at_one if at_one in (sympy.true, sympy.false) else result
        return bool(known) != bool(result)

    def _log_guard(self, prefix: str, g: Any, forcing_spec: bool) -> None:
        if "suppressed" not in prefix and not _asks_for_layout():
            self.recorded.append(Guard(g, self.place(), _asked_in()))
        super()._log_guard(prefix, g, forcing_spec)


@dataclass
class FakeWorld:
    """One fake mode with named symbolic sizes. `place` gives the line of user code being traced."""

    place: Place
    symbols: dict[str, torch.SymInt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape_env: _RecordingShapeEnv = counting(_RecordingShapeEnv)(self.place)
        self.mode = RepeatingFakeMode(allow_non_fake_inputs=True, shape_env=self.shape_env)

    def symbol(self, name: str, hint: int) -> torch.SymInt:
        """The symbolic size called `name`; `hint` (at least 2) is its value where tracing needs one."""
        from torch._dynamo.source import ConstantSource  # a second of imports, for captures alone

        if name not in self.symbols:
            source = ConstantSource(name)
            symbol: Any = self.shape_env.create_symbol(
                hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self.shape_env.var_to_range[symbol] = ValueRanges(1, int_oo)
            value: Any = self.shape_env.create_symintnode(symbol, hint=hint, source=source)
            self.symbols[name] = value
        return self.symbols[name]

    def names(self) -> dict[sympy.Symbol, str]:
        """The symbol inside each symbolic size, and the size's name."""
        return {value.node._expr: name for name, value in self.symbols.items()}

    def named(self, size: Any) -> set[str]:
        """The names of the symbolic sizes that a size is made of."""
        names = self.names()
        return {names.get(symbol, str(symbol)) for symbol in getattr(self.expression(size), "free_symbols", ())}

    def in_names(self, text: str) -> str:
        """A message of torch with the names of sizes in the place of torch's symbols, such as s44."""
        names = {str(symbol): name for symbol, name in self.names().items()}
        return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), text)

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """A fake contiguous CPU tensor; the sizes are integers or symbolic sizes."""
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", requires_grad=requires_grad)

    @property
    def guards(self) -> list[Guard]:
        return self.shape_env.recorded

    @property
    def texts(self) -> list[str]:
        """Where ("file:line") user code has made a text of a size."""
        return list(self.shape_env.texts)

    @contextmanager
    def without_guards(self) -> Iterator[None]:
        """Inside the block conditions are decided as in the example, and nothing is kept of it."""
        count = len(self.guards)
        try:
            with self.shape_env.suppress_guards():
                yield
        finally:
            del self.guards[count:]

    def replacements(self) -> dict[sympy.Symbol, sympy.Expr]:
        """What guards have fixed a symbol to."""
        return dict(self.shape_env.replacements)

    def expression(self, value: Any) -> sympy.Expr | int | float | bool:
        """The expression of a symbolic number, or the number itself if it is none."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.expr
        return value


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the dynamic dims are; adds no guard."""
    return bool(statically_known_true(a == b))


def hint(size: int | torch.SymInt) -> int:
    """The value of a symbolic size in the example; adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


# ------------------------------------------------------------------- symbolic integers as calls on Python numbers
def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(call: Callable[..., Any], *args: Any) -> Any:
        result = args[0]
        for arg in args[1:]:
            result = call(function, result, arg)
        return result

    return apply


def _single(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, *args: call(function, *args)


_f = sympy_functions
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: _fold(operator.add),
    sympy.Mul: _fold(operator.mul),
    sympy.Pow: _single(operator.pow),
    _f.PowByNatural: _single(operator.pow),
    _f.FloatPow: _single(operator.pow),
    _f.FloorDiv: _single(operator.floordiv),
    _f.CleanDiv: _single(operator.floordiv),
    _f.Mod: _single(operator.mod),
    _f.PythonMod: _single(operator.mod),
    _f.Max: _fold(torch.sym_max),
    _f.Min: _fold(torch.sym_min),
    sympy.Max: _fold(torch.sym_max),
    sympy.Min: _fold(torch.sym_min),
    _f.IntTrueDiv: _single(operator.truediv),
    _f.FloatTrueDiv: _single(operator.truediv),
    _f.ToFloat: _single(torch.sym_float),
    _f.TruncToInt: _single(math.trunc),
    _f.CeilToInt: _single(math.ceil),
    _f.FloorToInt: _single(math.floor),
    _f.OpaqueUnaryFn_sqrt: _single(torch.sym_sqrt),
}


def function_of(expression: sympy.Expr) -> Callable[..., Any] | None:
    """How to compute a sympy node from its arguments: `apply(call, *args)`; None if it is not known."""
    return _FUNCTIONS.get(expression.func)
