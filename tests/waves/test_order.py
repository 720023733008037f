"""When pieces of an order begin and end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fxpar.cost.cluster import GPU, usual_cluster
from fxpar.errors import ClusterError, TaskGraphError
from fxpar.waves import MetaOp, TaskGraph
from fxpar.waves.order import Piece, Problem
from tests.waves.plain import nodes

TIMES = {1: 4.0, 2: 2.0, 4: 1.0}


def problem(*edges: tuple[str, str], output_bytes: float = 0.0, per_node: int = 2) -> Problem:
    metaops = tuple(MetaOp(name, 4, TIMES, output_bytes) for name in "abc")
    return Problem(TaskGraph(metaops, edges), nodes(4, per_node, 100.0, 10.0))


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


GRAPH = TaskGraph((MetaOp("a", 1, TIMES),))


def test_devices_are_those_of_the_cluster():
    """400 Gb/s of a node are shared by eight, though one alone sends 25 GB/s."""
    cluster = replace(usual_cluster(16), node_gb_per_s=50.0)
    found = Problem(GRAPH, cluster)
    assert (found.devices, found.per_node, found.nodes) == (16, 8, 2)
    assert found.ms_per_byte == (1e-6 / 200, 1e-6 / 6.25)
    assert (found.memory_bytes, found.held_bytes) == (math.inf, 0)
    known = Problem(GRAPH, replace(cluster, device=replace(GPU, memory_gb=80.0)), 9)
    assert (known.devices, known.nodes, known.memory_bytes) == (9, 2, 80e9)
    assert Problem(GRAPH, known.cluster, memory_bytes=8e9).memory_bytes == 8e9


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"devices": 9}, ClusterError, "too small for strategies on 9 ranks"),
        ({"devices": 0}, TaskGraphError, "devices: 0 cannot be"),
        ({"memory_bytes": math.nan}, TaskGraphError, "memory_bytes: nan cannot be"),
        ({"held_bytes": -1}, TaskGraphError, "held_bytes: -1 cannot be"),
    ],
)
def test_numbers_that_cannot_be(given, error, message):
    with pytest.raises(error, match=message):
        Problem(GRAPH, nodes(8), **given)
