"""`Mesh`: coordinates, ranks and groups agree with each other, whatever the degrees are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.mesh import Mesh

NAMES = ("dp", "pp", "cp", "tp", "ep")


@st.composite
def meshes(draw, max_degree: int = 4, max_axes: int = 4) -> Mesh:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=max_axes))
    return Mesh(tuple((name, draw(st.integers(1, max_degree))) for name in names))


@st.composite
def meshes_and_axes(draw) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes())
    axes = draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.names else []
    return mesh, tuple(axes)


@given(meshes())
def test_rank_and_coordinate_are_inverse(mesh):
    ranks = range(mesh.size)
    coordinates = [mesh.coordinate(rank) for rank in ranks]
    assert [mesh.rank(c) for c in coordinates] == list(ranks)
    assert all(tuple(c) == mesh.names for c in coordinates)
    assert all(0 <= c[name] < size for c in coordinates for name, size in mesh.axes)


@given(meshes())
def test_last_axis_is_fastest(mesh):
    coordinates = [tuple(mesh.coordinate(rank).values()) for rank in range(mesh.size)]
    assert coordinates == sorted(coordinates)


@given(meshes_and_axes())
def test_groups_partition_the_ranks(given_mesh):
    mesh, axes = given_mesh
    groups = mesh.groups(axes)
    size = math.prod(mesh.degree(name) for name in axes)
    assert all(len(group) == size for group in groups)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert all(mesh.group_of(rank, axes) == group for rank in group)


@given(meshes_and_axes())
def test_members_of_a_group_differ_on_its_axes_only(given_mesh):
    mesh, axes = given_mesh
    for group in mesh.groups(axes):
        rest = {tuple(v for k, v in mesh.coordinate(rank).items() if k not in axes) for rank in group}
        assert len(rest) == 1


@given(meshes_and_axes())
def test_index_is_the_position_in_the_group(given_mesh):
    """`index` and the order inside a group must agree: collectives put piece i where rank i of the group is."""
    mesh, axes = given_mesh
    if not axes:
        return
    joined = ".".join(axes)
    assert mesh.degree(joined) == len(mesh.group_of(0, axes))
    for group in mesh.groups(axes):
        assert [mesh.index(rank, joined) for rank in group] == list(range(len(group)))


def test_neighbours_share_the_innermost_axis():
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert mesh.groups(("tp",)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups(("dp",)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.group_of(6, ("dp",)) == (2, 6)
    assert mesh.groups(("tp", "dp"))[0] == (0, 4, 1, 5, 2, 6, 3, 7)


def test_joint_axes_follow_the_order_they_are_named_in():
    mesh = Mesh((("dp", 2), ("cp", 3)))
    assert [mesh.index(rank, "dp.cp") for rank in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [mesh.index(rank, "cp.dp") for rank in range(6)] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("axis", ["ep", "ep.pp"])
def test_absent_axes_have_degree_one(axis):
    mesh = Mesh((("dp", 3),))
    assert mesh.degree(axis) == 1
    assert mesh.index(2, axis) == 0
    assert mesh.degree("dp.ep") == 3


def test_text_and_hash():
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert str(mesh) == "dp2xtp4"
    assert str(Mesh(())) == "1"
    assert Mesh(()).size == 1
    assert {mesh: 1}[Mesh((("dp", 2), ("tp", 4)))] == 1
    assert mesh != Mesh((("tp", 4), ("dp", 2)))


def test_size_and_shape():
    mesh = Mesh((("dp", 2), ("pp", 1), ("tp", 3)))
    assert (mesh.size, mesh.shape, mesh.names) == (6, (2, 1, 3), ("dp", "pp", "tp"))
