"""What a gradient of a single number is a sum of, so that its rounding can be judged.

The gradient of a matrix is compared by its largest element, which is large where some element is. A single number may
be the sum of many terms that cancel, and is then as small as chance will have it, while its error is not: n terms t,
each off by a relative error of its own of standard deviation e, add up to an error of standard deviation
e * sqrt(sum t**2). Relative to that root the error of a single number is what the error of a matrix is relative to its
largest element.

A program that loses some of the terms is found all the same: what is missing is about the root of their squares.
Relative to the sum of the absolute terms, the bound for the worst case, half of 4,000 terms would be 1 %, and be let
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import tensor_metas, whole_meta
from fxpar.ops.traits import TAKES

aten = torch.ops.aten
_SAME = TAKES | {aten._to_copy.default}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}


def summed_terms(logical: LogicalGraph) -> dict[str, list[fx.Node]]:
    """The values that add up to each gradient of one number, by the FQN of its parameter; those that are no such sum
    are left out.
    """
    found: dict[str, list[fx.Node]] = {}
    for node, out in zip(logical.results, logical.outputs, strict=True):
        meta = whole_meta(node) if out.kind == "grad" else None
        if meta is not None and not isinstance(meta, tuple) and all(size == 1 for size in meta.shape):
            terms = _terms(node)
            if terms:
                found[out.fqn] = terms
    return found


def _terms(node: Any) -> list[fx.Node]:
    """Of the summands of a sum, or of the sums that are added up; none if it is made in another way."""
    while node.op == "call_function" and node.target in _SAME:
        node = node.args[0]
    if node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs:
        parts = [_terms(operand) if isinstance(operand, fx.Node) else [] for operand in node.args]
        return [term for part in parts for term in part] if all(parts) else []
    if node.op != "call_function" or node.target not in _SUMS:
        return []
    return [node.args[0]] if tensor_metas(node.args[0])[0] is not None else []


def squares(terms: list[Tensor]) -> Tensor:
    """The sum of the squares of all elements, a float64 scalar."""
    return torch.stack([term.double().square().sum() for term in terms]).sum()
