"""What a pass is: a frozen dataclass whose fields are its options and whose call changes an `AnnotatedGraph`."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import fx

from fxpar.errors import VerifyError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.fqn import block_of, block_or_module_of
from fxpar.ir.graph import AnnotatedGraph, TensorMeta
from fxpar.ir.node_meta import is_backward, is_on_host, is_size, phase_of

Tier = Literal["exact", "numeric", "lossy"]
Phase = Literal["prologue", "body", "epilogue"]


@runtime_checkable
class GraphPass(Protocol):
    """`name` is its name in the registry; tier "exact" keeps every bit of every result, "numeric" may change rounding,
    "lossy" computes something else, and does nothing where the strategy does not ask for it.
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


def whole_forward(forward: set[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The forward with what belongs to it although nothing that it gives is made of that: all of a loss that runs in
    chunks of tokens (were its backward another part, the logits of all chunks would wait for it), and what it copies to
    the host.
    """
    nodes = list(nodes)
    chunks = [n for n in nodes if "chunk" in n.meta]
    found = forward | ancestors(chunks) if not forward.isdisjoint(chunks) else forward
    return found | {n for n in nodes if is_on_host(n) and _made_with(n.all_input_nodes[0], found)}


def _made_with(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether it is there, or a result of an op that is there."""
    return node in found or (node.target is operator.getitem and node.args[0] in found)


def forward_of(graph: AnnotatedGraph) -> set[fx.Node]:
    """What loss, values, new buffers and sent activations are made of in the body, all of a loss in chunks, and
    copies to the host. The epilogue may reduce gradients together with the loss; these do not count.
    """
    late = ("grad", "sent_grad", "input_grad")
    ends = [node for node, out in zip(graph.results, graph.outputs, strict=False) if out.kind not in late]
    todo: list[fx.Node] = []
    while ends:
        node = ends.pop()
        if phase_of(node) == "epilogue":
            ends += node.all_input_nodes
        elif not is_backward(node):
            todo.append(node)
    return whole_forward(ancestors(todo), graph.graph.nodes)


def begin_of_backward(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first call of the backward of the body."""
    return next((n for n in nodes if n.op == "call_function" and phase_of(n) == "body" and is_backward(n)), None)


def a_block_ahead(before: fx.Node | None, turns: fx.Node | None) -> fx.Node:
    """In front of which node something starts to come that computing must not wait for: the one that needs what came
    `before` it, for then a block of work is left. What the backward needs is not held through the end of the forward:
    with `turns`, the first call of the backward, not in front of that. One of the two is there.
    """
    return max(node for node in (before, turns) if node is not None)


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


def left_axes(config: DistConfig, axes: str) -> str:
    """Those of `axes`, joined by '.', that do not cut a tensor yet, as ep cuts the weights of experts."""
    used = [name for joined in config.shard_axes for name in joined.split(".")]
    left = [a for a in axes.split(".") if a and not any(config.mesh.overlap(a, one) for one in used)]
    return ".".join(left)


def shard_over(config: DistConfig, axis: str, shape: Sequence[Any]) -> DistConfig:
    """`config` of a tensor of `shape` with dim 0 also cut by `axis`, inside its other cuts."""
    return replace(config, dims=((*config.dims[0], AxisShard(axis)), *config.dims[1:])).whole(shape)
