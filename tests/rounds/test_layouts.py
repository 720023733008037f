"""Layouts are all that there are, and teams stand inside nodes."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.rounds.layouts import all_layouts, count_layouts, place, placeable

POWERS = (64, 32, 16, 8, 4, 2, 1)


def test_all_binary_partitions_of_64_devices():
    found = all_layouts(64, POWERS, 8)
    assert len(found) == len(np.unique(found, axis=0)) == count_layouts(64, POWERS) == 1828
    assert (found @ np.array(POWERS) == 64).all()
    assert len(all_layouts(64, POWERS[:-1], 8)) == 202
    assert count_layouts(128, (128, *POWERS)) == 27338


def test_layouts_that_cannot_stand_inside_nodes_are_left_out():
    """Of 12 devices on two nodes of six, three teams of four would have one on both."""
    found = {tuple(one) for one in all_layouts(12, (4, 2), 6).tolist()}
    assert found == {(2, 2), (1, 4), (0, 6)}


@pytest.mark.parametrize(("degrees", "devices", "per_node"), [(POWERS, 64, 8), ((12, 6, 5, 3, 2, 1), 24, 8)])
def test_teams_stand_apart_and_inside_nodes(degrees, devices, per_node):
    for counts in all_layouts(devices, degrees, per_node)[::37]:
        taken: list[int] = []
        for degree, firsts in zip(degrees, place(counts, degrees, devices, per_node), strict=True):
            for first in firsts:
                assert degree > per_node or first // per_node == (first + degree - 1) // per_node
                if degree & (degree - 1) == 0 and degrees == POWERS:
                    assert first % degree == 0
                taken += range(first, first + degree)
        assert len(taken) == len(set(taken)) <= devices
        assert set(taken) <= set(range(devices))


def test_a_layout_is_made_to_fit():
    assert place((3, 0), (4, 2), 12, 6) is None
    assert placeable((3, 0), (4, 2), 12, 6) == (2, 2)  # one goes, and what is left is used
    assert placeable((0, 0, 1), (8, 4, 1), 16, 8) == (1, 1, 4)
