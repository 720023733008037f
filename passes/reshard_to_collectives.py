"""Reshard to collectives: replace every reshard by steps that each work on one mesh axis.

Before: `reshard` nodes between any two placements. After: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`,
`shard`, `partial`.

    %g_r : f32[D@tp, F] P(dp) -> f32[D@tp@dp, F]
    %g_r = reshard(%g)                          %g_r = reduce_scatter(%g, "dp", "sum", 0, ())

Which steps, and in which order: `fxpar.ir.steps`.

Cost in bytes per rank of a group of K, for a local result of n bytes: all_reduce 2n(K-1)/K, all_gather n(K-1)/K,
reduce_scatter n(K-1), all_to_all n(K-1)/K, shard and partial 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpar.ir import collectives as c
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import dist_of, tensor_of
from fxpar.ir.pass_base import Tier, insert
from fxpar.ir.steps import steps


@dataclass(frozen=True)
class ReshardToCollectives:
    """No options."""

    name: ClassVar[str] = "reshard_to_collectives"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=c.reshard):
            value: fx.Node = node.args[0]  # type: ignore[assignment]
            with graph.graph.inserting_before(node):
                for op, args, dist in steps(dist_of(value), dist_of(node), tensor_of(node).shape):
                    value = insert(
                        graph.graph,
                        op,
                        (value, *args),
                        like=node,
                        tensor=tensor_of(node),
                        dist=dist,
                        phase=node.meta["phase"],
                    )
            if "buffer" in node.meta:
                value.meta["buffer"] = node.meta["buffer"]
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
