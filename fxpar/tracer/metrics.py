"""Metrics beside the loss: sums over tokens, which add up over ranks and micro-batches as the loss does.

Each becomes a result of the loss's kind: `metric * (scale != 0)` in fp64. The factor is 1 but in idle micro-batches,
which run with scale 0 and must count nothing; whole numbers stay exact up to 2**53.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import MeanLossError, MetricError, a_type
from fxpar.ir.graph import COUNT
from fxpar.torch_api.tracing import node_of
from fxpar.tracer.context import CaptureContext
from fxpar.tracer.means import check_sum


def as_results(metrics: Mapping[Any, Any], scale: Tensor, context: CaptureContext) -> dict[str, Tensor]:
    """The results of a graph for what a loss function returned beside the loss, by the names of outputs.

    Raises MetricError.
    """
    found: dict[str, Tensor] = {}
    means = {mean.node: mean for mean in context.means}
    for name, given in metrics.items():
        if not isinstance(name, str) or not name or ":" in name or name == "loss":
            raise MetricError(name, "needs another name: a word that is not 'loss' and has no ':'")
        pair = isinstance(given, tuple | list)
        if pair and len(given) != 2:
            raise MetricError(name, f"is {a_type(given)} of {len(given)}, not of two: (sum, count)")
        for key, value in zip((name, name + COUNT), given if pair else (given,), strict=False):
            _check(name, value)
            node = node_of(value)
            if node is None:
                raise MetricError(name, "was not computed from the parameters and the batch")
            try:
                check_sum(node, means)
            except MeanLossError as error:
                raise MetricError(name, "is a mean, and means of micro-batches do not add up") from error
            found[key] = value.detach().to(torch.float64) * (scale != 0)
    return found


def _check(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise MetricError(name, f"is {a_type(value)}, not a tensor (leave out .item())")
    if value.dim():
        raise MetricError(name, f"has {value.dim()} dim(s), not one number. Add it up, with .sum()")
    if value.dtype.is_complex:
        raise MetricError(name, f"is of {value.dtype}")
