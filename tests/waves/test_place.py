"""Pieces on devices: near what they read, on few nodes, choices taken back where memory binds."""

from __future__ import annotations

import numpy as np
import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import PieceOrderError
from fxpar.waves import MetaOp, TaskGraph
from fxpar.waves.order import Piece, Problem
from fxpar.waves.place import Placer, overlap
from tests.waves.plain import metaop, nodes


def place(graph: TaskGraph, cluster: ClusterSpec, *pieces: Piece, memory_bytes: float | None = None):
    return Placer(Problem(graph, cluster, memory_bytes=memory_bytes), pieces).place()


def test_shares_of_a_batch():
    assert np.allclose(overlap(2, 4), [[0.25, 0.25, 0, 0], [0, 0, 0.25, 0.25]])
    assert np.allclose(overlap(3, 2).sum(1), 1 / 3)


def test_rows_stay_where_they_are():
    """From four devices to two and back: each position stands on a device that has its rows."""
    graph = TaskGraph((metaop("a", 6, output_bytes=1e6),))
    wide, narrow, again = place(graph, nodes(4), Piece(0, 4, 2), Piece(0, 2, 2), Piece(0, 4, 2))
    for one, other in ((wide, narrow), (narrow, again)):
        kept = [(p, other.devices.index(device)) for p, device in enumerate(one.devices) if device in other.devices]
        assert len(kept) == 2
        assert all(overlap(len(one.devices), len(other.devices))[p, q] > 0 for p, q in kept)
    assert [(one.first, one.last) for one in (wide, narrow, again)] == [(0, 2), (2, 4), (4, 6)]


def test_a_piece_that_fits_into_a_node_stands_in_one():
    graph = TaskGraph(tuple(metaop(name, 2) for name in "abc"))
    a, b, c = place(graph, nodes(8, 4), Piece(0, 2, 2), Piece(1, 4, 2), Piece(2, 2, 2))
    found = [{device // 4 for device in one.devices} for one in (a, b, c)]
    assert found == [found[0], {1} if found[0] == {0} else {0}, found[0]]


def test_a_reader_stands_where_its_source_does():
    graph = TaskGraph((metaop("a", 2, output_bytes=1e6), metaop("b", 2), metaop("c", 2)), (("a", "c"),))
    a, _, c = place(graph, nodes(8, 4), Piece(0, 4, 2), Piece(1, 4, 2), Piece(2, 4, 2))
    assert c.devices == a.devices


def test_who_shares_weights_stands_where_they_are():
    """Of the second task b comes first, and finds its weights on the other node."""
    towers = [metaop(f"{task}.{kind}", 2, state_bytes=1e9, weights=kind) for task in "xy" for kind in "ab"]
    pieces = [Piece(m, 2, 2) for m in (0, 1, 3, 2)]
    xa, xb, yb, ya = place(TaskGraph(tuple(towers)), nodes(4, 2), *pieces)
    assert (xa.devices, xb.devices) == (ya.devices, yb.devices)


def test_choices_are_taken_back_where_memory_binds():
    """One after the other, of 2, 3, 5 and 6 bytes on two devices of 8. b goes best beside a, so c goes to the other
    one, and d has nowhere to go: b has to leave a.
    """
    sizes = (2.0, 3.0, 5.0, 6.0)
    towers = [
        MetaOp(name, 1, {1: 1.0}, 1e9 if name == "a" else 0, size) for name, size in zip("abcd", sizes, strict=True)
    ]
    graph = TaskGraph(tuple(towers), (("a", "b"), ("b", "c"), ("c", "d")))
    pieces = [Piece(m, 1, 1) for m in range(4)]
    roomy = place(graph, nodes(2, 1), *pieces, memory_bytes=100.0)
    assert roomy[0].devices == roomy[1].devices
    found = place(graph, nodes(2, 1), *pieces, memory_bytes=8.0)
    assert found[0].devices == found[3].devices != found[1].devices == found[2].devices
    assert place(graph, nodes(2, 1), *pieces, memory_bytes=7.9) is None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(0, 1, 1), Piece(1, 1, 2), Piece(0, 1, 1)], "MetaOp 'b' begins before 'a', which it reads, is done"),
        ([Piece(0, 1, 2), Piece(1, 1, 1)], "MetaOp 'b' has 2 layers, and 1 of them run"),
    ],
)
def test_orders_that_are_not_whole(pieces, message):
    graph = TaskGraph((metaop("a", 2), metaop("b", 2)), (("a", "b"),))
    with pytest.raises(PieceOrderError, match=message):
        place(graph, nodes(2), *pieces)
