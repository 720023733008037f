"""Which links an axis takes, and what neighbouring stages send over them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from fxpar.cost.links import crosses_nodes, handed_on_s
from fxpar.cost.polynomial import Polynomial, sent_bytes
from fxpar.ir.mesh import Mesh
from tests.cost.programs import PAIR, program


def test_which_axes_leave_a_node():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert not crosses_nodes(mesh, "tp", PAIR)
    assert crosses_nodes(mesh, "dp", PAIR)
    assert crosses_nodes(mesh, "dp.tp", PAIR)
    assert crosses_nodes(Mesh((("tp", 2),), 1), "tp", PAIR)
    assert not crosses_nodes(Mesh((("tp", 2),), 2), "tp", PAIR)


def test_the_network_of_a_node_is_shared():
    capped = replace(PAIR, node_gb_per_s=20.0)
    assert [float(cluster.bytes_per_s(True)) for cluster in (PAIR, capped)] == [50e9, 10e9]
    assert float(capped.bytes_per_s(False)) == 400e9


def test_a_message_takes_the_link_between_its_two_stages():
    """Four stages of one rank on two nodes: only the second and the third have the network between them."""
    pipeline = program("pp4")
    inside, between = (
        sent_bytes(pipeline.stages[0], [next(iter(pipeline.stages[0].given("sent").values())).local])
        * (1 / (gb * 10**9))
        for gb in (Fraction(400), Fraction(50))
    )
    latency = Polynomial(Fraction(10, 10**6))
    forward = [handed_on_s(pipeline, stage, "sent", PAIR) for stage in range(3)]
    assert forward == [inside + latency, between + latency, inside + latency]
    assert [handed_on_s(pipeline, stage, "sent_grad", PAIR) for stage in (1, 2, 3)] == forward
