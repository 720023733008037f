"""Experts that are apart: which calls of a layer run on copies of tokens, where the experts are, and what of a token
has to travel there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.flow.expert_rows import experts_axis
from fxpar.ir.graph import AnnotatedGraph, Size, TensorMeta
from fxpar.ir.node_meta import is_size, local_meta, local_metas, local_tensor
from fxpar.ir.pass_base import tensor_operands
from fxpar.ops.traits import EXPERT_PRODUCTS_BACKWARD, SIZES
from fxpar.rules.slots import LOOKUPS, Kinds, Rows, has_tokens, is_by_token, source_of_ids, walk_rows

GRADIENTS = EXPERT_PRODUCTS_BACKWARD | {torch.ops.fxpar.embedding_backward.default}
"""They add up over rows: what they make has no tokens."""
_MANY = 1 << 20  # elements of a dim that grows with the batch
_MOST_STEPS = 6  # between what travels and the product that reads it


@dataclass
class ExpertGroup:
    """The products whose tokens have the same experts, and lookups by these: `ids` [N, K] of `experts` that are cut
    over `axis`.
    """

    axis: str
    ids: fx.Node
    experts: int  # of all ranks
    members: list[fx.Node] = field(default_factory=list)

    @property
    def tokens(self) -> Size:
        """N, those that a rank has."""
        return local_tensor(self.ids).shape[0]

    @property
    def slots(self) -> int:
        """K, experts of a token."""
        return local_tensor(self.ids).shape[1]  # type: ignore[return-value]


def expert_groups(graph: AnnotatedGraph) -> list[ExpertGroup]:
    """Those whose tokens have not travelled yet, in the order of the graph."""
    found: dict[tuple[fx.Node, str], ExpertGroup] = {}
    ranks = graph.strategy.mesh.degree
    for node in graph.graph.nodes:
        axis = experts_axis(node, graph.strategy)
        if axis:
            ids = node.args[2]
            made = local_tensor(node if node.target in EXPERT_PRODUCTS_BACKWARD else node.args[1])
            experts = int(made.shape[0]) * ranks(axis)
            found.setdefault((source_of_ids(ids), axis), ExpertGroup(axis, ids, experts)).members.append(node)
    for node in graph.graph.nodes:
        at = LOOKUPS.get(node.target)
        for (source, _), group in found.items() if at is not None else ():
            if source_of_ids(node.args[at]) is source:
                group.members.append(node)
    return list(found.values())


def calls_on_copies(graph: fx.Graph, group: ExpertGroup) -> dict[fx.Node, Kinds]:
    """The calls that run where the experts are, in the order of the graph, with what they make. What is junk in part
    must not leave: then it is made where the tokens are, of rows that have come back.
    """
    members: dict[fx.Node, Rows] = {node: "same" if node.target in GRADIENTS else "zero" for node in group.members}
    stay: set[fx.Node] = set()
    while True:
        found = walk_rows(graph.nodes, members, group.tokens, group.slots, stay)
        junk = (n for n, kind in found.items() if kind == "junk")
        leaves: set[Any] = {n for n in junk if any(u not in found for u in n.users)}
        leaves = {n.args[0] if n.target is operator.getitem else n for n in leaves}  # all results of an op
        leaves = leaves or _too_far(found, group)
        if not leaves:
            return found
        stay |= leaves


def _too_far(found: Mapping[fx.Node, Kinds], group: ExpertGroup) -> set[fx.Node]:
    """Of the calls behind the last products, those that are no way to a smaller result: with them more would travel, of
    the result and of what else they read, than with what they are made of.
    """
    before, todo = set[fx.Node](), list(group.members)
    while todo:
        node = todo.pop()
        if node not in before:
            before.add(node)
            todo += [o for o in node.all_input_nodes if o in found]
    needed = {one for node in before for one in _read(node, found, group.tokens)}
    cost: dict[fx.Node, float] = {}
    left: set[fx.Node] = set()
    for node in reversed([*found]):
        users = [user for user in node.users if user in found]
        behind = [user for user in users if user not in before]
        alone = isinstance(local_meta(node), TensorMeta) and found[node] != "junk"
        here = bytes_per_token(node) if alone else math.inf
        further = sum(cost[user] for user in behind)
        read = {one for user in behind for one in _read(user, found, group.tokens)} - needed
        further += sum(map(bytes_per_token, read))
        away = len(users) < len(node.users)  # the value leaves in any case
        cost[node] = here if away or not behind else min(here, further)
        if behind and (away or here <= further):
            left.update(behind)
    return left


def _read(node: fx.Node, found: Mapping[fx.Node, Kinds], tokens: Size) -> set[fx.Node]:
    """What has to travel for a call besides its rows."""
    others = (o for o in node.all_input_nodes if o not in found and not is_size(o) and has_tokens(o))
    return {one for other in others for one in sources(other, tokens)}


def sources(
    value: fx.Node, tokens: Size, known: Collection[fx.Node] = (), steps: int = _MOST_STEPS
) -> frozenset[fx.Node]:
    """What has to travel for a value, where the `known` have: itself, or what it is made of if that is less."""
    operands = operands_by_token(value, tokens) if steps and value not in known else []
    made = frozenset[fx.Node]().union(*(sources(operand, tokens, known, steps - 1) for operand in operands))
    less = sum(bytes_per_token(one) for one in made if one not in known) < bytes_per_token(value)
    return made if operands and less else frozenset([value])


def operands_by_token(value: fx.Node, tokens: Size) -> list[fx.Node]:
    """Of a call that may as well be made of copies: what it reads of tokens."""
    if value.op != "call_function" or isinstance(local_meta(value), tuple) or not is_by_token(value, tokens):
        return []
    return [operand for operand in tensor_operands(value) if has_tokens(operand)]


def bytes_per_token(value: fx.Node) -> int:
    """Of the first result of a call, [N, ...]."""
    meta = local_meta(value)
    first: Any = meta[0] if isinstance(meta, tuple) else meta
    return first.dtype.itemsize * math.prod(size if isinstance(size, int) else _MANY for size in first.shape[1:])


def of_tokens(node: fx.Node, size: fx.Node, tokens: Size) -> None:
    """Let a call per token be one of other `tokens`, as many as the node `size` says."""
    position = SIZES.get(node.target)  # type: ignore[call-overload]
    if position is not None:
        sizes: Any = node.args[position]
        first = sizes[0] if isinstance(sizes[0], int) and sizes[0] < 0 else size
        node.args = (*node.args[:position], [first, *sizes[1:]], *node.args[position + 1 :])
    found = tuple(meta and TensorMeta((tokens, *meta.shape[1:]), meta.dtype) for meta in local_metas(node))
    node.meta.pop("dist", None)  # ranks have as many as they get: parts of no whole
    node.meta["tensor"] = node.meta["local"] = found if isinstance(local_meta(node), tuple) else found[0]
