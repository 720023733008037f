"""`DistConfig`: boxes, local shapes and pieces describe the same thing, and nothing is lost or held once too often."""

from __future__ import annotations

import itertools
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import PlacementError
from fxpar.ir.dist_config import AxisShard, DistConfig, OuterShard, P, Partial, R, Shard, chunk, normalize_sections
from fxpar.ir.dtype_names import short_dtype
from fxpar.ir.mesh import Mesh
from fxpar.ir.runs import section_sizes
from tests.placements import configs, held, meshes, placed, placed_mesh

MESH = Mesh((("dp", 2), ("cp", 3), ("tp", 4)))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Every element its own number, none of them 0 (padding is 0)."""
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def on_dim_0(*entries: AxisShard, mesh: Mesh = MESH, ndim: int = 1) -> DistConfig:
    return DistConfig(mesh, (entries, *((),) * (ndim - 1)))


def test_part_of_an_axis_whose_terms_go_beyond_it():
    """Terms over part of `tp:(1)4` and all of `tp:(4)2` are written as one name, which either of them has a part of."""
    mesh = Mesh((("tp", 8),))
    config = DistConfig(mesh, ((AxisShard("tp:(1)2"),),), (("tp:(2)4", "sum"),))
    assert config.placement("tp:(1)4") == OuterShard(0, 2, P)
    assert (config.placement("tp:(1)2"), config.placement("tp:(4)2")) == (Shard(0), P)


# -------------------------------------------------------------------------------------------------- properties
@given(placed())
def test_pieces_hold_what_the_definition_says(example):
    config, shape = example
    whole = numbered(shape)
    for rank in range(config.mesh.size):
        piece = config.take(whole, rank)
        assert tuple(piece.shape) == config.local_shape(shape)
        expected = torch.zeros(config.local_shape(shape), dtype=torch.int64)
        places = [held(config, rank, d, size) for d, size in enumerate(shape)]
        for local in itertools.product(*map(range, piece.shape)):
            origin = tuple(places[d][i] for d, i in enumerate(local))
            if -1 not in origin:
                expected[local] = whole[origin]
        assert torch.equal(piece, expected)


@given(placed())
def test_every_element_is_held_equally_often(example):
    config, shape = example
    pieces = [config.take(numbered(shape), rank).flatten() for rank in range(config.mesh.size)]
    counts = torch.cat(pieces).bincount(minlength=math.prod(shape) + 1)[1:]
    cuts = math.prod(config.degrees(d) for d in range(len(shape)))
    assert set(counts.tolist()) <= {config.mesh.size // cuts}


@given(placed())
def test_put_undoes_take(example):
    config, shape = example
    whole = numbered(shape)
    found = torch.zeros_like(whole)
    for rank in range(config.mesh.size):
        config.put(found, config.take(whole, rank), rank)
    assert torch.equal(found, whole)


@given(placed())
def test_put_writes_its_own_boxes_only(example):
    config, shape = example
    for rank in range(config.mesh.size):
        found = torch.zeros(shape, dtype=torch.int64)
        config.put(found, torch.ones(config.local_shape(shape), dtype=torch.int64), rank)
        expected = torch.zeros_like(found)
        for box in config.boxes(rank, shape):
            expected[tuple(slice(a, b) for a, b in box)] += 1  # twice would be a 2: boxes are disjoint
        assert torch.equal(found, expected)


@given(placed())
def test_boxes_are_what_take_returns(example):
    config, shape = example
    whole = numbered(shape)
    for rank in range(config.mesh.size):
        boxes = config.boxes(rank, shape)
        inside = [whole[tuple(slice(a, b) for a, b in box)].flatten() for box in boxes]
        piece = config.take(whole, rank)
        real = piece[piece > 0]
        assert sorted(torch.cat(inside).tolist() if inside else []) == sorted(real.tolist())


@given(placed())
def test_intervals_are_sorted_and_apart(example):
    config, shape = example
    for rank in range(config.mesh.size):
        for d, size in enumerate(shape):
            runs = config.intervals(rank, d, size)
            assert all(length > 0 for _, _, length in runs)
            for (local, origin, length), (after, after_origin, _) in itertools.pairwise(runs):
                assert local + length <= after
                joined = local + length == after and origin + length == after_origin
                assert not joined, "two runs that touch on both sides are one"


@given(placed())
def test_padding(example):
    config, shape = example
    pieces = [config.take(numbered(shape), rank) for rank in range(config.mesh.size)]
    padded = any((piece == 0).any() for piece in pieces)
    assert bool(config.padded_dims(shape)) == padded


@given(placed())
def test_json_pickle_hash(example):
    config, _ = example
    for again in (
        DistConfig.from_json(json.dumps(config.to_json())),
        DistConfig.from_json(config.to_json()),
        pickle.loads(pickle.dumps(config)),
    ):
        assert again == config
        assert hash(again) == hash(config)


@given(placed(), st.sampled_from([None, torch.bfloat16, torch.float64, torch.int32, torch.bool]), st.data())
def test_json_keeps_dtype_and_ranks(example, dtype, data):
    config, _ = example
    elsewhere = data.draw(placed_mesh(config.mesh.axes, 30))
    dims = config.dims if not any("." in axis for axis in config.shard_axes) else ((),) * config.ndim
    config = DistConfig(elsewhere, dims, config.partial, dtype)
    assert DistConfig.from_json(json.dumps(config.to_json())) == config


@given(placed())
def test_describe_tells_placements_apart(example):
    """Two different placements of one tensor never print the same."""
    config, shape = example
    text = config.describe(shape)
    other = DistConfig.replicated(config.mesh, config.ndim)
    assert (text == other.describe(shape)) == ((config.dims, config.partial) == (other.dims, other.partial))
    for entries, size in zip(config.dims, shape, strict=True):
        for entry in entries:
            assert f"{size}@" in text
            assert f"@{entry.axis}" in text


@st.composite
def single_steps(draw):
    mesh = draw(meshes())
    config = draw(configs(mesh, (24, 12)))
    axis = draw(st.sampled_from(mesh.names))
    cuts = [e.axis.split(".") for entries in config.dims for e in entries]
    together = [{config.mesh.part(name).axis for name in cut} for cut in cuts]
    joined = any(axis in axes and len(axes) > 1 for axes in together)
    placement = draw(st.sampled_from([R, P, Partial("max"), Shard(0), Shard(1, (1, 1))]))
    return config, axis, placement, joined


@given(single_steps())
def test_with_placement(example):
    config, axis, placement, joined = example
    if joined:  # the axis cuts together with another one
        if placement != R:
            with pytest.raises(PlacementError, match="used twice"):
                config.with_placement(axis, placement)
        return
    changed = config.with_placement(axis, placement)
    assert changed.placement(axis) == placement
    assert changed.with_placement(axis, placement) == changed
    assert changed.with_placement(axis, R) == config.with_placement(axis, R), "other axes stay"
    if isinstance(placement, Shard):
        assert changed.dims[placement.dim][-1].axis == axis  # the innermost cut


# ---------------------------------------------------------------------------------------------------- examples
def test_a_joint_cut_that_begins_with_a_sub_axis_is_not_dropped():
    config = DistConfig(Mesh((("dp", 4), ("cp", 2))), ((AxisShard("dp:(1)2.cp"),), ()))
    with pytest.raises(PlacementError, match="used twice"):
        config.with_placement("dp", P)


def test_fused_projection_in_sections():
    """q, k, v of 8, 4, 4 rows on 4 ranks: each rank has a quarter of each."""
    config = on_dim_0(AxisShard("tp", (2, 1, 1)))
    whole = torch.arange(16)
    assert config.take(whole, 1).tolist() == [2, 3, 9, 13]
    assert config.boxes(1, (16,)) == [((2, 4),), ((9, 10),), ((13, 14),)]
    assert config.intervals(1, 0, 16) == [(0, 2, 2), (2, 9, 1), (3, 13, 1)]
    assert config.local_shape((16,)) == (4,)


def test_uneven_dim_is_padded_at_its_end():
    config = on_dim_0(AxisShard("tp"))
    assert [config.take(torch.arange(1, 11), rank).tolist() for rank in range(4)] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
        [10, 0, 0],
    ]
    assert config.boxes(3, (10,)) == [((9, 10),)]
    assert config.padded_dims((10,)) == (0,)


def test_rank_beyond_the_end_holds_padding_only():
    config = on_dim_0(AxisShard("tp"))
    assert config.take(torch.arange(1, 6), 3).tolist() == [0, 0]
    assert config.boxes(3, (5,)) == []


def test_an_empty_dim():
    config = on_dim_0(AxisShard("tp"), ndim=2)
    assert config.local_shape((0, 3)) == (0, 3)
    assert config.take(torch.zeros(0, 3), 2).shape == (0, 3)
    assert config.boxes(2, (0, 3)) == []


def test_cuts_nest_in_the_order_they_are_listed():
    outer_tp = on_dim_0(AxisShard("tp"), AxisShard("dp"))
    outer_dp = on_dim_0(AxisShard("dp"), AxisShard("tp"))
    rank = MESH.rank({"dp": 1, "tp": 2})
    assert outer_tp.take(torch.arange(16), rank).tolist() == [10, 11]
    assert outer_dp.take(torch.arange(16), rank).tolist() == [12, 13]


def test_joint_axes_cut_as_one():
    config = on_dim_0(AxisShard("dp.cp"))
    assert config.local_shape((12,)) == (2,)
    ranks = [MESH.rank({"dp": d, "cp": c}) for d in (0, 1) for c in (0, 1, 2)]
    pieces = [config.take(torch.arange(12), rank) for rank in ranks]
    assert torch.cat(pieces).tolist() == list(range(12))
    uneven = [config.take(torch.arange(1, 8), rank).tolist() for rank in ranks]
    assert uneven == [[1, 2], [3, 4], [5, 6], [7, 0], [0, 0], [0, 0]]


def test_scalars():
    config = DistConfig.replicated(MESH, 0)
    assert config.take(torch.tensor(3), 5) == 3
    found = torch.tensor(0)
    config.put(found, torch.tensor(3), 5)
    assert found == 3
    assert config.boxes(0, ()) == [()]
    assert config.local_shape(()) == ()


def test_placement_order_of_partials_follows_the_mesh():
    config = DistConfig.replicated(MESH, 1).with_placement("tp", P).with_placement("dp", Partial("max"))
    assert config.partial == (("dp", "max"), ("tp", "sum"))
    assert config == DistConfig.replicated(MESH, 1).with_placement("dp", Partial("max")).with_placement("tp", P)


def test_describe():
    config = DistConfig(
        MESH,
        ((AxisShard("cp", (1, 1)), AxisShard("tp")), (AxisShard("dp", (4, 1, 1)),), ()),
        dtype=torch.bfloat16,
    )
    assert config.describe(("T", 96, 4)) == "bf16[T@cp*2@tp, 96@dp(4:1:1), 4]"
    assert str(config) == "bf16[_@cp*2@tp, _@dp(4:1:1), _]"
    partial = DistConfig(MESH, ((), ()), (("dp", "sum"), ("tp", "max")), torch.float32)
    assert partial.describe((3, 4)) == "f32[3, 4] P(dp) P(tp,max)"
    assert [str(p) for p in (R, P, Partial("avg"), Shard(1), Shard(0, (1, 1, 1)), Shard(0, (2, 1)))] == [
        "R",
        "P",
        "P(avg)",
        "S(1)",
        "S(0*3)",
        "S(0:2,1)",
    ]


def test_short_dtypes():
    assert short_dtype(None) == ""
    assert short_dtype(torch.float64) == "f64"
    assert short_dtype(torch.complex64) == "complex64"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_normalized_sections_keep_the_proportions(sections):
    found = normalize_sections(sections)
    if len(sections) == 1:
        assert found == ()
        return
    assert math.gcd(*found) == 1
    assert section_sizes(sum(sections), found) == tuple(sections)


def test_chunk():
    assert chunk(10, 4) == 3
    assert chunk(12, 3, (2, 1, 1)) == 4
    assert chunk(12, 4, (2, 1, 1)) is None  # sections of 6, 3, 3
    assert chunk(7, 2, (1, 1)) is None


# ------------------------------------------------------------------------------------------------------ errors
def test_axis_used_twice():
    with pytest.raises(PlacementError, match="a mesh axis is used twice"):
        DistConfig(MESH, ((AxisShard("tp"),), (AxisShard("tp"),)))
    with pytest.raises(PlacementError, match="a mesh axis is used twice"):
        DistConfig(MESH, ((AxisShard("tp"),), ()), (("tp", "sum"),))
    with pytest.raises(PlacementError, match="a mesh axis is used twice"):
        DistConfig(MESH, ((AxisShard("dp.cp"),), (AxisShard("cp"),)))


@pytest.mark.parametrize("axis", ["pp", "dp.pp"])
def test_unknown_axis(axis):
    with pytest.raises(PlacementError, match="axis 'pp' is not an axis of mesh dp2xcp3xtp4"):
        on_dim_0(AxisShard(axis))
    with pytest.raises(PlacementError, match="not an axis of mesh"):
        DistConfig(MESH, ((),), ((axis, "sum"),))


def test_joint_axes_in_another_order_than_the_mesh():
    """torch sorts the ranks of a process group, so a collective could not follow another order."""
    with pytest.raises(PlacementError, match=r"joint axes 'cp.dp' must be in the order of mesh dp2xcp3xtp4"):
        on_dim_0(AxisShard("cp.dp"))


def test_sections_that_do_not_divide():
    config = on_dim_0(AxisShard("tp", (1, 1)))
    with pytest.raises(PlacementError, match=r"dim 0 of size 12 is not divisible by tp=4 in sections \(1, 1\)"):
        config.local_shape((12,))
    with pytest.raises(PlacementError, match=r"size 9 is not a concatenation of parts in proportion \(1, 1\)"):
        section_sizes(9, (1, 1))


def test_wrong_number_of_dims():
    with pytest.raises(ValueError, match="zip"):
        on_dim_0(AxisShard("tp")).local_shape((4, 4))


# --------------------------------------------------------------------------------------------------- on sub-axes
OUTER = DistConfig.replicated(MESH, 2)


@pytest.mark.parametrize("inner", [R, P])
def test_a_cut_over_an_outer_sub_axis(inner):
    placement = OuterShard(1, 2, inner)
    config = OUTER.with_placement("tp", placement)
    assert config.placement("tp") == placement
    assert config.placement("cp") == R
    assert config.local_shape((6, 8)) == (6, 4)
    pieces = [config.take(numbered((6, 8)), MESH.rank({"tp": i})) for i in range(4)]
    assert torch.equal(pieces[0], pieces[1])
    assert torch.equal(torch.cat([pieces[0], pieces[2]], 1), numbered((6, 8)))
    assert config.with_placement("tp", R) == OUTER
    assert DistConfig.from_json(json.dumps(config.to_json())) == config


def test_text_of_sub_axes():
    config = OUTER.with_placement("tp", OuterShard(0, 2, P)).with_placement("dp", Shard(0))
    assert str(config) == "[_@tp:(1)2@dp, _] P(tp:(2)2)"
    assert [str(OuterShard(1, 2)), str(OuterShard(1, 2, P))] == ["S(1/2)", "S(1/2)P"]


def test_sub_axes_that_overlap_are_used_twice():
    for other in ("tp", "tp:(1)4", "tp:(1)2"):
        with pytest.raises(PlacementError, match="a mesh axis is used twice"):
            DistConfig(MESH, ((AxisShard("tp:(1)2"),), (AxisShard(other),)))
    DistConfig(MESH, ((AxisShard("tp:(1)2"),), (AxisShard("tp:(2)2"),)))


def test_a_sub_axis_of_no_axis():
    with pytest.raises(PlacementError, match=r"'ep:\(1\)1' is not an axis of mesh"):
        on_dim_0(AxisShard("ep:(1)1"))
    with pytest.raises(PlacementError, match=r"'tp:\(1\)3' is not a sub-axis of tp4"):
        on_dim_0(AxisShard("tp:(1)3"))


def test_not_all_that_sub_axes_can_do_is_a_placement():
    for config in (on_dim_0(AxisShard("tp:(2)2")), on_dim_0(AxisShard("tp:(1)2", (1, 1)))):
        with pytest.raises(PlacementError, match="in a way that no placement describes"):
            config.placement("tp")
