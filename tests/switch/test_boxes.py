"""Slices against an oracle that lists elements one at a time."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch.boxes import pieces, refine
from tests.placements import configs, held, meshes, shapes
from tests.repeat import examples


@settings(max_examples=examples(40))
@given(data=st.data())
def test_slices_tile_and_ranks_hold_whole_ones(data):
    shape = data.draw(shapes)
    copies = [data.draw(configs(data.draw(meshes()), shape, partial=False)) for _ in range(2)]
    grid = refine(shape, copies)
    assert grid.numel.sum() == math.prod(shape)
    for d, size in enumerate(shape):
        assert grid.cuts[d][0] == 0
        assert grid.cuts[d][-1] == size
        assert (grid.cuts[d][1:] > grid.cuts[d][:-1]).all()
    for dist in copies:
        holders = grid.holders((dist,), dist.mesh.last + 1)
        assert holders.table.sum() == sum(holders.of(rank).sum() for rank in dist.mesh.ranks) == holders.counts.sum()
        assert max(grid.numel[holders.of(rank)].sum() for rank in dist.mesh.ranks) == holders.most(grid.numel)
        for rank in dist.mesh.ranks:
            row = holders.of(rank)
            assert (row == holders.table[:, rank]).all()
            owned = [set(held(dist, rank, d, size)) - {-1} for d, size in enumerate(shape)]
            for box, inside in zip(grid.boxes.tolist(), row, strict=True):
                parts = [set(range(*ends)) for ends in box]
                assert inside == all(part <= mine for part, mine in zip(parts, owned, strict=True))
                assert inside or any(part.isdisjoint(mine) for part, mine in zip(parts, owned, strict=True))


def test_uneven_strided_and_empty_pieces():
    mesh = Mesh((("dp", 4),))
    assert pieces(mesh, (AxisShard("dp"),), 5).runs == (((0, 2),), ((2, 4),), ((4, 5),), ())
    assert pieces(mesh, (AxisShard("dp", (2, 1)),), 12).runs[1] == ((2, 4), (9, 10))
    assert pieces(Mesh((("dp", 1),)), (AxisShard("dp", (1, 1)),), 4).runs == (((0, 4),),)  # touching runs are one


def test_ranks_of_an_inner_sub_axis_hold_the_same_piece():
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert pieces(mesh, (AxisShard("tp:(1)2"),), 6).of_rank.tolist() == [0, 0, 1, 1] * 2
    assert pieces(mesh, (AxisShard("tp:(2)2"),), 6).of_rank.tolist() == [0, 1, 0, 1] * 2
    assert pieces(mesh, (AxisShard("tp:(1)2"), AxisShard("dp")), 8).of_rank.tolist() == [0, 0, 2, 2, 1, 1, 3, 3]


def test_common_refinement_of_two_and_three():
    two, three = (DistConfig(Mesh((("tp", n),)), ((AxisShard("tp"),),)) for n in (2, 3))
    assert refine((12,), [two, three]).cuts[0].tolist() == [0, 4, 6, 8, 12]
