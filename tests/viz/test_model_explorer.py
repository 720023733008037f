"""Graphs and node data as Model Explorer reads them."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from fxpar.errors import VizDependencyError
from fxpar.viz.model_explorer import call_text, graph_collection, node_data, open_model_explorer, shown_parts
from tests.viz.shown import STRATEGIES, viewed


@pytest.fixture(scope="module")
def shown():
    return shown_parts(viewed(strategy) for strategy in STRATEGIES)


def test_ids_are_unique_and_edges_lead_somewhere(shown):
    collection = graph_collection("llama", shown)
    assert set(collection) == {"label", "graphs"}
    ids = [graph["id"] for graph in collection["graphs"]]
    assert len(ids) == len(set(ids))
    assert "dp2.tp2+sp forward" in ids
    assert "pp2.tp2 stage1.backward" in ids
    for graph in collection["graphs"]:
        nodes = [node["id"] for node in graph["nodes"]]
        assert len(nodes) == len(set(nodes))
        for node in graph["nodes"]:
            assert not node["namespace"].startswith("/")
            assert all(edge["sourceNodeId"] in nodes for edge in node.get("incomingEdges", ()))
            assert all(isinstance(pair["value"], str) for pair in node.get("attrs", ()))


def test_overlays_are_about_nodes_that_are_there(shown):
    graphs = {g["id"]: {n["id"] for n in g["nodes"]} for g in graph_collection("llama", shown)["graphs"]}
    overlays = node_data(shown)
    assert set(overlays) == {"wire_bytes", "predicted_ms", "local_bytes"}
    for overlay in overlays.values():
        for graph, data in overlay.items():
            assert set(data["results"]) <= graphs[graph]
            assert all(one["value"] > 0 for one in data["results"].values())
    sent = sum(one["value"] for one in overlays["wire_bytes"]["dp2.tp2+sp forward"]["results"].values())
    assert sent > 0


def test_its_own_classes_take_them(shown):
    builder = pytest.importorskip("model_explorer.graph_builder", reason="needs ai-edge-model-explorer")
    nodes = pytest.importorskip("model_explorer.node_data_builder", reason="needs ai-edge-model-explorer")
    known = {field.name for field in dataclasses.fields(builder.GraphNode)}
    for graph in graph_collection("llama", shown)["graphs"]:
        assert all(set(node) <= known for node in graph["nodes"])
        builder.Graph(**graph)
    for overlay in node_data(shown).values():
        for data in overlay.values():
            nodes.GraphNodeData(**data)


def test_calls_name_their_operands():
    assert call_text("({}, [{}, 2])", ["a", "b"]) == "(%a, [%b, 2])"


def test_opening_needs_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "model_explorer", None)
    with pytest.raises(VizDependencyError, match="ai-edge-model-explorer"):
        open_model_explorer("g.json", [])
