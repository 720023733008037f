"""The loss must be a sum over valid tokens: check what the loss function returned, and undo a mean at its root.

Gradients of micro-batches of different sizes can be added up only if each is the gradient of a sum. A mean at the root
(through casts, views and constant factors) is replaced by the sum exactly. Any other mean is an error, and so is a
division by a number that depends on the batch (`fxpar.tracer.means`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import LossError, warn
from fxpar.losses import IGNORE_INDEX
from fxpar.torch_api.symbolic import hint
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.context import CaptureContext, Mean
from fxpar.tracer.counts import CASTS, SCALINGS, is_static, is_whole, out_of_place
from fxpar.tracer.means import check_sum

aten = torch.ops.aten
_IGNORING = {
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
}


def as_sum(loss: Any, context: CaptureContext) -> Tensor:
    """The loss as a sum over tokens. Raises LossError, MeanLossError."""
    _check_scalar(loss)
    node = node_of(loss)
    if node is None:
        raise LossError("a tensor that was not computed from the parameters and the batch")
    means = {mean.node: mean for mean in context.means}
    chain: list[fx.Node] = []
    root = node
    while root not in means and _is_scaling(root):
        chain.append(root)
        root = root.all_input_nodes[0]
    if root not in means:
        check_sum(node, means)
        return loss
    mean = means[root]
    total = node_of(mean.total)
    assert total is not None
    check_sum(total, means)
    _warn_of_other_scale(mean, context)
    return _replay(chain, mean, loss)


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
    """A cast, view or multiplication by a constant: exactly one node goes in, once."""
    if out_of_place(node.target) not in CASTS | SCALINGS or len(node.all_input_nodes) != 1:
        return False
    return isinstance(node.args[0], fx.Node) and not any(isinstance(arg, fx.Node) for arg in node.args[1:])


def _replay(chain: list[fx.Node], mean: Mean, loss: Tensor) -> Tensor:
    """The same casts and constant factors on the sum."""
    total = mean.total
    for node in reversed(chain):
        total = out_of_place(node.target)(total, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return total.view(loss.shape)


def _warn_of_other_scale(mean: Mean, context: CaptureContext) -> None:
    """Say so where one device's mean divides by something else than the valid tokens."""
    divisor = mean.divisor()
    if not isinstance(divisor, str):
        tokens, numbers = _tokens(context), hint(divisor)
        fixed = isinstance(divisor, int) and numbers > 1 and _is_dynamic(context)
        if tokens is not None and (numbers > tokens or fixed):
            divisor = f"all numbers that it averages, of the example {numbers} for {tokens} tokens"
        elif not mean.by_labels and _ignores_labels(mean):
            divisor = "all labels, those of -100 too"
        else:
            return
    where = f" at {mean.line}" if mean.line else ""
    warn(
        f"the loss is {mean.what}{where}, which divides by {divisor}. fxpar takes the sum and divides by the valid "
        "tokens of the mini-batch (labels that are not -100; all tokens without labels), so loss and gradients have "
        "another scale than on one device: return the sum times a factor of your own"
    )


def _ignores_labels(mean: Mean) -> bool:
    """Whether the losses averaged leave out labels of -100: something behind them compares with it."""
    todo = [node_of(mean.total)]
    seen = set(todo)
    while todo:
        node = todo.pop()
        assert node is not None
        if node.target in _IGNORING and IGNORE_INDEX in node.args:
            return True
        found = [source for source in node.all_input_nodes if source not in seen]
        seen.update(found)
        todo += found
    return False


def _tokens(context: CaptureContext) -> int | None:
    """How many tokens the example has; None if there are no token ids."""
    ids = _ids(context)
    return None if ids is None else math.prod(map(hint, ids.shape))


def _is_dynamic(context: CaptureContext) -> bool:
    """Whether a batch may have other numbers of tokens than the example: a mean over a fixed number is another one."""
    ids = _ids(context)
    return ids is not None and not is_static(ids)


def _ids(context: CaptureContext) -> Tensor | None:
    ids = next((t for t in context.batch.values() if t.dim() == 2 and is_whole(t) and t.dtype != torch.bool), None)
    return context.token_numbers if ids is None else ids
