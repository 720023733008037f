"""Fronts and hulls, point for point."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fxpar.search.fronts import Hull, Limits, stage_front, undominated

few = st.integers(0, 6)


def beats(one, other) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


@given(points=st.lists(st.tuples(few, few, few, st.integers(0, 1)), min_size=1, max_size=12))
def test_undominated(points):
    """Every point is beaten by one that is kept of its kind, and no two of those beat each other."""
    mb, layers_s, exposed_s, kind = (np.array(column) for column in zip(*points, strict=True))
    kept = [points[i] for i in undominated(mb, layers_s.astype(float), exposed_s.astype(float), kind)]
    assert all(any(one[3] == point[3] and beats(one[:3], point[:3]) for one in kept) for point in points)
    assert not any(a[3] == b[3] and beats(a[:3], b[:3]) for a, b in itertools.permutations(kept, 2))


@example(points=[(0, 6), (1, 2), (6, 0)], mb=1)
@given(points=st.lists(st.tuples(few, few), min_size=1, max_size=8), mb=st.floats(0, 8))
def test_hull(points, mb):
    """The least that a mixture of at most two strategies takes; two are always enough."""
    x, y = (np.array(column) for column in zip(*points, strict=True))
    mixed = [np.inf]
    for a, b in itertools.product(range(len(points)), repeat=2):
        if x[a] <= mb:
            share = 1.0 if x[b] <= mb else (mb - x[a]) / (x[b] - x[a])
            mixed += [y[a], (1 - share) * y[a] + share * y[b]]
    assert np.isclose(Hull.of(x, y.astype(float)).least(np.array(mb)), min(mixed))


def test_the_steps_of_a_point():
    """Three layers of a fast and a small strategy: of each number of fast ones one point, and how it was made."""
    limits = Limits(*np.full((4, 1), np.inf))
    choices = np.array([3, 1]), np.array([1.0, 2.0]), np.array([0.0, 0.5]), np.array([0, 0]), np.zeros((1, 1))
    front = stage_front(3, *choices, limits, 0.0, most=100)
    assert sorted(zip(front.mb, front.layers_s, front.exposed_s, strict=True)) == [
        (3, 6.0, 1.5),
        (5, 5.0, 1.0),
        (7, 4.0, 0.5),
        (9, 3.0, 0.0),
    ]
    assert front.whole
    for point, mb in enumerate(front.mb):
        assert front.chosen(point).count(0) == (mb - 3) / 2


def test_limits_of_one_of_the_ends_are_enough():
    """Room for two fast layers with one of the ends, time for one slow layer with the other."""
    limits = Limits(np.array([6.0, 4.0]), np.array([2.0, 3.0]), np.array([9.0, 9.0]), np.array([9.0, 9.0]))
    choices = np.array([3, 1]), np.array([1.0, 2.0]), np.array([0.0, 0.0]), np.array([0, 0]), np.zeros((1, 1))
    front = stage_front(2, *choices, limits, 0.0, most=100)
    assert sorted(front.mb) == [4, 6]


def test_a_front_that_is_cut_off_says_so():
    limits = Limits(*np.full((4, 1), np.inf))
    choices = np.array([3, 1]), np.array([1.0, 2.0]), np.array([0.0, 0.0]), np.array([0, 0]), np.zeros((1, 1))
    front = stage_front(2, *choices, limits, 0.0, most=1)
    assert not front.whole
    assert list(front.layers_s) == [2.0]


def test_sync_that_is_not_felt_does_not_count():
    """Up to 0.5 s of it: then the fast strategy, which is as small, is the only one; below that both are of use."""
    limits = Limits(*np.full((4, 1), np.inf))
    choices = np.array([1, 1]), np.array([1.0, 2.0]), np.array([0.25, 0.0]), np.array([0, 0]), np.zeros((1, 1))
    assert list(stage_front(2, *choices, limits, 0.5, most=100).layers_s) == [2.0]
    assert sorted(stage_front(2, *choices, limits, 0.25, most=100).layers_s) == [2.0, 3.0]
    assert sorted(stage_front(2, *choices, limits, 0.0, most=100).layers_s) == [2.0, 3.0, 4.0]


@given(
    choices=st.lists(st.tuples(few, few, few, st.integers(0, 1)), min_size=1, max_size=4),
    layers=st.integers(1, 3),
    hidden_s=st.integers(0, 12),
    border_s=st.lists(st.integers(0, 3), min_size=2, max_size=2),
)
@example(choices=[(1, 1, 5, 0), (1, 2, 0, 0)], layers=2, hidden_s=5, border_s=[0, 0])
@example(choices=[(3, 2, 0, 0), (4, 2, 0, 0), (4, 0, 0, 1)], layers=3, hidden_s=0, border_s=[3, 6])
def test_a_front_replaces_all_plans(choices, layers, hidden_s, border_s):
    """Each sequence of strategies is beaten by a point; and each point is what its own sequence takes."""
    mb, layer_s, exposed_s, layouts = (np.array(column) for column in zip(*choices, strict=True))
    border = np.array([[0.0, border_s[0]], [border_s[1], 0.0]])
    columns = mb, layer_s.astype(float), exposed_s.astype(float), layouts, border
    front = stage_front(layers, *columns, Limits(*np.full((4, 1), np.inf)), float(hidden_s), most=1000)

    def taken(plan) -> tuple[float, float, float]:
        crossed = sum(border[layouts[a], layouts[b]] for a, b in itertools.pairwise(plan))
        return mb[list(plan)].sum(), layer_s[list(plan)].sum() + crossed, exposed_s[list(plan)].sum()

    points = list(zip(front.mb, front.layers_s, front.exposed_s, strict=True))
    assert [taken(front.chosen(at)) for at in range(len(points))] == points
    for plan in itertools.product(range(len(choices)), repeat=layers):
        *small, exposed = taken(plan)
        assert any(beats((*point[:2], max(point[2], hidden_s)), (*small, max(exposed, hidden_s))) for point in points)
