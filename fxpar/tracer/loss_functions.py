"""Loss functions of torch: cross entropy as `fxpar::cross_entropy`, and every mean with its sum beside it.

Eager torch averages by default. The sum that belongs to each mean is remembered, so that a loss function which returns
exactly that mean can be captured as the sum (`fxpar.tracer.loss`). What is not used becomes dead code.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.losses import IGNORE_INDEX
from fxpar.ops.cross_entropy import cross_entropy_loss
from fxpar.tracer.context import CaptureContext, current


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
    divisor = _labels_but(ignore_index) or labels.numel()
    mean = total / (labels != ignore_index).sum()
    return _context().add_mean(mean, total, "F.cross_entropy(reduction='mean')", lambda: divisor, by_labels=True)


def _context() -> CaptureContext:
    context = current()
    assert context is not None
    return context


def _labels_but(ignore_index: int) -> str:
    return "" if ignore_index == IGNORE_INDEX else f"the labels that are not {ignore_index}"


def _with_sum(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a loss function of `torch.nn.functional`; if it averages, call it for the sum as well."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return function(*args, **kwargs)
    if options["reduction"] not in ("mean", "batchmean"):
        return function(*args, **kwargs)
    result = function(*args, **kwargs)
    averaged, options["reduction"] = options["reduction"], "sum"
    total = function(*bound.args, **bound.kwargs)

    by_labels = "ignore_index" in options and not options["target"].dtype.is_floating_point

    def divisor() -> int | torch.SymInt | str:
        if averaged == "batchmean":
            return options["input"].shape[0]
        if by_labels:
            weights = "the weights of the labels" if options["weight"] is not None else ""
            return weights or _labels_but(options["ignore_index"]) or options["target"].numel()
        options["reduction"] = "none"
        return function(*bound.args, **bound.kwargs).numel()

    what = f"F.{function.__name__}(reduction={averaged!r})"
    return _context().add_mean(result, total, what, divisor, by_labels=by_labels)


def full_mean(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.mean` / `Tensor.mean`: a mean over all elements is remembered with its sum."""
    if args or any(value is not None for key, value in kwargs.items() if key != "dtype"):
        return NotImplemented
    dtype = kwargs.get("dtype")
    mean, total = input.mean(dtype=dtype), input.sum(dtype=dtype)
    return _context().add_mean(mean, total, "a mean over all elements", input.numel)


def full_nanmean(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.nanmean` / `Tensor.nanmean`, as `full_mean`."""
    if args or any(value is not None for key, value in kwargs.items() if key != "dtype"):
        return NotImplemented
    dtype = kwargs.get("dtype")
    numbers = input.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    mean, total = input.nanmean(dtype=dtype), numbers.sum(dtype=dtype)
    return _context().add_mean(mean, total, "torch.nanmean", lambda: "the numbers that are not NaN")


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
    F.multilabel_margin_loss,
)
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    torch.mean: full_mean,
    Tensor.mean: full_mean,
    torch.nanmean: full_nanmean,
    Tensor.nanmean: full_nanmean,
    **{function: functools.partial(_with_sum, function) for function in _AVERAGING},
}
