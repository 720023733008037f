"""Reduce gradients: data parallelism. Results leave each replica as partial sums and are summed over all of them.

Before: results are one replica's; a gradient may be partial on tp or cp already (a norm weight under sequence
parallel). After: the loss is the same on every rank, a gradient lies as its parameter is stored, a buffer's new value
is the mean over replicas. All of this happens once per group of micro-batches, in the epilogue (ZeRO-2 and 3: in the
body). The values of a forward whose loss is outside, and gradients of the batch, stay one replica's.

    %dw : f32[F@tp, D] P(dp)
    %dw_r : f32[F@tp, D] = reshard(%dw)

With `deferred` gradients leave as the partial sums that they are, one term per replica: whoever runs the graph reduces
them straight into the layout of the optimizer (`fxpar.transport`). ZeRO-2 and 3 still reduce-scatter in the body.
With `whole` they leave as `torch.nn.parallel.DistributedDataParallel` has them: whole on every rank, the mean over
replicas.

Cost per rank: an all-reduce of the local gradients over dp and cp, in buckets; nothing if deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.ir.axes import REPLICAS
from fxpar.ir.collectives import reshard
from fxpar.ir.dist_config import DistConfig, Partial
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.markers import vary
from fxpar.ir.node_meta import dist_of, tensor_of
from fxpar.ir.pass_base import Phase, Tier, gathered_together, insert, left_axes, set_results, shard_over


@dataclass(frozen=True)
class ReduceGradients:
    """Reads the axes from the strategy. `deferred`, `whole`: see above."""

    deferred: bool = False
    whole: bool = False
    name: ClassVar[str] = "reduce_gradients"
    tier: ClassVar[Tier] = "numeric"

    def __call__(self, graph: AnnotatedGraph) -> None:
        (output,) = graph.graph.find_nodes(op="output")
        stored = {
            info.fqn: dist_of(node)
            for node, info in zip(graph.placeholders, graph.inputs, strict=True)
            if info.kind == "param"
        }
        blocks = gathered_together(graph)
        results: list[fx.Node] = []
        for node, out in zip(graph.results, graph.outputs, strict=True):
            if out.kind in ("value", "input_grad", "sent", "sent_grad"):
                results.append(node)
                continue
            if out.kind == "buffer":
                node.meta["buffer"] = out.fqn
            body = _varying(node, graph, "avg" if out.kind == "buffer" or self.whole else "sum")
            early = out.kind == "grad" and graph.strategy.zero_of(out.fqn) >= 2 and not self.whole
            if out.kind == "grad" and self.deferred and not early:
                graph.deferred[out.fqn] = body
                results.append(node)
                continue
            target = DistConfig.replicated(body.mesh, body.ndim, body.dtype)
            if out.kind == "grad" and not self.whole:
                axes, shape = graph.strategy.data_axes_of(out.fqn), tensor_of(node).shape
                lies = _scattered(stored[out.fqn], axes, shape) if early else stored[out.fqn]
                target = replace(lies, dtype=body.dtype)  # a sum is made in the dtype that its terms add up in
            if body == target:
                results.append(node)
                continue
            phase: Phase = "body" if early else "epilogue"
            results.append(_reduce(graph.graph, node, body, target, phase, output))
            if early:
                results[-1].meta["bucket"] = f"grads/{blocks[out.fqn]}"
        set_results(graph.graph, results)
        output.meta["dist_in"] = tuple(dist_of(node) for node in results)


def _varying(node: fx.Node, graph: AnnotatedGraph, op: str) -> DistConfig:
    """The result's placement with every replica's value as one term; an integer buffer (a step count) keeps the
    largest.
    """
    config = dist_of(node)
    dtype = tensor_of(node).dtype
    if graph.strategy.replicas == 1 or (op == "avg" and dtype == torch.bool):
        return config
    return config.with_placement(REPLICAS, Partial(op if op == "sum" or dtype.is_floating_point else "max"))


def _scattered(param: DistConfig, axis: str, shape: Sequence[Any]) -> DistConfig:
    """Where a ZeRO-2 or 3 gradient ends: dim 0 cut over the data axes, whether or not the parameter is."""
    left = left_axes(param, axis)
    return shard_over(param, left, shape) if left and param.ndim else param


def _reduce(
    graph: fx.Graph, node: fx.Node, body: DistConfig, target: DistConfig, phase: Phase, output: fx.Node
) -> fx.Node:
    # The same value may be a result twice, so its own config is left alone and a view of it carries the dp term.
    early = phase == "body"
    place = graph.inserting_after(node) if early else graph.inserting_before(output)
    with place:
        term = insert(graph, vary, (node,), like=node, tensor=tensor_of(node), dist=body, phase=phase)
    with graph.inserting_after(term):
        return insert(graph, reshard, (term,), like=node, tensor=tensor_of(node), dist=target, phase=phase)
