"""ZeRO: parameters are stored sharded over the data axes; gathers and reduce-scatters become part of the graph.

Before: a parameter lies as the tensor axis wants it, whole on every data rank (dp and cp).
After: it is stored with dim 0 cut by `dp.cp` as well; a reshard restores the layout that the body computes with:

    level 1, 2   once per step, in the prologue
    level 3      before the first use, and again in the backward where other layers have run in between
    gradients    level 1: reduce-scattered in the epilogue; level 2, 3: in the body, micro-batch by micro-batch

    %w : f32[F@tp@dp, D] = param("up.weight")
    %w_g : f32[F@tp, D] = reshard(%w)           all parameters of one block share a bucket (`meta["bucket"]`)

Cost per rank and step: level 1, 2 as much as an all-reduce of the gradients; level 3 one all-gather more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpar.ir.collectives import reshard
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import dist_of, fqn_of, is_backward, tensor_of
from fxpar.ir.pass_base import Tier, gathered_together, insert, left_axes, shard_over


@dataclass(frozen=True)
class ZeroShard:
    """Reads the level from the strategy. Below level `params_from` parameters stay whole: someone else stores them
    sharded and hands them over gathered (`fxpar.store`).
    """

    params_from: int = 1
    name: ClassVar[str] = "zero_shard"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        strategy = graph.strategy
        if strategy.most_zero < max(1, self.params_from):
            return
        blocks = gathered_together(graph)
        middle = _released_blocks(graph, blocks) if strategy.most_zero == 3 else set()
        for node, info in zip(graph.placeholders, graph.inputs, strict=True):
            if info.kind != "param" or not info.meta.shape:
                continue
            level, axis = strategy.zero_of(info.fqn), left_axes(dist_of(node), strategy.data_axes_of(info.fqn))
            if level < max(1, self.params_from) or not axis:
                continue
            compute = dist_of(node)
            stored = shard_over(compute, axis, info.meta.shape)
            node.meta["dist"] = stored
            if level < 3:
                _gather(graph.graph, node, info.fqn, compute, list(node.users), "prologue", "params")
                continue
            block = blocks[info.fqn]
            users = list(node.users)
            again = [u for u in users if is_backward(u)] if block in middle else []
            first = [u for u in users if u not in again]
            _gather(graph.graph, node, info.fqn, compute, first, "body", f"{block}/forward")
            _gather(graph.graph, node, info.fqn, compute, again, "body", f"{block}/backward")


def _released_blocks(graph: AnnotatedGraph, blocks: Mapping[str, str]) -> set[str]:
    """Blocks whose parameters are freed between forward and backward: those that another block's forward follows.

    The last block and the head go straight into their backward; freeing them would only gather them twice.
    """
    last_use: dict[str, fx.Node] = {}
    first_use: dict[str, fx.Node] = {}
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        users = [u for u in node.users if not is_backward(u) and u.op != "output"]
        if info.kind != "param" or not users:
            continue
        block = blocks[info.fqn]
        last_use[block] = max([*users, *([last_use[block]] if block in last_use else [])])
        first_use[block] = min([*users, *([first_use[block]] if block in first_use else [])])
    layers = [block for block in first_use if block.rpartition(".")[2].isdigit()]
    return {
        block for block in last_use if any(first_use[other] > last_use[block] for other in layers if other != block)
    }


def _gather(
    graph: fx.Graph, param: fx.Node, fqn: str, compute: DistConfig, users: list[fx.Node], phase: str, bucket: str
) -> None:
    """The gather belongs to the module that has the parameter."""
    if not users:
        return
    first = min(users)
    with graph.inserting_before(first):
        like = first if first.op != "output" else param
        node = insert(graph, reshard, (param,), like=like, tensor=tensor_of(param), dist=compute)
    node.meta |= {"phase": phase, "bucket": bucket, "fqn": fqn.rpartition(".")[0], "reader": fqn_of(like)}
    for user in users:
        user.replace_input_with(param, node)
