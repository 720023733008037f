"""Do two captures of a model compute the same loss, as one in evaluation mode and one as it is trained?"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.ir.graph import Input, LogicalGraph


def is_same_loss(one: LogicalGraph, other: LogicalGraph) -> bool:
    """Whether loss and metrics are the same calls on the same inputs, in the same order, and so are new values of
    buffers that these read: the next micro-batch has them. What else the graphs compute, gradients and other buffers,
    is not compared. Calls in another order, and constants without values, count as different: then nothing is known.
    """
    (named, mine), (others_named, theirs) = _loss_and_calls(one), _loss_and_calls(other)
    if len(mine) != len(theirs) or named.keys() != others_named.keys():
        return False
    known, others = (dict(zip(graph.placeholders, graph.inputs, strict=True)) for graph in (one, other))
    pair: dict[fx.Node, fx.Node] = {}
    for node, twin in zip(mine, theirs, strict=True):
        if node in known and twin in others:
            alike = _is_same_input(one, known[node], other, others[twin])
        else:
            operands = fx.node.map_arg((node.args, node.kwargs), pair.__getitem__)
            alike = (node.op, node.target) == (twin.op, twin.target)
            alike &= _comparable(operands) == _comparable((twin.args, twin.kwargs))
        if not alike or node.meta.get("tensor") != twin.meta.get("tensor"):  # sizes have none
            return False
        pair[node] = twin
    return all(pair[node] is others_named[name] for name, node in named.items())


def _comparable(operands: Any) -> Any:
    """With a word for numbers that differ from themselves: losses fill in nan."""
    return fx.node.map_aggregate(operands, lambda one: "nan" if isinstance(one, float) and one != one else one)


def _loss_and_calls(graph: LogicalGraph) -> tuple[dict[tuple[str, str], fx.Node], list[fx.Node]]:
    """The loss, the metrics, and the new values of buffers that they read, by kind and FQN; and what these are computed
    from, and themselves, in the order of the graph.
    """
    results: dict[tuple[str, str], fx.Node] = {
        (out.kind, out.fqn): node for node, out in zip(graph.results, graph.outputs, strict=True)
    }
    buffers = {at: info.fqn for at, info in zip(graph.placeholders, graph.inputs, strict=True) if info.kind == "buffer"}
    named = {name: node for name, node in results.items() if name[0] == "loss"}
    todo = list(named.values())
    found = set(todo)
    while todo:
        node = todo.pop()
        sources = list(node.all_input_nodes)
        updated = "buffer", buffers.get(node, "")
        if updated in results:
            named[updated] = results[updated]
            sources.append(results[updated])
        for source in sources:
            if source not in found:
                found.add(source)
                todo.append(source)
    return named, [node for node in graph.gm.graph.nodes if node in found]


def _is_same_input(one: LogicalGraph, mine: Input, other: LogicalGraph, theirs: Input) -> bool:
    """A constant by its values, as its name counts those of its own capture."""
    if mine.kind != "constant" or theirs.kind != "constant":
        return (mine.kind, mine.fqn, mine.meta) == (theirs.kind, theirs.fqn, theirs.meta)
    value, twin = one.constants[mine.fqn], other.constants[theirs.fqn]
    if value is twin:
        return True
    return not (value.is_meta or twin.is_meta) and value.dtype == twin.dtype and torch.equal(value, twin)
