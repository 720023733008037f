"""Which way tokens take to their experts."""

from __future__ import annotations

import pytest

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.hops import hops_to_experts
from fxpar.ir.strategy import Strategy

MB = 1_000_000
SLOW = ClusterSpec(4, 4, 100.0, 10.0, 0.0)
NODE_FIRST = ("ep:(1)2", "ep:(2)4")


@pytest.mark.parametrize(
    ("strategy", "cluster", "slots", "nbytes", "hops"),
    [
        ("ep8", SLOW, 8, MB, NODE_FIRST),
        ("ep8", None, 8, MB, ("ep",)),
        ("ep8", ClusterSpec(1, 8, 100.0, 10.0, 0.0), 8, MB, ("ep",)),
        ("ep8", SLOW, 1, MB, ("ep",)),  # a token for one expert goes to one node anyway
        ("ep8", ClusterSpec(4, 4, 10.0, 100.0, 0.0), 8, MB, ("ep",)),
        ("ep8", ClusterSpec(4, 4, 100.0, 10.0, 50.0), 8, 1000, ("ep",)),  # what a second exchange waits for is more
        ("dp2.ep4.tp2", SLOW, 8, MB, ("ep:(1)2", "ep:(2)2")),
        ("ep4.tp4", SLOW, 8, MB, ("ep",)),  # each of its ranks is on a node of its own
        ("ep8", ClusterSpec(3, 3, 100.0, 10.0, 0.0), 8, MB, ("ep",)),  # no part of it stays on a node
    ],
)
def test_the_way_that_is_faster(strategy, cluster, slots: int, nbytes: int, hops: tuple[str, ...]) -> None:
    assert hops_to_experts(Strategy.parse(strategy).mesh, "ep", cluster, slots, 64, nbytes) == hops


def test_joined_axes() -> None:
    mesh = Strategy.parse("cp2.tp4").mesh
    assert hops_to_experts(mesh, "cp.tp", SLOW, 8, 64, MB) == ("cp", "tp")
