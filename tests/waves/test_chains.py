"""What each rank runs when, by piece of a plan."""

from __future__ import annotations

from fxpar.waves import MetaOp, TaskGraph, plan_waves
from fxpar.waves.chains import Chain, TasksPlan
from tests.waves.plain import nodes


def test_first_and_last_layers_bring_what_runs_with_them():
    graph = TaskGraph((MetaOp("image", 12, {1: 6.0, 2: 3.2, 4: 1.8}), MetaOp("text", 8, {1: 2.0, 2: 1.2})))
    image, text = (
        Chain(one.name, "pairs", tuple((f"{one.name}.{i}",) for i in range(one.layers)), ("in",), ("out",), {1: "dp1"})
        for one in graph.metaops
    )
    strategies = {1: "dp1", 2: "dp2", 4: "cp4"}
    found = TasksPlan(
        plan_waves(graph, nodes(4)),
        tuple(Chain(c.metaop, c.task, c.layers, c.before, c.behind, strategies) for c in (image, text)),
    )
    first, second, whole = found.assignments
    assert (first.metaop, first.wave, first.first, first.last, first.strategy) == ("image", 0, 0, 9, "cp4")
    assert first.modules == ("in", *(f"image.{i}" for i in range(9)))
    assert second.modules == ("image.9", "image.10", "image.11", "out")
    assert (second.wave, whole.wave) == (1, 1)
    assert whole.modules == ("in", *(f"text.{i}" for i in range(8)), "out")
    assert whole.ranks == (2, 3)
    assert found.strategies[1, 2] == "dp2"
