"""Which links a process group's ranks send over: against every message, one by one."""

from __future__ import annotations

from collections import defaultdict

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.links import Loads, crosses_nodes, exchange, ring
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from tests.cost.programs import PAIR


def by_messages(mesh: Mesh, axes: tuple[str, ...], cluster: ClusterSpec, *, to_all: bool) -> float:
    """Seconds of the link that is busiest, where each rank sends a byte to all others of its process group, or to the
    next one: every message is looked at.
    """
    sent = defaultdict[tuple[str, int], float](float)
    for rank in mesh.ranks:
        group = mesh.group_of(rank, axes)
        following = group[(group.index(rank) + 1) % len(group)]
        for other in group if to_all else (following,):
            here, there = rank // cluster.devices_per_node, other // cluster.devices_per_node
            if here == there:
                sent["inside", rank] += (other != rank) / cluster.intra_gb_per_s
            else:
                sent["between", rank] += 1 / cluster.inter_gb_per_s
                sent["node", here] += 0 if cluster.node_gb_per_s is None else 1 / cluster.node_gb_per_s
    return max(sent.values()) / 1e9


@pytest.mark.parametrize(
    ("strategy", "axis", "cluster"),
    [
        ("cp4", "cp", PAIR),
        ("cp2.tp2", "cp", PAIR),  # all of it between nodes
        ("cp2.tp2", "tp", PAIR),  # none of it
        ("cp2.tp2", "cp.tp", PAIR),
        ("dp2.ep8", "ep", ClusterSpec(2, 8, 200.0, 12.5, 20.0)),
        ("dp2.ep8", "dp.ep", ClusterSpec(2, 8, 200.0, 12.5, 20.0)),
        ("ep8", "ep", ClusterSpec(3, 3, 400.0, 50.0, 0.0)),  # a node with two of them, which send most to others
        ("ep8", "ep", ClusterSpec(2, 6, 10.0, 100.0, 0.0)),  # links inside are the slow ones
        ("ep8", "ep", ClusterSpec(2, 4, 400.0, 50.0, 0.0, node_gb_per_s=20.0)),
        ("dp4.ep2", "dp", ClusterSpec(2, 4, 400.0, 50.0, 0.0, node_gb_per_s=70.0)),
        ("dp4.ep2", "dp.ep", ClusterSpec(2, 4, 400.0, 50.0, 0.0, node_gb_per_s=70.0)),
    ],
)
def test_what_is_sent_takes_its_own_link(strategy: str, axis: str, cluster: ClusterSpec) -> None:
    mesh, axes = Strategy.parse(strategy).mesh, tuple(axis.split("."))
    for loads, to_all in ((exchange(mesh, axis, cluster), True), (ring(mesh, axis, cluster), False)):
        expected = by_messages(mesh, axes, cluster, to_all=to_all)
        assert float(loads.byte_s(cluster)) == pytest.approx(expected, rel=1e-12)


def test_a_ring_leaves_a_node_once_and_rings_side_by_side_each():
    """So that one ring has all that a node puts on the network."""
    mesh = Strategy.parse("dp2.tp4").mesh
    assert ring(mesh, "dp.tp", ClusterSpec(2, 4, 400.0, 50.0, 0.0)) == Loads(1, 1, 1)
    assert ring(mesh, "dp", ClusterSpec(2, 4, 400.0, 50.0, 0.0)) == Loads(0, 1, 4)
    assert ring(mesh, "tp", ClusterSpec(2, 4, 400.0, 50.0, 0.0)) == Loads(1, 0, 0)
    assert exchange(mesh, "dp.tp", ClusterSpec(2, 4, 400.0, 50.0, 0.0)) == Loads(3, 4, 16)


def test_which_axes_leave_a_node():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert not crosses_nodes(mesh, "tp", PAIR)
    assert crosses_nodes(mesh, "dp", PAIR)
    assert crosses_nodes(mesh, "dp.tp", PAIR)
    assert crosses_nodes(Mesh((("tp", 2),), 1), "tp", PAIR)
    assert not crosses_nodes(Mesh((("tp", 2),), 2), "tp", PAIR)
