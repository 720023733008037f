"""The models of Spindle's evaluation, by figures that are known of them."""

from __future__ import annotations

import pytest

from fxpar.waves import CASES
from fxpar.waves.bound import Curve, together_ms

# Sums of the continuous optimum over levels, and of max(area, critical path), as measured with the open planner.
KNOWN = {
    "ofasys-7": {8: (234, None), 16: (130, 110), 32: (78, 55.3), 64: (52, 33.2)},
    "qwen-val": {8: (4616, None), 16: (2325, 2298), 32: (1180, 1149), 64: (607, 575)},
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_assumed_of_shapes_gives_the_figures(name):
    graph = CASES[name]
    for devices, (levels, least) in KNOWN[name].items():
        curves = [Curve.of(one, devices) for one in graph.metaops]
        found = sum(
            together_ms([curves[m] for m in level], [graph.metaops[m].layers for m in level], devices)
            for level in graph.levels
        )
        assert found == pytest.approx(levels, rel=0.01)
        if least is not None:
            area = sum(one.layers * one.layer_ms[1] for one in graph.metaops) / devices
            ends: dict[int, float] = {}
            for m in graph.order:
                begun = max((ends[j] for j in graph.before[m]), default=0.0)
                ends[m] = begun + graph.metaops[m].layers * curves[m].least_ms
            assert max(area, *ends.values()) == pytest.approx(least, rel=0.01)
