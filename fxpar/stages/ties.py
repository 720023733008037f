"""Gradients of parameters that several stages hold: the sum that the graph makes of them, taken apart into terms."""

from __future__ import annotations

import torch
from torch import fx

_ADD = torch.ops.aten.add.Tensor


def terms(gradient: fx.Node) -> list[fx.Node]:
    """The summands of a gradient in the order in which they are added; the gradient itself if it is no plain sum.

    A sum is taken apart only where nothing else reads it, and only to the left, so that adding the terms up one by one
    gives the same bits.
    """
    found: list[fx.Node] = []
    node = gradient
    while (
        len(gradient.users) == 1
        and node.target is _ADD
        and not node.kwargs
        and all(isinstance(a, fx.Node) for a in node.args)
    ):
        left, right = node.args
        if not _same(node, left) or not _same(node, right):  # type: ignore[arg-type]
            break
        first = left if _earlier(left, right) else right  # type: ignore[arg-type]
        found.append(right if first is left else left)  # type: ignore[arg-type]
        if len(first.users) != 1:  # type: ignore[union-attr]
            node = first  # type: ignore[assignment]
            break
        node = first  # type: ignore[assignment]
    return [node, *reversed(found)]


def _same(node: fx.Node, term: fx.Node) -> bool:
    return term.meta.get("tensor") == node.meta["tensor"]


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
