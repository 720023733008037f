"""Loss functions of torch: cross entropy as `fxpar::cross_entropy`, and every mean with its sum beside it.

Eager torch averages by default. The sum that belongs to each mean is remembered, so that a loss function which returns
exactly that mean can be captured as the sum (`fxpar.tracer.loss`). What is not used becomes dead code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.ops.cross_entropy import cross_entropy_loss
from fxpar.tracer.context import current


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of input [N, V, ...] or [V]; class probabilities, weights and smoothing stay in plain ATen."""
    if target.dtype.is_floating_point or weight is not None or label_smoothing > 0.0:
        return _with_sum(
            F.cross_entropy,
            input,
            target,
            weight=weight,
            size_average=size_average,
            ignore_index=ignore_index,
            reduce=reduce,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    logits = input.movedim(1, -1) if input.dim() > 2 else input
    labels = target.reshape(-1)
    losses = cross_entropy_loss(logits.reshape(-1, logits.shape[-1]), labels, ignore_index=ignore_index)
    if reduction == "none":
        return losses.view(target.shape).to(input.dtype)
    total = losses.sum()
    if reduction == "sum":
        return total
    return _mean(total, (labels != ignore_index).sum(), "F.cross_entropy(reduction='mean')")


def _mean(total: Tensor, count: Tensor | int, what: str) -> Tensor:
    context = current()
    assert context is not None
    return context.add_mean(total / count, total, what)


def _with_sum(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a loss function of `torch.nn.functional`; if it averages, call it for the sum as well."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return function(*args, **kwargs)
    if options["reduction"] not in ("mean", "batchmean"):
        return function(*args, **kwargs)
    context = current()
    assert context is not None
    result = function(*args, **kwargs)
    options["reduction"] = "sum"
    total = function(*bound.args, **bound.kwargs)
    return context.add_mean(result, total, f"F.{function.__name__}(reduction='mean')")


def full_mean(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.mean` / `Tensor.mean`: a mean over all elements is remembered with its sum."""
    if args or any(value is not None for key, value in kwargs.items() if key != "dtype"):
        return NotImplemented
    context = current()
    assert context is not None
    dtype = kwargs.get("dtype")
    return context.add_mean(input.mean(dtype=dtype), input.sum(dtype=dtype), "a mean over all elements")


_AVERAGING = (
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.multi_margin_loss,
)
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    torch.mean: full_mean,
    Tensor.mean: full_mean,
    **{function: functools.partial(_with_sum, function) for function in _AVERAGING},
}
