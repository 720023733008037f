"""Packing for collectives moves exactly the pieces that `DistConfig.take` describes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.ir.dist_config import AxisShard, DistConfig, chunk
from fxpar.ir.mesh import Mesh
from fxpar.ops import layout

SECTIONS = ((), (), (1, 1), (1, 1, 1), (2, 1), (1, 2, 1), (3, 1, 1))


@st.composite
def cuts(draw):
    """A tensor, a dim, a degree and sections that fit."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim, degree = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    sections = draw(st.sampled_from(SECTIONS))
    if sections:
        shape[dim] = sum(sections) * degree * draw(st.integers(1, 3))
    else:
        shape[dim] = draw(st.integers(1, 13))
    x = torch.arange(1, math.prod(shape) + 1).view(shape)
    if draw(st.booleans()):  # memory order must not matter
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x, dim, degree, sections


def config(x: torch.Tensor, dim: int, degree: int, sections: tuple[int, ...]) -> DistConfig:
    dims = [(AxisShard("tp", sections),) if d == dim else () for d in range(x.dim())]
    return DistConfig(Mesh((("tp", degree),)), tuple(dims))


@given(cuts())
def test_pack_makes_one_row_per_rank(example):
    x, dim, degree, sections = example
    rows = layout.pack(x, degree, dim, sections)
    assert rows.is_contiguous()
    assert rows.shape[0] == degree
    for rank in range(degree):
        assert torch.equal(rows[rank], config(*example).take(x, rank))


@given(cuts())
def test_take_is_a_row_of_pack(example):
    x, dim, degree, sections = example
    for rank in range(degree):
        assert torch.equal(layout.take(x, degree, dim, sections, rank), config(*example).take(x, rank))


@given(cuts())
def test_unpack_undoes_pack(example):
    x, dim, degree, sections = example
    rows = layout.pack(x, degree, dim, sections)
    assert torch.equal(layout.unpack(rows, dim, sections, x.shape[dim]), x)
    if chunk(x.shape[dim], degree, sections) * degree == x.shape[dim]:
        assert torch.equal(layout.unpack(rows, dim, sections), x)


@given(cuts())
def test_zero_padding_clears_what_lies_beyond_the_end(example):
    x, dim, degree, sections = example
    if sections:
        return
    for rank in range(degree):
        piece = config(*example).take(x, rank)
        real = config(*example).take(torch.ones_like(x), rank)
        dirty = torch.where(real > 0, piece, -7)
        assert torch.equal(layout.zero_padding(dirty, dim, x.shape[dim], rank), piece)


@st.composite
def rows_to_fuse(draw):
    count = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4))
    return [torch.randint(100, (count, *shape)) for shape in shapes], shapes


@given(rows_to_fuse())
def test_unfuse_undoes_fuse(example):
    rows, shapes = example
    fused = layout.fuse(rows)
    assert fused.shape == (rows[0].shape[0], sum(math.prod(shape) for shape in shapes))
    parts = layout.unfuse(fused, shapes)
    assert all(torch.equal(part, row) for part, row in zip(parts, rows, strict=True))


@given(rows_to_fuse())
def test_fused_rows_stay_rows(example):
    """Row i of the buffer holds row i of every tensor, or a reduce-scatter would mix them up."""
    rows, shapes = example
    fused = layout.fuse(rows)
    for i in range(fused.shape[0]):
        parts = layout.unfuse(fused[i : i + 1], shapes)
        assert all(torch.equal(part[0], row[i]) for part, row in zip(parts, rows, strict=True))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_lift_and_lower(shape):
    x = torch.randn(shape)
    row = layout.lift(x)
    assert row.shape == (1, *shape)
    assert row.is_contiguous()
    assert torch.equal(layout.lower(row), x)


def test_gather_of_a_fused_buffer_is_the_gather_of_each():
    """[1, total] rows of several ranks stacked are [K, total], which unfuses to the ranks' rows of each tensor."""
    shapes = [(2, 3), (4,)]
    ranks = [[torch.randint(9, (1, *shape)) for shape in shapes] for _ in range(3)]
    gathered = torch.cat([layout.fuse(rows) for rows in ranks])
    for index, part in enumerate(layout.unfuse(gathered, shapes)):
        assert torch.equal(part, torch.cat([rows[index] for rows in ranks]))
