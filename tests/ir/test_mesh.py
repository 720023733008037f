"""`Mesh`: coordinates, ranks and groups agree with each other, whatever the degrees are."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import PlacementError
from fxpar.ir.mesh import Mesh
from tests.placements import parts, placed_mesh

NAMES = ("dp", "pp", "cp", "tp", "ep")


@st.composite
def axes_of(draw, max_degree: int = 4, max_axes: int = 4) -> tuple[tuple[str, int], ...]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=max_axes))
    return tuple((name, draw(st.integers(1, max_degree))) for name in names)


@st.composite
def meshes(draw) -> Mesh:
    """From rank 0 without gaps, or anywhere, nested in any order."""
    axes = draw(axes_of())
    return draw(st.sampled_from([Mesh(axes), draw(placed_mesh(axes, 300))]))


@st.composite
def meshes_and_axes(draw) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes())
    axes = draw(st.lists(st.sampled_from(draw(parts(mesh))), unique=True)) if mesh.names else []
    return mesh, tuple(axes)


@given(meshes())
def test_rank_and_coordinate_are_inverse(mesh):
    coordinates = [mesh.coordinate(rank) for rank in mesh.ranks]
    assert [mesh.rank(c) for c in coordinates] == list(mesh.ranks)
    assert len(set(mesh.ranks)) == mesh.size
    assert all(tuple(c) == mesh.names for c in coordinates)
    assert all(0 <= c[name] < size for c in coordinates for name, size in mesh.axes)


@given(meshes())
def test_last_axis_is_fastest_in_the_list_of_ranks(mesh):
    coordinates = [tuple(mesh.coordinate(rank).values()) for rank in mesh.ranks]
    assert coordinates == sorted(coordinates)


@given(axes_of())
def test_by_default_ranks_are_counted(axes):
    assert Mesh(axes).ranks == tuple(range(Mesh(axes).size))


@given(meshes())
def test_other_ranks_are_outside(mesh):
    inside = set(mesh.ranks)
    for rank in range(min(inside) - 2, max(inside) + 3):
        assert (rank in mesh) == (rank in inside)
        if rank not in inside:
            with pytest.raises(ValueError, match=f"rank {rank} is not in mesh"):
                mesh.coordinate(rank)


@given(meshes(), st.data())
def test_what_lies_at_a_coordinate_is_a_mesh(mesh, data):
    if not mesh.axes:
        return
    axis, size = data.draw(st.sampled_from(mesh.axes))
    found = [mesh.at(axis, index) for index in range(size)]
    assert sorted(rank for part in found for rank in part.ranks) == sorted(mesh.ranks)
    for index, part in enumerate(found):
        for rank in part.ranks:
            assert mesh.coordinate(rank) == {**part.coordinate(rank), axis: index}


def test_equal_meshes_are_written_alike():
    axes = (("dp", 2), ("tp", 4))
    assert Mesh(axes, 0, (4, 1)) == Mesh(axes)
    assert hash(Mesh(axes, 0, (4, 1))) == hash(Mesh(axes))
    assert Mesh(axes, 0, (1, 2)) != Mesh(axes) != Mesh(axes, 8)
    assert Mesh(axes, 8).at("dp", 1) == Mesh((("tp", 4),), 12)


@given(meshes_and_axes())
def test_groups_partition_the_ranks(given_mesh):
    mesh, axes = given_mesh
    groups = mesh.groups(axes)
    size = math.prod(mesh.degree(name) for name in axes)
    assert all(len(group) == size for group in groups)
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    for group in groups:
        assert all(mesh.group_of(rank, axes) == group for rank in group)


@given(meshes_and_axes())
def test_members_of_a_group_differ_on_its_axes_only(given_mesh):
    mesh, axes = given_mesh
    for group in mesh.groups(axes):
        named = {mesh.part(name).axis for name in axes}
        rest = {tuple(v for k, v in mesh.coordinate(rank).items() if k not in named) for rank in group}
        assert len(rest) == 1


@given(meshes(), st.data())
def test_sub_axes_are_digits_of_a_coordinate(mesh, data):
    """The first varies slowest: joined they are the axis."""
    whole = data.draw(parts(mesh))
    for axis, degree in mesh.axes:
        digits = [name for name in whole if mesh.part(name).axis == axis]
        assert math.prod(mesh.degree(name) for name in digits) == degree
        assert all(mesh.index(rank, ".".join(digits)) == mesh.index(rank, axis) for rank in mesh.ranks)
        assert mesh.groups((axis,)) == mesh.groups(tuple(digits))
    assert sorted(reversed(whole), key=mesh.place) == whole


@given(meshes(), st.data())
def test_a_joint_cut_goes_by_ascending_ranks(mesh, data):
    names = data.draw(st.lists(st.sampled_from(data.draw(parts(mesh))), unique=True)) if mesh.names else []
    ordered = mesh.in_order(names)
    assert mesh.ascends(ordered)
    assert set(map(frozenset, mesh.groups(ordered))) == set(map(frozenset, mesh.groups(tuple(names))))
    whole = {mesh.part(name).axis for name in names if ":" not in name}
    assert all(mesh.covers(".".join(ordered), axis) for axis in whole)


def test_an_axis_in_several_places():
    """Neighbours on the inner digit are one rank apart, on the outer one eight."""
    mesh = Mesh((("dp", 8), ("tp", 4)), digits=(("dp", 4), ("tp", 4), ("dp", 2)))
    assert (str(mesh), mesh.size, mesh.last) == ("dp4xtp4xdp2", 32, 31)
    assert mesh.groups(("dp",))[0] == (0, 1, 8, 9, 16, 17, 24, 25)
    assert mesh.coordinate(9) == {"dp": 3, "tp": 0}
    assert mesh.at("tp", 1).ranks == (2, 3, 10, 11, 18, 19, 26, 27)
    assert (mesh.at("dp", 3), mesh.at("dp", 3).ranks) == (Mesh((("tp", 4),), 9, (2,)), (9, 11, 13, 15))
    assert mesh.in_order(("tp", "dp")) == ("dp:(1)4", "tp", "dp:(4)2")
    assert not mesh.covers("tp.dp:(4)2", "dp")
    with pytest.raises(PlacementError, match="its digits are"):
        Mesh((("dp", 8),), digits=(("dp", 4), ("tp", 4), ("dp", 2)))


@given(meshes())
def test_json_round_trip(mesh):
    assert Mesh.from_json(json.loads(json.dumps(mesh.to_json()))) == mesh


def test_digits_that_make_one_place_are_none():
    axes = (("dp", 8), ("tp", 4))
    assert Mesh(axes, digits=(("dp", 4), ("dp", 2), ("tp", 4))) == Mesh(axes)
    assert Mesh(axes, 3, (2, 1, 8), (("dp", 4), ("dp", 2), ("tp", 4))) == Mesh(axes, 3, (1, 8))
    assert Mesh(axes, digits=(("dp", 8), ("tp", 4), ("dp", 1))) == Mesh(axes)
    apart = Mesh((*axes, ("cp", 2)), digits=(("dp", 4), ("tp", 4), ("cp", 2), ("dp", 2)))
    assert Mesh.from_json(json.loads(json.dumps(apart.to_json()))) == apart
    assert apart.at("tp", 1).digits == (("dp", 4), ("cp", 2), ("dp", 2))
    assert apart.at("tp", 1).at("cp", 0).ranks == (4, 5, 20, 21, 36, 37, 52, 53)


def test_sub_axes_of_four_and_eight():
    mesh = Mesh((("dp", 2), ("tp", 4)))
    assert mesh.groups(("tp:(1)2",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups(("tp:(2)2",)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.group_of(7, ("dp", "tp:(2)2")) == (2, 3, 6, 7)
    eight = Mesh((("tp", 8),))
    assert [eight.index(rank, "tp:(2)2") for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_which_sub_axes_overlap():
    mesh = Mesh((("dp", 2), ("tp", 8)))
    assert mesh.overlap("tp", "tp:(1)2")
    assert mesh.overlap("tp:(1)4", "tp:(2)2")
    assert mesh.overlap("tp:(2)2", "tp:(2)2")
    assert not mesh.overlap("tp:(1)2", "tp:(2)4")
    assert not mesh.overlap("tp:(4)2", "tp:(2)2")
    assert not mesh.overlap("dp", "tp:(1)2")
    six = Mesh((("tp", 6),))  # of neighbours 2 and 3 the outer half changes with the innermost pair
    assert six.overlap("tp:(1)2", "tp:(3)2")
    assert not six.overlap("tp:(1)2", "tp:(2)3")


@pytest.mark.parametrize("name", ["tp:(1)3", "tp:(3)2", "tp:(2)8", "tp:(0)2", "tp:(1)0"])
def test_a_sub_axis_divides_its_axis(name):
    with pytest.raises(PlacementError, match="is not a sub-axis of tp8"):
        Mesh((("tp", 8),)).degree(name)


@given(meshes_and_axes())
def test_index_is_the_position_in_the_group(given_mesh):
    """`index` and the order inside a group must agree: collectives put piece i where rank i of the group is."""
    mesh, axes = given_mesh
    if not axes:
        return
    joined = ".".join(axes)
    assert mesh.degree(joined) == len(mesh.group_of(mesh.offset, axes))
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


def test_parts_of_axes():
    mesh = Mesh((("dp", 2), ("tp", 8)))
    assert mesh.parts(["tp:(1)2", "dp", "tp:(4)2"]) == ["tp:(1)2", "tp:(2)2", "tp:(4)2"]
    assert mesh.parts(["tp", "dp"]) == []
    assert Mesh((("tp", 6),)).parts(["tp:(1)2", "tp:(1)3"]) == [], "neither is made of the other's parts"
    assert [mesh.joint("tp:(1)2", "tp:(2)2"), mesh.joint("tp:(1)2", "tp:(2)4")] == ["tp:(1)4", "tp"]
    assert mesh.joint("tp:(1)2", "tp:(4)2") is None
    assert mesh.joint("dp", "tp:(1)2") is None
    assert [mesh.inside("tp:(2)2", "tp:(1)4"), mesh.inside("tp:(4)2", "tp:(1)4"), mesh.inside("tp", "tp")] == [
        True,
        False,
        True,
    ]
