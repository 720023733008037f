"""Where in a graph the loss is: what comes behind the model, forward and backward.

Nothing in a graph says where the model ends and the loss function begins, so the flow of values does: the loss begins
at the first op that is a loss (cross entropy, squared error, ...), or, on a way that has none, behind the last
parameter or matrix product. Its backward ends where the first of those is read again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import is_backward
from fxpar.ops.traits import ATTENTION, EMBEDDINGS, computes, is_product


def loss_region(logical: LogicalGraph, active: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes of the loss among the `active` ones (see `active_nodes`); nothing where the loss is outside."""
    ends = [n for n, out in zip(logical.results, logical.outputs, strict=True) if out.kind == "loss"]
    if not ends:
        return set()
    weights = _weights(logical)
    calls = [n for n in logical.gm.graph.nodes if n.op == "call_function" and n in active]
    forward = [n for n in calls if not is_backward(n)]
    region = _forward(forward, weights, ends[0])
    return region | _backward([n for n in calls if is_backward(n)], region, weights)


def _weights(logical: LogicalGraph) -> set[fx.Node]:
    """Parameters, and views of them."""
    found = {n for n, i in zip(logical.placeholders, logical.inputs, strict=True) if i.kind == "param"}
    for node in logical.gm.graph.nodes:
        if computes(node.target) == "moves" and any(o in found for o in node.all_input_nodes):
            found.add(node)
    return found


def is_model_op(op: Any) -> bool:
    """Whether an op makes a model of parameters and activations: no loss goes on behind one of these."""
    return is_product(op) or op in _MODEL_OPS


_MODEL_OPS = {*ATTENTION, *EMBEDDINGS, torch.ops.fxpar.embedding_backward.default}


def _is_model(node: fx.Node, weights: set[fx.Node]) -> bool:
    return node in weights or is_model_op(node.target) or any(o in weights for o in node.all_input_nodes)


def _forward(calls: list[fx.Node], weights: set[fx.Node], loss: fx.Node) -> set[fx.Node]:
    inside = set(calls)
    needed, model_ahead, loss_ahead = {loss}, set[fx.Node](), set[fx.Node]()
    for node in reversed(calls):
        users = [u for u in node.users if u in inside and u in needed]
        if users:
            needed.add(node)
        if _is_model(node, weights) or any(u in model_ahead for u in users):
            model_ahead.add(node)
        if any(computes(u.target) == "loss" or u in loss_ahead for u in users):
            loss_ahead.add(node)
    region: set[fx.Node] = set()
    for node in calls:
        behind = any(o in region for o in node.all_input_nodes)
        if node in needed:
            behind |= computes(node.target) == "loss" or (node not in model_ahead and node not in loss_ahead)
        if behind:
            region.add(node)
    return region


def _backward(calls: list[fx.Node], forward: set[fx.Node], weights: set[fx.Node]) -> set[fx.Node]:
    inside, region = set(calls), set[fx.Node]()
    for node in calls:
        sources = [o for o in node.all_input_nodes if o in inside]
        if sources:
            behind = all(o in region and computes(o.target) != "loss_backward" for o in sources)
        else:  # made of what the forward has computed, such as a sign
            behind = any(o in forward for o in node.all_input_nodes)
        if behind and not _is_model(node, weights):
            region.add(node)
    return region
