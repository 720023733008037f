"""Limit experts: of a rank's rows an expert gets so many times the mean of them at most, `+capacity(1.25)`.

Before: a token goes through each of its experts. After: of all rows of an expert on a rank, those of the first tokens
do; a row beyond the capacity has no expert: it is zeros, so its token goes on with the sum over its other slots, and
with what the model adds around the experts. Weights of the choice stay what they are.

    %h = expert_mm(%x, %w, %ids)                %in, %wanted = within_capacity(%ids, E, 1.25)
    %y = expert_mm(silu(%h), %v, %ids)          %h = expert_mm(%x, %w, %in)
                                                %y = expert_mm(silu(%h), %v, %in)

So the fullest expert, and the fullest rank under ep, has a bound. Which rows are left out depends on the tokens that a
rank has, and on nothing else: the same tokens lose the same rows again. Padding stands behind the tokens of its row.
Saves: the rows that are left out. Costs: a sort of the ids.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpar.errors import CapacityError
from fxpar.flow.expert_rows import layers_of
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import fqn_of, is_backward, local_tensor, tensor_of
from fxpar.ir.pass_base import Tier
from fxpar.ops import copies
from fxpar.ops.traits import EXPERT_PRODUCTS_BACKWARD
from fxpar.rules.slots import LOOKUPS, Rows, ranks_alike, source_of_ids, walk_rows


@dataclass(frozen=True)
class LimitExperts:
    """Reads the capacity from the strategy and its rules. Raises CapacityError."""

    name: ClassVar[str] = "limit_experts"
    tier: ClassVar[Tier] = "lossy"

    def __call__(self, graph: AnnotatedGraph) -> None:
        strategy = graph.strategy
        if not strategy.most("capacity"):
            return
        limited: dict[float, int] = {}
        for products in layers_of(graph):
            module = fqn_of(products[0])
            capacity = strategy.share_of("capacity", strategy.rule_of(module, "capacity"))
            if not capacity:
                continue
            if strategy.share_of("lsh", strategy.rule_of(module, "lsh")):
                raise CapacityError(graph.name, products[0].name, module, "has means of rows by lsh(...)")
            _limit(graph, products, capacity)
            limited[capacity] = limited.get(capacity, 0) + 1
        graph.notes += [
            f"lossy: experts of {layers} layer{'s' * (layers > 1)} get at most {capacity:g} times the mean of a rank's "
            "rows, those of the first tokens; what share is left out is in the report of a step"
            for capacity, layers in limited.items()
        ]


def _limit(graph: AnnotatedGraph, products: Sequence[fx.Node], capacity: float) -> None:
    first = products[0]
    ids: Any = first.args[2]
    meta = local_tensor(ids)
    lookups = [
        node
        for node in graph.graph.nodes
        if node.target in LOOKUPS
        and source_of_ids(node.args[LOOKUPS[node.target]]) is source_of_ids(ids)
        and local_tensor(node.args[LOOKUPS[node.target]]) == meta
    ]
    if len(meta.shape) != 2:
        raise CapacityError(graph.name, first.name, fqn_of(first), f"has ids {meta}, which are not [tokens, slots]")
    _check_zeros(graph, [*products, *lookups], meta)
    made: Any = first if first.target in EXPERT_PRODUCTS_BACKWARD else first.args[1]
    experts: Any = tensor_of(made).shape[0]
    results = meta, TensorMeta((experts,), torch.int64)
    with graph.graph.inserting_before(ids.next):
        cut = _call(graph.graph, copies.within_capacity, (ids, experts, capacity), results, first)
        kept, wanted = (_call(graph.graph, operator.getitem, (cut, i), results[i], first) for i in (0, 1))
    kept.meta.update({key: ids.meta[key] for key in ("tensor", "dist") if key in ids.meta})
    wanted.meta["experts"] = "", ranks_alike(first)
    for node in products:
        node.update_arg(2, kept)
    for node in lookups:
        node.update_arg(LOOKUPS[node.target], kept)


def _check_zeros(graph: AnnotatedGraph, members: Sequence[fx.Node], ids: TensorMeta) -> None:
    """Raise CapacityError where the forward would make something of a row without an expert."""
    products: dict[fx.Node, Rows] = dict.fromkeys((node for node in members if not is_backward(node)), "zero")
    forward = [node for node in graph.graph.nodes if not is_backward(node)]
    slots: Any = ids.shape[1]
    found = walk_rows(forward, products, ids.shape[0], slots)
    for node, kind in found.items():
        readers = [user for user in node.users if not is_backward(user) and user not in found]
        if kind == "junk" and readers:
            why = f"makes something of a row without an expert, and %{readers[0].name} reads it"
            raise CapacityError(graph.name, node.name, fqn_of(node), why)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    for key in ("fqn", "reader", "source", "backward", "phase"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta.update(tensor=meta, local=meta)  # of a rank: others limit rows of their own
    return node
