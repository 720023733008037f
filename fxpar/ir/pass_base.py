"""What a pass is: a frozen dataclass whose fields are its options and whose call changes an `AnnotatedGraph`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import fx

from fxpar.errors import VerifyError
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.fqn import block_of, block_or_module_of
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import is_backward, is_size

Tier = Literal["exact", "numeric"]
Phase = Literal["prologue", "body", "epilogue"]


@runtime_checkable
class GraphPass(Protocol):
    """`name` is its name in the registry; tier "exact" keeps every bit of every result, "numeric" may change
    rounding.
    """

    name: ClassVar[str]
    tier: ClassVar[Tier]

    def __call__(self, graph: AnnotatedGraph) -> None: ...


def insert(
    graph: fx.Graph,
    target: object,
    args: tuple,
    *,
    like: fx.Node,
    tensor: TensorMeta | None,
    dist: DistConfig | None,
    phase: Phase = "body",
) -> fx.Node:
    """A new call at the graph's insertion point that keeps `like`'s place in the user's model."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    for key in ("fqn", "reader", "source", "backward", "bucket"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["tensor"], node.meta["dist"], node.meta["phase"] = tensor, dist, phase
    return node


def replace_operands(node: fx.Node, new: Iterable[fx.Node]) -> None:
    """Replace the node's tensor operands, in order, by `new` (as many as there are)."""
    supply = iter(new)

    def swap(arg: fx.Node) -> fx.Node:
        return arg if is_size(arg) else next(supply)

    node.args = fx.node.map_arg(node.args, swap)  # type: ignore[assignment]
    node.kwargs = fx.node.map_arg(node.kwargs, swap)  # type: ignore[assignment]


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in the order of a rule's inputs (a tensor used twice counts twice)."""
    operands: list[fx.Node] = []

    def visit(arg: fx.Node) -> fx.Node:
        if not is_size(arg):
            operands.append(arg)
        return arg

    fx.node.map_arg((node.args, node.kwargs), visit)
    return operands


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    todo = list(nodes)
    found = set(todo)
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                todo.append(operand)
    return found


def with_chunks(found: set[fx.Node], calls: Iterable[fx.Node]) -> set[fx.Node]:
    """With all of a loss that runs in chunks of tokens, once part of it is there: were its backward another part of a
    pipeline stage, the logits of all chunks would wait for it.
    """
    chunks = [n for n in calls if "chunk" in n.meta]
    return found | ancestors(chunks) if not found.isdisjoint(chunks) else found


def set_results(graph: fx.Graph, results: Iterable[fx.Node]) -> None:
    """Replace the graph's results."""
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(results),)


def sort_topologically(graph: fx.Graph) -> None:
    """Reorder the nodes so that operands come first, otherwise keeping their order. The graph must have no cycle."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [i for i, node in enumerate(nodes) if not missing[node]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    if len(order) != len(nodes):
        raise VerifyError("the graph has a cycle: collectives that depend on each other were fused")
    cursor = order[0]
    for node in order[1:]:
        cursor.append(node)
        cursor = node


def gathered_together(graph: AnnotatedGraph) -> dict[str, str]:
    """Parameter -> name of the parameters that are gathered, and whose gradients are scattered, together with it.

    Its layer; outside of layers all that is first used between the same two layers (norm and head behind the last).
    """
    first: dict[str, fx.Node] = {}
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        users = [u for u in node.users if not is_backward(u) and u.op != "output"]
        if info.kind == "param":
            first[info.fqn] = min(users or node.users, default=node)
    found: dict[str, str] = {}
    between = ""  # the first block since a layer
    for fqn in sorted(first, key=first.__getitem__):
        block = block_or_module_of(fqn)
        between = "" if block_of(fqn) else between or block
        found[fqn] = between or block
    return found


def right_behind(graph: fx.Graph, node: fx.Node) -> AbstractContextManager[Any]:
    """Insert behind a node that is a result; behind all inputs if it is one of them."""
    if node.op == "placeholder":
        return graph.inserting_before(next(iter(graph.find_nodes(op="output"))))
    return graph.inserting_after(node)
