"""What ranks computed, held against what one device does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.checking.eager import NOISE, relative_error
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph


def summed(results: list[list[Tensor]], logical: LogicalGraph, terms: Sequence[str]) -> dict[tuple[str, str], Tensor]:
    """Loss, gradients, and squared terms of some of them ("terms"), summed over micro-batches."""
    total: dict[tuple[str, str], Tensor] = {}
    keys = [*((info.kind, info.fqn) for info in logical.outputs), *(("terms", fqn) for fqn in terms)]
    for values in results:
        for key, value in zip(keys, values, strict=True):
            if key[0] == "buffer":
                continue
            total[key] = value.clone() if key not in total else total[key] + value
    return total


def compared(
    program: TrainGraph, ranks: list[dict[str, Any]], expected: dict[tuple[str, str], Tensor]
) -> tuple[float, dict[str, float]]:
    """Relative error of the loss, and of each gradient put together from all ranks' pieces."""
    truth = expected[("loss", "loss")]
    loss_error = max(relative_error(result["loss"], truth) for result in ranks)
    # A gradient that is zero but for rounding (a bias in front of a batch norm) is compared with the others' size.
    floor = NOISE * max(
        (float(t.abs().max()) for (kind, _), t in expected.items() if kind == "grad" and t.numel()), default=0.0
    )
    places: dict[str, list[DistConfig]] = defaultdict(list)
    for part in program.storing:
        for info, stored in zip(part.outputs, part.stored_outputs, strict=True):
            if info.kind == "grad":
                places[info.fqn].append(stored.dist)
    errors: dict[str, float] = {}
    for fqn, parts in places.items():
        truth, terms = expected[("grad", fqn)], expected.get(("terms", fqn))
        least = floor if terms is None else max(floor, float(terms.sqrt()))
        if len(parts) > 1:
            errors[fqn] = relative_error(_whole(fqn, parts, ranks, truth), truth, truth, least)
            continue
        config, worst = parts[0], 0.0
        for rank in config.mesh.ranks:
            piece = config.take(truth, rank)  # padding included: it must be zero
            worst = max(worst, relative_error(ranks[rank]["grads"][fqn], piece, truth, least))
        errors[fqn] = worst
    return loss_error, errors


def _whole(fqn: str, parts: list[DistConfig], ranks: list[dict[str, Any]], like: Tensor) -> Tensor:
    """The sum of the terms that several pipeline stages give."""
    total = torch.zeros_like(like)
    for config in dict.fromkeys(parts):  # a rank adds up what its stages give
        term = torch.zeros_like(like)
        for rank in config.mesh.ranks:
            config.put(term, ranks[rank]["grads"][fqn], rank)
        total += term
    return total
