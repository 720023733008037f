"""Gradients of parameters that several stages hold: the sum that the graph makes of them, taken apart into terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.ir.node_meta import whole_meta

_ADD = torch.ops.aten.add.Tensor


def terms(gradient: fx.Node) -> list[fx.Node]:
    """The summands of a gradient in the order in which they are added; the gradient itself if it is no plain sum.

    A sum is taken apart only where nothing else reads it, and only to the left, so that adding the terms up one by one
    gives the same bits.
    """
    found: list[fx.Node] = []
    node: Any = gradient
    while len(node.users) == 1 and node.target is _ADD and not node.kwargs:
        left, right = node.args
        if not (_same(node, left) and _same(node, right)):
            break
        first, second = (left, right) if _earlier(left, right) else (right, left)
        found.append(second)
        node = first
    return [node, *reversed(found)]


def _same(node: fx.Node, term: Any) -> bool:
    return isinstance(term, fx.Node) and whole_meta(term) == whole_meta(node)


def _earlier(left: fx.Node, right: fx.Node) -> bool:
    """Whether the left one is a sum, else whether it is computed first (a + b and b + a have the same bits)."""
    if (left.target is _ADD) != (right.target is _ADD):
        return left.target is _ADD
    return left < right


def sums(gradient: fx.Node, leaves: list[fx.Node]) -> set[fx.Node]:
    """The additions between a gradient and its terms."""
    found: set[fx.Node] = set()
    todo = [gradient] if gradient not in leaves else []
    while todo:
        node = todo.pop()
        found.add(node)
        todo += [n for n in node.all_input_nodes if n not in leaves and n not in found]
    return found
