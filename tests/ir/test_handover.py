"""What goes between pipeline stages that differ: each rank gets what it holds, every element once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.ir.dist_config import DistConfig, Shard
from fxpar.ir.exec_graph import Stored
from fxpar.ir.graph import TensorMeta
from fxpar.ir.handover import Handover, messages
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from tests.captured import llama
from tests.placements import configs, meshes, moved, shapes

T = sympy.Symbol("T", integer=True, positive=True)


@st.composite
def pairs(draw) -> tuple[DistConfig, DistConfig, tuple[int, ...], int]:
    """Two placements of one tensor on ranks that are apart, with as many replicas."""
    shape, replicas = draw(shapes), draw(st.integers(1, 3))

    def placed(first: int) -> DistConfig:
        mesh = draw(meshes((1, 2)).map(lambda mesh: [axis for axis in mesh.axes if axis[0] != "dp" and axis[1] > 1]))
        axes = tuple(draw(st.permutations([*mesh, ("dp", replicas)])))
        inside = draw(configs(Mesh(tuple(axis for axis in axes if axis[0] != "dp")), shape, partial=False))
        return moved(replace(inside, mesh=Mesh(axes)), first)

    before = placed(0)
    return before, placed(before.mesh.last + 1), shape, replicas


@given(pairs())
def test_each_rank_gets_what_it_holds(case):
    before, after, shape, replicas = case
    whole = torch.arange(1, 1 + int(torch.tensor(shape).prod())).view(shape)
    for replica in range(replicas):
        sources, targets = before.mesh.at("dp", replica).ranks, after.mesh.at("dp", replica).ranks
        arrived = {rank: torch.zeros_like(after.take(whole, rank)) for rank in targets}
        written = {rank: torch.zeros_like(value) for rank, value in arrived.items()}
        for message in messages(before, after, shape, replica):
            assert message.source in sources
            piece = before.take(whole, message.source)[tuple(slice(*span) for span in message.taken)]
            assert piece.numel() == message.numel > 0
            place = tuple(slice(*span) for span in message.put)
            arrived[message.target][place] = piece
            written[message.target][place] += 1
        for rank in targets:
            assert torch.equal(arrived[rank], after.take(whole, rank))
            assert bool((written[rank] <= 1).all())


def placed(text: str, *dims: str, first: int = 0) -> Stored:
    mesh = replace(Strategy.parse(text).mesh, offset=first)
    dist = DistConfig.replicated(mesh, 2, torch.float32)
    for d, axes in enumerate(dims):
        for axis in axes.split():
            dist = dist.with_placement(axis, Shard(d))
    return Stored(TensorMeta((T, 8), torch.float32), dist)


def test_who_has_all_of_it_shares_the_sending():
    """Four ranks with the whole value, two that want half of it each."""
    handed = Handover("sent", "x", 0, 1, placed("tp4", ""), placed("rows2", "rows", first=4))
    assert not handed.alike
    assert [(m.source, m.target, m.taken[0]) for m in handed.messages({T: 12})] == [(0, 4, (0, 6)), (1, 5, (6, 12))]
    assert handed.bytes_of_busiest({T: 12}) == handed.bytes_of_busiest({T: 12}, received=True) == 6 * 8 * 4
    back = Handover("sent_grad", "x", 1, 0, handed.taken, handed.given)
    sent = Counter(m.source for m in back.messages({T: 12}))
    assert (sent, back.most_messages({T: 12})) == ({4: 4, 5: 4}, 4)
    assert back.bytes_of_busiest({T: 12}) == 4 * 6 * 8 * 4  # to each of the four
    assert back.bytes_of_busiest({T: 12}, received=True) == 12 * 8 * 4
    assert handed.messages({T: 0}) == ()
    few = Handover("sent", "x", 0, 1, placed("tp2", ""), placed("tp4", "", first=2))
    assert [m.source for m in few.messages({T: 12})] == [0, 1, 0, 1]


def test_alike_is_from_place_to_place():
    handed = Handover("sent", "x", 0, 1, placed("cp2.tp2", "cp"), placed("cp2.tp2", "cp", first=4))
    assert handed.alike
    assert [(m.source, m.target) for m in handed.messages({T: 4})] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (handed.bytes_of_busiest({T: 4}), handed.most_messages({T: 4})) == (2 * 8 * 4, 1)


def test_of_a_program():
    program = lower(llama(layers=2).graph, "tp2+sp > dp1")
    there, back = program.handovers
    assert (there.kind, there.stage, there.to, back.kind, back.stage, back.to) == ("sent", 0, 1, "sent_grad", 1, 0)
    assert [program.column_of(rank) for rank in range(3)] == [(0, 1, 2)] * 3
    assert [(m.source, m.target) for m in there.messages({program.dims[0].symbol: 4})] == [(0, 2), (1, 2)]
    grid = lower(llama(layers=2).graph, "pp2.tp2")
    assert [grid.column_of(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
