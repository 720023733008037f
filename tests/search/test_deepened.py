"""Layers that are copied against layers that are captured."""

from __future__ import annotations

import pytest
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import group_cost
from fxpar.ir.fqn import block_of
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.lowering import lower
from fxpar.memory import predict_memory
from fxpar.search.deepened import deepened, is_same_graph, repeating
from fxpar.search.price import Depth
from tests.captured import gpt, llama

A800 = ClusterSpec.from_file("a800").with_nodes(1, 4)


def test_what_is_copied_is_what_is_captured():
    """With fewer and with more layers than there are to copy from; also where two layers are a period."""
    graphs = {layers: llama(layers=layers).graph for layers in (2, 3, 4)}
    for layers in (2, 4):
        found = deepened(graphs[3], layers)
        assert is_same_graph(found, graphs[layers])
        assert not is_same_graph(found, graphs[3])
    six = deepened(graphs[3], 6)
    assert is_same_graph(deepened(six, 4, period=2), graphs[4])
    ends = [_last_of_the_first_layer(one) for one in graphs.values()]
    names = [node.meta["fqn"] for node in ends]
    try:
        for node in ends:  # as a cast in front of the embedding's backward is called
            node.meta["fqn"] = "embedding"
        assert all(is_same_graph(deepened(graphs[3], layers), graphs[layers]) for layers in (2, 4))
    finally:
        for node, name in zip(ends, names, strict=True):
            node.meta["fqn"] = name
    params = [info.fqn.replace(".", "_") for info in six.params()]
    assert [node.name for node in six.placeholders[: len(params)]] == params


def _last_of_the_first_layer(graph: LogicalGraph) -> fx.Node:
    named = [node for node in graph.gm.graph.nodes if is_backward(node)]
    return [node for node in named if block_of(fqn_of(node)) == "layers.0"][-1]


def test_what_does_not_repeat_is_captured():
    asked = []

    def captured(layers: int):
        asked.append(layers)
        return llama(layers=min(layers, 4)).graph

    rows = repeating(captured, Depth(60))
    assert rows(6) is rows(6)
    assert set(asked) == {2, 3}
    graph = rows(3)
    other = next(node for node in graph.gm.graph.nodes if node.meta.get("fqn") == "layers.1.ffn_norm")
    known, other.meta["tensor"] = other.meta["tensor"], None  # a layer that is another one
    try:
        assert deepened(graph, 6) is None
    finally:
        other.meta["tensor"] = known
    assert deepened(gpt().graph, 6) is None  # it has two layers
    assert rows(2) is captured(2)


@pytest.mark.parametrize("text", ["dp2.tp2+sp+zero3", "pp2+remat(selective)"])
def test_it_costs_what_a_capture_costs(text: str):
    copied, captured = deepened(llama(layers=3).graph, 4), llama(layers=4).graph
    found, want = (lower(one, text, for_store=True) for one in (copied, captured))
    assert group_cost(found, A800) == group_cost(want, A800)
    sizes = {"T": 64}
    assert predict_memory(found, sizes) == predict_memory(want, sizes)
