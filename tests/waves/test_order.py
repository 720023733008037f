"""When pieces of an order begin and end."""

from __future__ import annotations

import pytest

from fxpar.waves import Devices, MetaOp, TaskGraph
from fxpar.waves.order import Piece, Problem

TIMES = {1: 4.0, 2: 2.0, 4: 1.0}


def problem(*edges: tuple[str, str], output_bytes: float = 0.0, per_node: int = 2) -> Problem:
    metaops = tuple(MetaOp(name, 4, TIMES, output_bytes) for name in "abc")
    return Problem(TaskGraph(metaops, edges), Devices(4, per_node, within_gb_per_s=100, between_gb_per_s=10))


def test_pieces_wait_for_devices_and_for_each_other():
    pieces = [Piece(0, 2, 4), Piece(1, 1, 1), Piece(1, 2, 3), Piece(2, 4, 4)]
    starts, ends = problem().times(pieces)
    assert starts == [0, 0, 4, 10]
    assert ends == [8, 4, 10, 14]
    assert problem(("a", "b")).times(pieces)[0] == [0, 8, 12, 18]


def test_nobody_overtakes():
    """c would fit beside a, but stands behind b, which does not."""
    assert problem().times([Piece(0, 2, 4), Piece(1, 4, 4), Piece(2, 1, 4)])[0] == [0, 8, 12]


def test_what_is_handed_on_takes_time():
    """100 MB, there as an activation and back as a gradient, at 100 GB/s within a node and 10 to another."""
    found = problem(("a", "b"), output_bytes=1e8)
    pieces = [Piece(0, 1, 2), Piece(0, 2, 2), Piece(1, 4, 4)]
    starts, ends = found.times(pieces)
    assert ends == pytest.approx([8, 8 + 2 + 4, 14 + 20 / 2 + 4])
    assert starts == pytest.approx([0, 8, 14])
    assert found.times([Piece(0, 2, 1), Piece(0, 2, 3)])[1] == [2, 8]  # nothing where the width stays


def test_a_limit_ends_it():
    assert problem().times([Piece(0, 4, 4), Piece(1, 4, 4), Piece(2, 4, 4)], 7.0)[1] == [4, 8]
