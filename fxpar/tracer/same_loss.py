"""Do two captures of a model compute the same loss, as one in evaluation mode and one as it is trained?"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.ir.graph import Input, LogicalGraph


def is_same_loss(one: LogicalGraph, other: LogicalGraph) -> bool:
    """Whether loss and metrics are the same calls on the same inputs, in the same order. What else the graphs compute,
    gradients and new values of buffers, is not compared. Calls in another order, and constants without values, count as
    different: then nothing is known.
    """
    mine, theirs = _calls(one), _calls(other)
    if len(mine) != len(theirs) or _named_results(one).keys() != _named_results(other).keys():
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
    return all(pair[node] is _named_results(other)[name] for name, node in _named_results(one).items())


def _comparable(operands: Any) -> Any:
    """With a word for numbers that differ from themselves: losses fill in nan."""
    return fx.node.map_aggregate(operands, lambda one: "nan" if isinstance(one, float) and one != one else one)


def _named_results(graph: LogicalGraph) -> dict[str, fx.Node]:
    """The loss and the metrics."""
    return {out.fqn: node for node, out in zip(graph.results, graph.outputs, strict=True) if out.kind == "loss"}


def _calls(graph: LogicalGraph) -> list[fx.Node]:
    """What these are computed from, and themselves, in the order of the graph."""
    todo = list(_named_results(graph).values())
    found = set(todo)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return [node for node in graph.gm.graph.nodes if node in found]


def _is_same_input(one: LogicalGraph, mine: Input, other: LogicalGraph, theirs: Input) -> bool:
    """A constant by its values, as its name counts those of its own capture."""
    if mine.kind != "constant" or theirs.kind != "constant":
        return (mine.kind, mine.fqn, mine.meta) == (theirs.kind, theirs.fqn, theirs.meta)
    value, twin = one.constants[mine.fqn], other.constants[theirs.fqn]
    if value is twin:
        return True
    return not (value.is_meta or twin.is_meta) and value.dtype == twin.dtype and torch.equal(value, twin)
