"""Accumulate gradients: the body of a later micro-batch adds its loss and gradients to those so far, in place.

Before: results are one micro-batch's. After: for each loss and gradient there is one more input `acc_*`, and the
result is that buffer, added to. Buffers' new values are not accumulated.

    return (%loss, %dw)                         %acc = placeholder; %s = add_(%acc, %dw); return (.., %s)

Cost: one pass over the gradients; no memory. Used on the body graph alone, for micro-batches after the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxpar.graph import AnnotatedGraph
from fxpar.pass_base import Tier, right_behind, set_results

_ADD = torch.ops.aten.add_.Tensor


@dataclass(frozen=True)
class AccumulateGradients:
    """`keep`: positions of results that are not accumulated (buffers, and values that only the epilogue needs)."""

    keep: tuple[int, ...] = ()
    name: ClassVar[str] = "accumulate_gradients"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        results = list(graph.results)
        places = graph.placeholders
        cursor = places[-1] if places else next(iter(graph.graph.nodes))
        for i, node in enumerate(results):
            if i in self.keep:
                continue
            with graph.graph.inserting_after(cursor):
                accumulator = graph.graph.placeholder(f"acc_{i}")
            accumulator.meta.update({k: node.meta[k] for k in ("tensor", "dist", "local") if k in node.meta})
            cursor = accumulator
            # Right behind the gradient, which is free then, instead of all of them at the end.
            with right_behind(graph.graph, node):
                total = graph.graph.call_function(_ADD, (accumulator, node))
            total.meta.update(node.meta)
            results[i] = total
        set_results(graph.graph, results)
