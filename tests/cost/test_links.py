"""Which links a process group's ranks send over: against every pair of ranks, one by one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.links import crosses_nodes, exchange_byte_s
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from tests.cost.programs import PAIR


def by_pairs(mesh: Mesh, axes: tuple[str, ...], cluster: ClusterSpec) -> float:
    """Seconds of the rank that is busiest, where each sends a byte to each other of its process group."""
    speed = {True: cluster.inter_gb_per_s * 1e9, False: cluster.intra_gb_per_s * 1e9}
    if cluster.node_gb_per_s is not None:
        speed[True] = min(speed[True], cluster.node_gb_per_s * 1e9 / cluster.devices_per_node)
    slowest = 0.0
    for rank in mesh.ranks:
        sent = {True: 0.0, False: 0.0}
        for other in mesh.group_of(rank, axes):
            if other != rank:
                sent[rank // cluster.devices_per_node != other // cluster.devices_per_node] += 1.0
        slowest = max(slowest, sent[True] / speed[True], sent[False] / speed[False])
    return slowest


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
    ],
)
def test_each_part_of_an_exchange_takes_its_own_link(strategy: str, axis: str, cluster: ClusterSpec) -> None:
    mesh = Strategy.parse(strategy).mesh
    found = exchange_byte_s(mesh, axis, cluster)
    assert isinstance(found, Fraction)
    assert float(found) == pytest.approx(by_pairs(mesh, tuple(axis.split(".")), cluster), rel=1e-12)


def test_which_axes_leave_a_node():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert not crosses_nodes(mesh, "tp", PAIR)
    assert crosses_nodes(mesh, "dp", PAIR)
    assert crosses_nodes(mesh, "dp.tp", PAIR)
    assert crosses_nodes(Mesh((("tp", 2),), 1), "tp", PAIR)
    assert not crosses_nodes(Mesh((("tp", 2),), 2), "tp", PAIR)
