"""Copies of graphs: the same nodes, operands and metadata, and nothing shared that a pass changes."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxpar.ir.copies import copy_graph, copy_node


def original() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    joined = graph.call_function(torch.cat, ([x, y, x],), {"dim": 0})
    cut = graph.call_function(operator.getitem, (joined, (slice(None, 3), 1)))
    graph.output((cut, x))
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    return graph


def test_a_copy_is_what_torch_makes():
    graph, copied = original(), {}
    made, theirs = copy_graph(graph, copied), fx.Graph()
    theirs.output(theirs.graph_copy(graph, {}))
    made.lint()
    for mine, other, node in zip(made.nodes, theirs.nodes, graph.nodes, strict=True):
        assert (mine.op, mine.name, mine.target, str(mine.args), str(mine.kwargs)) == (
            other.op,
            other.name,
            other.target,
            str(other.args),
            str(other.kwargs),
        )
        assert [n.name for n in mine.all_input_nodes] == [n.name for n in other.all_input_nodes]
        if node.op != "output":
            assert mine.meta == other.meta == node.meta
            assert mine.meta is not node.meta
            assert copied[node] is mine
            assert [n.name for n in mine.users] == [n.name for n in node.users]


def test_a_node_on_other_operands():
    graph = original()
    x, y, joined, *_ = graph.nodes
    with graph.inserting_after(joined):
        other = copy_node(graph, joined, {x: y, y: x}.__getitem__)
    assert str(other.args) == "([y, x, y],)"
    assert other.kwargs == joined.kwargs
    assert set(other.all_input_nodes) == {x, y}
