"""Integers of a graph: each dynamic dim is read once, at the top, and all others are computed from these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import UnsupportedOpError
from fxpar.ir.graph import dim_symbol
from fxpar.ir.node_meta import size_of
from fxpar.torch_api.symbolic import FakeWorld, function_of

aten = torch.ops.aten


class SymInts:
    """Makes nodes for symbolic numbers at the top of a graph, one per expression.

    Placeholders must be in the graph already; `where` says which (placeholder, dim) to read each dim from.
    """

    def __init__(self, graph: fx.Graph, world: FakeWorld, where: Mapping[str, tuple[fx.Node, int]]) -> None:
        self._graph, self._world, self._where = graph, world, where
        self._symbols = {symbol: dim_symbol(name) for symbol, name in world.names().items()}
        self._nodes: dict[sympy.Basic, fx.Node | int | float] = {}
        self._last: fx.Node = next(reversed(graph.find_nodes(op="placeholder")))

    def expression(self, value: Any) -> Any:
        """A symbolic number in terms of the named dims; an integer stays one."""
        found = self._world.expression(value)
        if not isinstance(found, sympy.Basic):
            return found
        found = found.xreplace(self._symbols)
        if found.is_number:
            return int(found) if found.is_Integer else float(found)
        return found

    def node(self, value: Any) -> fx.Node | int | float:
        """The node that computes a symbolic number or an expression; the number itself if it is constant."""
        return self._emit(value if isinstance(value, sympy.Basic) else self.expression(value))

    def _emit(self, expression: Any) -> fx.Node | int | float:
        if not isinstance(expression, sympy.Basic):
            return expression
        known = self._nodes.get(expression)
        if known is None:
            known = self._nodes[expression] = self._make(expression)
        return known

    def _make(self, expression: Any) -> fx.Node | int | float:
        if expression.is_Integer:
            return int(expression)
        if expression.is_number:
            return float(expression)
        if expression.is_Symbol:
            placeholder, dim = self._where[expression.name]
            return self._call(expression, aten.sym_size.int, placeholder, dim)
        apply = function_of(expression)
        if apply is None:
            raise UnsupportedOpError(
                f"a size computed as {expression}", "Compute sizes with +, -, *, // and % from the sizes of inputs."
            )
        args = [self._emit(arg) for arg in expression.args]

        def call(function: Any, *operands: Any) -> Any:
            return self._call(None, function, *operands)

        result = apply(call, *args)
        if isinstance(result, fx.Node):
            result.meta["sym"] = expression
        return result

    def _call(self, expression: sympy.Expr | None, target: Any, *args: Any) -> fx.Node:
        with self._graph.inserting_after(self._last):
            node = self._graph.call_function(target, args)
        node.meta.update(fqn="", source=None, backward=False)
        node.meta["sym"] = expression if expression is not None else _evaluate(target, args)
        self._last = node
        return node


def _evaluate(target: Any, args: tuple[Any, ...]) -> Any:
    """The expression of a partial result, such as the first product of three factors."""
    import operator

    values = [size_of(a) if isinstance(a, fx.Node) else sympy.sympify(a, strict=True) for a in args]
    functions = {operator.add: sympy.Add, operator.mul: sympy.Mul}
    return functions[target](*values) if target in functions else None
