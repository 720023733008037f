"""Narrow gradients: they add up in one dtype and travel in another.

Before: gradients leave as the partial sums of a group, in the dtype in which its micro-batches add up. After: a cast in
the epilogue, once per group, brings them to the dtype in which they go home.

    %dw : f32[F, D] P(dp)                       %dw   : f32[F, D] P(dp)
                                                %dw_c : bf16[F, D] P(dp) = _to_copy(%dw, dtype=bf16)

Numeric: every term of a gradient is rounded once. Cost: one pass over the gradients per group. Saves: half of the bytes
that travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import dist_of, tensor_of
from fxpar.ir.pass_base import Tier, insert, set_results
from fxpar.torch_api import kernels


@dataclass(frozen=True)
class NarrowGradients:
    """`dtype`: the widest in which gradients leave; those that are narrower stay."""

    dtype: torch.dtype
    name: ClassVar[str] = "narrow_gradients"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        (output,) = graph.graph.find_nodes(op="output")
        results = list(graph.results)
        for i, (node, out) in enumerate(zip(results, graph.outputs, strict=True)):
            meta = tensor_of(node)
            if out.kind != "grad" or meta.dtype.itemsize <= self.dtype.itemsize:
                continue
            with graph.graph.inserting_before(output):
                cast = insert(
                    graph.graph,
                    kernels.to_copy,
                    (node,),
                    like=node,
                    tensor=TensorMeta(meta.shape, self.dtype),
                    dist=replace(dist_of(node), dtype=self.dtype),
                    phase="epilogue",
                )
            cast.kwargs = {"dtype": self.dtype}
            results[i] = cast
            if out.fqn in graph.deferred:
                graph.deferred[out.fqn] = replace(graph.deferred[out.fqn], dtype=self.dtype)
        set_results(graph.graph, results)
        output.meta["dist_in"] = tuple(dist_of(node) for node in results)
