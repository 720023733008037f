"""Arithmetic on symbolic sizes that is done once: tracing asks the same few hundred questions for every layer.

What this wraps (torch 2.13): SymNode, the object behind a SymInt or SymBool, whose operations torch calls one by one
from C++. An operation on two expressions has one result, so it is looked up. Nothing else is changed: what adds a
guard, and what is recorded by a trace, goes to torch's own methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

# Their results are functions of the two expressions.
_OPERATIONS = (
    *("add", "sub", "mul", "int_floordiv", "sym_max", "sym_min"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
)
# What a size compared with itself gives. Autograd compares the sizes of each gradient with those of its tensor, and a
# trace would write down each comparison, which nothing reads.
_OF_ITSELF = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
# Asked again each time, such as `mod`, for which torch looks at the known range of a size. What they give remembers: a
# single result that does not would hand on plain nodes to all that is computed from it.
_ASKED_AGAIN = ("mod", "int_truediv", "neg", "sym_not", "sym_sum")


class SizeNode(SymNode):
    """A SymNode that remembers results in its ShapeEnv, which has a `KnownResults` as `known`."""

    @property
    def expr(self) -> Any:
        """The expression, without asking whether it is a number while guards have replaced no symbol."""
        env: Any = self.shape_env
        return self._expr if env._replacements_version_counter == 0 else SymNode.expr.fget(self)  # type: ignore[attr-defined]

    def maybe_as_int(self) -> int | None:
        """The integer, if the expression is one; asked once while guards have replaced no symbol."""
        env: Any = self.shape_env
        if env._replacements_version_counter != 0:
            return super().maybe_as_int()
        known: dict[str, Any] = self.__dict__
        if "integer" not in known:
            known["integer"] = super().maybe_as_int()
        return known["integer"]

    def wrap_int(self, num: int) -> SymNode:
        """A constant of the same ShapeEnv."""
        known = known_results(self)
        if (int, num) not in known.constants:
            known.constants[int, num] = remembering(super().wrap_int(num))
        return known.constants[int, num]

    def wrap_bool(self, num: bool) -> SymNode:
        """A truth value of the same ShapeEnv."""
        known = known_results(self)
        if (bool, num) not in known.constants:
            known.constants[bool, num] = remembering(super().wrap_bool(num))
        return known.constants[bool, num]

    def _graph_repr(self) -> str:
        """What `str` and f-strings make of a size: the name of a symbol, of which code may ask if it is "300"."""
        env: Any = self.shape_env
        env.read_as_text()
        return super()._graph_repr()

    def guard_bool(self, file: str, line: int) -> bool:
        """The truth value; a guard unless it is known already."""
        return self._expr is sympy.true or (self._expr is not sympy.false and super().guard_bool(file, line))

    def expect_true(self, file: str, line: int) -> bool:
        """Whether it is true; a guard, or an assertion for the run, unless it is known already."""
        return self._expr is sympy.true or super().expect_true(file, line)


class KnownResults:
    """Results of operations on the sizes of one ShapeEnv, as long as no guard replaces a symbol."""

    def __init__(self) -> None:
        self.version = 0
        self.results: dict[Any, SymNode] = {}
        self.constants: dict[tuple[type, int], SymNode] = {}
        self.sizes: dict[Any, Any] = {}

    def at(self, version: int) -> KnownResults:
        """Itself, emptied if symbols have been replaced since."""
        if version != self.version:
            self.version = version
            self.results.clear()
            self.sizes.clear()
        return self


def known_results(node: SymNode) -> KnownResults:
    """What is known in the ShapeEnv of a size."""
    env: Any = node.shape_env
    return env.known.at(env._replacements_version_counter)


def remembering(node: SymNode) -> SymNode:
    """The same node, whose operations are remembered from now on."""
    if type(node) is SymNode:
        node.__class__ = SizeNode
    return node


def _remembered(name: str) -> Callable[[Any, Any], Any]:
    method = getattr(SymNode, name)

    same = _OF_ITSELF.get(name)

    def operation(self: Any, other: Any) -> Any:
        if get_proxy_mode() is not None:  # a trace writes down how each size was computed
            if same is not None and self.pytype is other.pytype is int and self._expr == other._expr:
                return self.wrap_bool(same)
            return method(self, other)
        results = known_results(self).results
        key = name, self._expr, self.pytype, other._expr, other.pytype
        found = results.get(key)
        if found is None:
            found = results[key] = remembering(method(self, other))
        return found

    operation.__name__ = name
    return operation


def _asked_again(name: str) -> Callable[..., Any]:
    method = getattr(SymNode, name)

    def operation(self: Any, *others: Any) -> Any:
        return remembering(method(self, *others))

    operation.__name__ = name
    return operation


for _name in _ASKED_AGAIN:
    setattr(SizeNode, _name, _asked_again(_name))
for _name in _OPERATIONS:
    setattr(SizeNode, _name, _remembered(_name))
