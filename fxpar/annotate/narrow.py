"""Key and value heads that are fewer than the ranks of an axis: where a model computes them.

A rank of the tensor axis has one of the heads, and t/K ranks have the same one (see `narrow_attention`). So what makes
keys and values may be cut in K pieces instead of t, without being blamed for it: the projections, their weights, the
ops between them and attention, and the backward of all that. What queries need too (a fused projection) is not part
of it: it would be cut less for the sake of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fxpar.annotate.problem import AxisProblem, OpClass
from fxpar.ir.node_meta import input_kind
from fxpar.ops.traits import ATTENTION, is_product
from fxpar.rules.own_ops import narrow_attention


def _queries(op: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Operands that are queries, and results that are gradients of queries."""
    first = ATTENTION[op]
    return (first,), (0,) if first else ()


def _keys_values(op: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Operands that are keys and values, and results that are their gradients."""
    first = ATTENTION[op]
    return (first + 1, first + 2), (1, 2) if first else ()


def narrow_classes(problem: AxisProblem, is_meant: Callable[[OpClass], bool] = lambda _: True) -> dict[int, int]:
    """Classes that compute with fewer key and value heads than the axis has ranks; to each the number of its heads.
    Only attention that `is_meant` counts.
    """
    found: dict[int, int] = {}
    queries: set[int] = set()
    for entry in problem.classes:
        if entry.view.target not in ATTENTION or not is_meant(entry):
            continue
        if narrow_attention(entry.view, problem.degree) is None:
            continue
        operands, _ = _keys_values(entry.view.target)
        heads = entry.view.inputs[operands[0]][1]
        found.update(dict.fromkeys(_around(problem, entry, *_keys_values(entry.view.target)), heads))
        queries |= _around(problem, entry, *_queries(entry.view.target))
    return {index: heads for index, heads in found.items() if index not in queries}


def _around(problem: AxisProblem, entry: OpClass, operands: Iterable[int], results: Iterable[int]) -> set[int]:
    """Classes between these operands and the products that they come from, between these results and the products
    that they go to, and the products with their weights.
    """
    found: set[int] = set()
    todo = [producer for position in operands for producer, _ in entry.operands[position]]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            made = problem.classes[index]
            todo += (
                _weights(problem, made)
                if is_product(made.view.target)
                else [p for each in made.operands for p, _ in each]
            )
    values = {(entry.index, result) for result in results}
    todo = [user for user, position in entry.users if problem.classes[user].operands[position] & values]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            reader = problem.classes[index]
            todo += [] if is_product(reader.view.target) else [user for user, _ in reader.users]
    return found


def _weights(problem: AxisProblem, product: OpClass) -> list[int]:
    """Classes between a product and its weights, these included."""
    found: list[int] = []
    for producers in product.operands:
        way = [min(producers)[0]]
        while len(problem.classes[way[-1]].operands) == 1:
            way.append(min(problem.classes[way[-1]].operands[0])[0])
        if input_kind(problem.classes[way[-1]].nodes[0]) == "param":
            found += way
    return found
