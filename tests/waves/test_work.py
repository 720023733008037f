"""Descriptions of MetaOps, graphs and devices that cannot be."""

from __future__ import annotations

import itertools
import math

import pytest

from fxpar.errors import TaskGraphError
from fxpar.waves import MetaOp, TaskGraph
from tests.waves.plain import metaop


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "name = '' says nothing"),
        ({"layers": 0}, "MetaOp 'a', layers: 0 is not a number of layers"),
        ({"layers": 2.5}, "layers: 2.5 is not a number"),
        ({"layers": True}, "layers: True is not a number"),
        ({"layer_ms": {}}, "layer_ms: it is empty"),
        ({"layer_ms": {0: 1.0}}, "layer_ms: 0 is not a number of devices"),
        ({"layer_ms": {2: math.nan}}, r"layer_ms.2: nan is not a time"),
        ({"layer_ms": {2: 0.0}}, r"layer_ms.2: 0.0 is not a time"),
        ({"layer_ms": {2: "fast"}}, r"layer_ms.2: 'fast' is not a time"),
        ({"output_bytes": -1}, "output_bytes: -1 is not a number of bytes"),
        ({"saved_bytes": math.inf}, "saved_bytes: inf is not a number of bytes"),
        ({"gradient_bytes": -1}, "gradient_bytes: -1 is not a number of bytes"),
        ({"gradient_bytes": ""}, "gradient_bytes: '' is not a number of bytes"),
    ],
)
def test_metaops_that_cannot_be(changed, message):
    with pytest.raises(TaskGraphError, match=message):
        MetaOp(**({"name": "a", "layers": 1, "layer_ms": {1: 1.0}} | changed))


@pytest.mark.parametrize(
    ("names", "edges", "message"),
    [
        ("", (), "metaops: there is none"),
        ("aba", (), "MetaOp 'a': two have this name"),
        ("ab", (("a", "c"),), "edge 'a' -> 'c': there is no MetaOp 'c'"),
        ("abc", (("a", "b"), ("b", "c"), ("c", "a")), "is a cycle, so none of them can begin"),
        ("a", (("a", "a"),), "a -> a is a cycle"),
    ],
)
def test_graphs_that_cannot_be(names, edges, message):
    with pytest.raises(TaskGraphError, match=message):
        TaskGraph(tuple(metaop(name, 1) for name in names), edges)


def test_a_cycle_is_named_along_its_edges():
    edges = (("a", "b"), ("b", "c"), ("c", "a"))
    with pytest.raises(TaskGraphError) as found:
        TaskGraph(tuple(metaop(name, 1) for name in "abc"), edges)
    way = str(found.value).partition(": ")[2].partition(" is a")[0].split(" -> ")
    assert set(itertools.pairwise(way)) == set(edges)


def test_shared_weights_are_equal():
    with pytest.raises(TaskGraphError, match="'b', weights: 'a' has the same weights, and other layers"):
        TaskGraph((metaop("a", 2, weights="w"), metaop("b", 3, weights="w")))
    with pytest.raises(TaskGraphError, match="'w', weights: 'a' has the same weights"):
        TaskGraph((metaop("a", 2, weights="w"), metaop("w", 2, state_bytes=1.0)))


def test_levels():
    graph = TaskGraph(tuple(metaop(name, 1) for name in "abcd"), (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b")))
    assert graph.levels == ((0, 3), (1,), (2,))
    assert graph.before == ((), (0,), (0, 1), ())
    assert graph.after == ((1, 2), (2,), (), ())
