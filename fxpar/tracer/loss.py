"""The loss must be a sum over valid tokens: check what the loss function returned, and undo a mean at its root.

Gradients of micro-batches of different sizes can be added up only if each is the gradient of a sum. A mean at the root
(through casts, views and constant factors) is replaced by the sum exactly. Any other division by a number that depends
on the batch, on the way from the loss to the first op that is not a linear one, is an error.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import LossError, MeanLossError
from fxpar.ops.traits import MOVES, RELABELS
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.context import CaptureContext, Mean

aten = torch.ops.aten

_CASTS = RELABELS | {aten.clone.default, aten._to_copy.default, aten.neg.default}
_SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
# What a sum over tokens may be made of before the per-token losses are reached.
_LINEAR = (
    MOVES
    | _CASTS
    | {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.where.self,
        aten.index.Tensor,
        aten.mean.dim,
        operator.getitem,
    }
)
_MEANS = {aten.mean.default}


def as_sum(loss: Any, context: CaptureContext) -> Tensor:
    """The loss as a sum over tokens. Raises LossError, MeanLossError."""
    _check_scalar(loss)
    node = node_of(loss)
    if node is None:
        raise LossError("a tensor that was not computed from the parameters and the batch")
    means = {found: mean for mean in context.means if (found := node_of(mean.result)) is not None}
    chain: list[fx.Node] = []
    root = node
    while root not in means and _is_scaling(root):
        chain.append(root)
        root = root.all_input_nodes[0]
    if root in means:
        return _replay(chain, means[root], loss)
    _check_divisions(node, means)
    return loss


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        what = f"a {type(loss).__name__}"
        if hasattr(loss, "loss"):
            what += " (return its .loss)"
        elif isinstance(loss, (float, int)):
            what += " instead of a tensor"
        raise LossError(what)
    if loss.dim() != 0:
        raise LossError(f"a tensor of shape {tuple(loss.shape)}, not a scalar")
    if not loss.dtype.is_floating_point:
        raise LossError(f"a tensor of dtype {loss.dtype}, which has no gradient")
    if not loss.requires_grad:
        raise LossError("a tensor that does not depend on any trainable parameter (detached, or computed without grad)")


def _is_scaling(node: fx.Node) -> bool:
    """A cast, view or multiplication by a constant: exactly one node goes in."""
    if len(node.all_input_nodes) != 1:
        return False
    return node.target in _CASTS or (node.target in _SCALINGS and isinstance(node.args[0], fx.Node))


def _replay(chain: list[fx.Node], mean: Mean, loss: Tensor) -> Tensor:
    """The same casts and constant factors on the sum."""
    total = mean.total
    for node in reversed(chain):
        total = node.target(total, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return total.view(loss.shape)


def _check_divisions(loss: fx.Node, means: dict[fx.Node, Mean]) -> None:
    """Walk from the loss through linear ops and raise MeanLossError at a division by a count."""
    kinds: dict[fx.Node, set[str]] = {}
    todo, seen = [loss], {loss}
    while todo:
        node = todo.pop()
        if node in means:
            raise MeanLossError(f"{means[node].what} inside a larger expression", means[node].line)
        if node.target in _MEANS:
            raise MeanLossError("a mean over all elements", node.meta.get("source"))
        if node.target is aten.mean.dim and _is_over_dynamic(node):
            raise MeanLossError("a mean over a dynamic dim", node.meta.get("source"))
        follow: list[Any] = []
        if node.target in _LINEAR:
            follow = node.all_input_nodes
        elif node.target in _SCALINGS:
            follow = [a for a in node.args if isinstance(a, fx.Node)]
            divisor = node.args[1] if node.target in (aten.div.Tensor, aten.div.Scalar) else None
            if isinstance(divisor, fx.Node):
                follow = follow[:1]
                if _is_count(divisor, kinds):
                    raise MeanLossError(f"a division by {divisor.name!r}", node.meta.get("source"))
        elif node.target is aten.reciprocal.default and _is_count(node.args[0], kinds):
            raise MeanLossError("a multiplication by 1/count", node.meta.get("source"))
        for found in follow:
            if found not in seen:
                seen.add(found)
                todo.append(found)


def _is_over_dynamic(mean: fx.Node) -> bool:
    """Whether a mean over some dims takes in a dynamic one."""
    shape = mean.args[0].meta["val"].shape  # type: ignore[union-attr]
    return any(not isinstance(shape[d], int) for d in mean.args[1])  # type: ignore[union-attr]


def _is_count(node: Any, kinds: dict[fx.Node, set[str]]) -> bool:
    """Whether a number is made from the batch or from dynamic sizes alone: one value for the whole batch."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, Tensor) and math.prod(s if isinstance(s, int) else 2 for s in value.shape) != 1:
        return False
    return "param" not in (found := _made_of(node, kinds)) and bool(found)


def _made_of(node: fx.Node, kinds: dict[fx.Node, set[str]]) -> set[str]:
    """Which of "param", "batch", "size" the value of a node depends on."""
    todo, seen, found = [node], {node}, set()
    while todo:
        current = todo.pop()
        if current.op == "placeholder":
            found.add(current.meta.get("kind", "batch"))
        elif isinstance(current.meta.get("val"), (torch.SymInt, torch.SymFloat)):
            found.add("size")
            continue
        for source in current.all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    kinds[node] = found
    return found
