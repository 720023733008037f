"""The hull of a speed curve, the continuous optimum, and the bound of a graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.waves import MetaOp, TaskGraph
from fxpar.waves.bound import Curve, relaxed, together_ms
from tests.repeat import examples
from tests.waves.plain import metaop


def test_a_corner_below_the_hull_is_left_out():
    curve = Curve.of(MetaOp("a", 1, {1: 8.5, 2: 8.2, 3: 8.9, 4: 2.0, 8: 1.5, 16: 0.1}), 8)
    assert curve.widths == (1, 2, 4, 8)  # 3 is slower than 2, 16 more than there are
    assert curve.corners == (0, 4, 8)  # 1 and 2 have less speed per device than 4
    assert curve.allotment(4.0) == pytest.approx(2)  # half of the time on 4 devices
    assert curve.neighbours(1 / (0.5 * 0.5 + 0.5 / 1.5)) == (4, 8, pytest.approx(0.5))


def test_equal_metaops_share_evenly():
    """L * T(N / 2): the acceptance of the sheet."""
    one = metaop("a", 12)
    curves = [Curve.of(one, 16)] * 2
    assert together_ms(curves, [12, 12], 16) == pytest.approx(12 * one.layer_ms[8])


def test_one_that_cannot_be_faster_decides():
    slow, quick = MetaOp("slow", 4, {1: 5.0}), metaop("quick", 2)
    assert together_ms([Curve.of(slow, 8), Curve.of(quick, 8)], [4, 2], 8) == 20


def test_fewer_devices_than_metaops():
    """They take turns: no width is below one device, but shares of time are."""
    curves = [Curve.of(MetaOp(name, 3, {1: 2.0}), 2) for name in "abc"]
    assert together_ms(curves, [3, 3, 3], 2) == pytest.approx(9)
    curves = [Curve.of(MetaOp(name, 3, {2: 2.0}), 2) for name in "abc"]
    assert together_ms(curves, [3, 3, 3], 2) == pytest.approx(18)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 9), st.floats(0, 2)), min_size=1, max_size=5),
    st.integers(1, 16),
)
@settings(max_examples=examples(60), deadline=None)
def test_bisection_equals_the_linear_program_without_edges(rows, devices):
    ripple = np.random.default_rng(len(rows)).uniform(0.7, 1.3, 17)
    found = [
        MetaOp(f"m{i}", layers, {n: fixed + work / n * ripple[n] for n in (1, 2, 3, 5, 8, 16)})
        for i, (layers, work, fixed) in enumerate(rows)
    ]
    curves = [Curve.of(one, devices) for one in found]
    together = together_ms(curves, [one.layers for one in found], devices)
    assert relaxed(TaskGraph(tuple(found)), curves, devices).bound_ms == pytest.approx(together, rel=1e-7)


def test_edges_raise_the_bound():
    graph = TaskGraph((metaop("a", 4, widest=2), metaop("b", 4, widest=2)), (("a", "b"),))
    curves = [Curve.of(one, 8) for one in graph.metaops]
    found = relaxed(graph, curves, 8)
    assert found.bound_ms == pytest.approx(2 * 4 * 4.4)
    assert found.metaop_ms == pytest.approx((17.6, 17.6))
