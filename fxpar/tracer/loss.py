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
from fxpar.ir.graph import Averaged
from fxpar.ir.node_meta import source_of
from fxpar.torch_api.symbolic import hint, known_equal
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.context import CaptureContext, Mean
from fxpar.tracer.counts import CASTS, SCALINGS, is_of_parameters, is_static, is_whole, out_of_place
from fxpar.tracer.means import check_sum, no_sum


def as_sum(loss: Any, context: CaptureContext) -> tuple[Tensor, Averaged | None]:
    """The loss as a sum over tokens, and the mean that it was. Raises LossError, MeanLossError."""
    _check_scalar(loss)
    node = node_of(loss)
    if node is None:
        raise LossError("a tensor that was not computed from the parameters and the batch")
    means = {mean.node: mean for mean in context.means if not is_of_parameters(mean.node)}
    chain: list[fx.Node] = []
    root = node
    while root not in means and _is_scaling(root):
        chain.append(root)
        root = root.all_input_nodes[0]
    if root not in means:
        check_sum(node, means)
        _tell_no_sum(node)
        return loss, None
    mean = means[root]
    total = node_of(mean.total)
    assert total is not None
    check_sum(total, means)
    return _replay(chain, mean, loss), _averaged(mean, context)


def _tell_no_sum(loss: fx.Node) -> None:
    """Say what becomes of a loss that is neither a sum nor a mean: what each batch returns is one term."""
    node = no_sum(loss)
    if node is not None:
        line = source_of(node)
        warn(
            f"the loss is neither a sum over tokens or rows nor a mean of them: `{str(node.target).split('.')[1]}`"
            f"{f' at {line}' if line else ''} makes one number of all. fxpar runs each sequence or batch, adds up what "
            "they return, and divides by the valid tokens of the mini-batch, or by its rows: another scale than on one "
            "device. Pass train_step(denominator=the number of sequences or batches) for their mean"
        )


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


def _averaged(mean: Mean, context: CaptureContext) -> Averaged:
    """The mean in words; says so where one device's mean divides by something else than tokens."""
    divisor, tokens = mean.divisor(), _tokens(context)
    words = f"{mean.what} at {mean.line}" if mean.line else mean.what
    if not isinstance(divisor, str):
        rows = counted_rows(context) if tokens is not None else _rows(context)
        if rows is not None and known_equal(divisor, rows):
            return Averaged(words)
        by_labels = mean.by_labels and rows is None  # others than `labels` are not counted
        if tokens is None:  # a task divides by rows, or by labels (`fxpar.runtime.compiling.lower_task`)
            return Averaged(words, None if by_labels else 0)
        numbers, fewer = hint(divisor), hint(tokens) - hint(divisor)
        of_tokens = known_equal(divisor + fewer, tokens) if _is_dynamic(context) else True
        if numbers == 1 or (fewer >= 0 and of_tokens):
            return Averaged(words, None if numbers == 1 or by_labels else fewer)
        divisor = f"all numbers that it averages, of the example {numbers} for {hint(tokens)} tokens"
    warn_of_scale(f"is {words}", divisor)
    return Averaged(words)


def warn_of_scale(is_mean: str, divisor: str) -> None:
    """Say that one device divides the loss by `divisor`, where fxpar divides by the valid tokens."""
    warn(
        f"the loss {is_mean}, which divides by {divisor}. fxpar takes the sum and divides by the valid "
        "tokens of the mini-batch (labels that are not -100; all tokens without labels): where that is another number, "
        "loss and gradients have another scale than on one device. Return the sum times a factor of your own, or pass "
        "train_step(denominator=...)"
    )


def _tokens(context: CaptureContext) -> int | torch.SymInt | None:
    """How many tokens there are; None if there are no token ids."""
    ids = _ids(context)
    return None if ids is None else math.prod(ids.shape)


def _rows(context: CaptureContext) -> int | torch.SymInt | None:
    """The rows of a batch without labels."""
    tensors = [t for t in context.batch.values() if t.dim()]
    return tensors[0].shape[0] if tensors and "labels" not in context.batch else None


def counted_rows(context: CaptureContext) -> int | torch.SymInt | None:
    """The rows of a batch that counts these (`fxpar.runtime.reading.WholeBatches`): one without labels that is more
    than one row of tokens, such as pairs of images and texts. None for another one.
    """
    ids = _ids(context)
    if ids is None or "labels" in context.batch:
        return None
    if all(_is_row(t.shape, ids.shape[-1]) for t in context.batch.values() if t.dim()):
        return None
    return _rows(context)


def _is_row(shape: torch.Size, tokens: int | torch.SymInt) -> bool:
    """Whether it is [1, tokens, ...] or [tokens, ...]."""
    of_row = len(shape) > 1 and known_equal(shape[0], 1) and known_equal(shape[1], tokens)
    return of_row or known_equal(shape[0], tokens)


def _is_dynamic(context: CaptureContext) -> bool:
    """Whether a batch may have other numbers of tokens than the example: a mean over a fixed number is another one."""
    ids = _ids(context)
    return ids is not None and not is_static(ids)


def _ids(context: CaptureContext) -> Tensor | None:
    ids = next((t for t in context.batch.values() if t.dim() == 2 and is_whole(t) and t.dtype != torch.bool), None)
    return context.token_numbers if ids is None else ids
