"""Insert reshards: make every operand lie as its user wants it.

Before: each node has the placement of its results (`dist`) and of the operands it wants (`dist_in`); these may differ.
After: they agree; where they differed stands a `reshard`, shared by all users that want the same placement. It belongs
to the module that makes the value (of a sum: its last term), and so do the collectives that it becomes.

    %h : f32[T, 64] P(tp) = mm(%x, %w)          %h : f32[T, 64] P(tp) = mm(%x, %w)
    %y : f32[T, 64]       = add(%h, %r)         %h_r : f32[T, 64]     = reshard(%h)
                                                %y : f32[T, 64]       = add(%h_r, %r)

Cost: none by itself; the reshards are what `annotate` counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpar.ir.collectives import reshard
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.graph import AnnotatedGraph
from fxpar.ir.node_meta import dist_of, dists_of, fqn_of, tensor_of
from fxpar.ir.pass_base import Tier, insert, replace_operands, tensor_operands
from fxpar.rules.view import resolve


@dataclass(frozen=True)
class InsertReshards:
    """No options."""

    name: ClassVar[str] = "insert_reshards"
    tier: ClassVar[Tier] = "exact"

    def __call__(self, graph: AnnotatedGraph) -> None:
        made: dict[fx.Node, list[fx.Node]] = {}  # value -> its other placements so far
        for node in list(graph.graph.nodes):
            wanted = node.meta.get("dist_in")
            if wanted is None:
                continue
            operands = tensor_operands(node)
            if all(dist_of(o) == w for o, w in zip(operands, wanted, strict=True)):
                continue
            new = [
                o if dist_of(o) == w else _placed(graph.graph, made, o, w, node)
                for o, w in zip(operands, wanted, strict=True)
            ]
            replace_operands(node, new)


def _placed(
    graph: fx.Graph, made: dict[fx.Node, list[fx.Node]], value: fx.Node, wanted: DistConfig, user: fx.Node
) -> fx.Node:
    """`value` in the wanted placement: found, cut from one that is there, or made."""
    known = made.setdefault(value, [])
    for other in known:
        if dist_of(other) == wanted:
            return other
    source = next((o for o in known if _is_slice(dist_of(o), wanted)), value)
    with graph.inserting_before(user):
        node = insert(
            graph,
            reshard,
            (source,),
            like=user if user.op != "output" else value,
            tensor=tensor_of(value),
            dist=wanted,
        )
    maker = _maker(value)
    if maker.op == "call_function":
        if user.op != "output":
            node.meta["reader"] = fqn_of(user)
        node.meta |= {key: maker.meta[key] for key in ("fqn", "source") if key in maker.meta}
    known.append(node)
    return node


def _maker(value: fx.Node) -> fx.Node:
    """The op that makes a value; of partial sums, which views and additions pass on, the last term."""
    while True:
        node = resolve(value)[0]
        axes = _partial_axes(node)
        passed = [o for o in node.all_input_nodes if axes & _partial_axes(o)]
        if not passed:
            return node
        value = max(passed)


def _partial_axes(node: fx.Node) -> set[str]:
    return {axis for dist in dists_of(node) if dist is not None for axis, _ in dist.partial}


def _is_slice(held: DistConfig, wanted: DistConfig) -> bool:
    """Whether `wanted` is a local piece of `held`."""
    if held.partial != wanted.partial:
        return False
    return all(w[: len(h)] == h for h, w in zip(held.dims, wanted.dims, strict=True))
