"""`passes/share_weights`: views of one storage hold every layout at once, and no more memory than needed."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import PassContractError, StorageError
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.strategy import Strategy
from fxpar.passes.share_weights import ALIGN_BYTES, ShareWeights, check_storage, laid_out
from tests.repeat import examples
from tests.store.programs import program, several_programs


def buffers_of(storage):
    return {key: torch.full((count,), -1.0, dtype=key[1]) for key, count in storage.numel.items()}


def whole_tensors(programs):
    first = next(iter(programs.values()))
    tensors, start = {}, 1
    for info in first.inputs:
        shape = tuple(info.meta.shape)
        count = torch.Size(shape).numel()
        tensors[info.fqn] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return tensors


def pieces(one, rank, whole):
    return {i.fqn: s.dist.take(whole[i.fqn], rank) for i, s in zip(one.inputs, one.stored_inputs, strict=True)}


@settings(max_examples=examples(25))
@given(several_programs(), st.integers(0, 3), st.data())
def test_every_resident_layout_keeps_its_values_whatever_is_written(programs, rank, data):
    resident = data.draw(st.lists(st.sampled_from(list(programs)), unique=True))
    storage = ShareWeights().lay_out(programs, rank, resident)
    check_storage("share_weights", programs, rank, resident, storage)
    flat, whole = buffers_of(storage), whole_tensors(programs)
    for name in data.draw(st.permutations(list(programs))):
        for fqn, piece in pieces(programs[name], rank, whole).items():
            view = storage.views[name][fqn].of(flat)
            assert view.shape == piece.shape
            view.copy_(piece)
        for fqn, piece in pieces(programs[name], rank, whole).items():
            assert torch.equal(storage.views[name][fqn].of(flat), piece), "its own tensors overlap"
    for name in resident:
        for fqn, piece in pieces(programs[name], rank, whole).items():
            assert torch.equal(storage.views[name][fqn].of(flat), piece), "a resident layout was overwritten"


@settings(max_examples=examples(25))
@given(several_programs(), st.integers(0, 3))
def test_sharing_never_takes_more_than_copies(programs, rank):
    storage = ShareWeights().lay_out(programs, rank)
    alone = sum(ShareWeights().lay_out({name: one}, rank).nbytes for name, one in programs.items())
    largest = max(ShareWeights().lay_out({name: one}, rank).nbytes for name, one in programs.items())
    assert largest <= storage.nbytes <= alone
    turns = ShareWeights().lay_out(programs, rank, ())
    assert turns.pool_bytes("resident") == 0
    assert turns.pool_bytes("arena") == largest


def config(text: str, *dims: str) -> DistConfig:
    """`config("dp2.tp2", "tp", "")`: dim 0 cut by tp."""
    return DistConfig(Strategy.parse(text).mesh, tuple((AxisShard(axis),) if axis else () for axis in dims))


def weights(text: str, *dims: str):
    shape = (64, 32)
    return program(text, {f"layers.{i}.w": (shape, config(text, *dims)) for i in range(3)})


def test_a_shard_is_a_view_of_the_whole_on_every_rank():
    programs = {"dp4": weights("dp4", "", ""), "rows": weights("dp2.tp2", "tp", ""), "cols": weights("tp4", "", "tp")}
    for rank in range(4):
        storage = ShareWeights().lay_out(programs, rank)
        assert storage.nbytes == storage.strategy_bytes("dp4") == 3 * 64 * 32 * 4
        view = storage.views["cols"]["layers.1.w"]
        assert view.shape == (64, 8)
        assert view.stride == (32, 1)
        assert view.offset == 64 * 32 + 8 * rank


def test_a_quarter_shares_with_a_half_only_where_it_lies_inside():
    programs = {"half": weights("dp2.tp2", "tp", ""), "quarter": weights("tp4", "tp", "")}
    half, quarter = 3 * 32 * 32 * 4, 3 * 16 * 32 * 4
    used = [ShareWeights().lay_out(programs, rank).nbytes for rank in range(4)]
    # Rank 1 has rows 16:32 and the half 32:64; rank 2 rows 32:48 and the half 0:32.
    assert used == [half, half + quarter, half + quarter, half]


def test_equal_layers_stand_at_equal_distances_and_aligned():
    storage = ShareWeights().lay_out({"tp4": weights("tp4", "tp", "")}, 1)
    offsets = [storage.views["tp4"][f"layers.{i}.w"].offset for i in range(3)]
    assert offsets[1] - offsets[0] == offsets[2] - offsets[1]
    assert all(offset * 4 % ALIGN_BYTES == 0 for offset in offsets)


def test_padding_and_sections_are_not_shared_with_a_wider_piece():
    shape = (10, 4)  # 10 rows on 4 ranks: pieces of 3, the last one has 1 row and padding
    fused = DistConfig(Strategy.parse("dp2.tp2").mesh, ((AxisShard("tp", (1, 1)),), ()))
    programs = {
        "whole": program("dp4", {"w": (shape, config("dp4", "", "")), "v": ((8, 4), config("dp4", "", ""))}),
        "cut": program("tp4", {"w": (shape, config("tp4", "tp", "")), "v": ((8, 4), config("tp4", "", ""))}),
        "fused": program("dp2.tp2", {"w": (shape, config("dp2.tp2", "", "")), "v": ((8, 4), fused)}),
    }
    padded, inside = ShareWeights().lay_out(programs, 3).views, ShareWeights().lay_out(programs, 0).views
    assert inside["cut"]["w"].offset == inside["whole"]["w"].offset
    assert padded["cut"]["w"].shape == (3, 4)
    assert padded["cut"]["w"].offset >= 10 * 4
    assert inside["fused"]["v"].offset not in (inside["whole"]["v"].offset, inside["cut"]["v"].offset)
    assert inside["fused"]["w"] == inside["whole"]["w"]


def test_dtypes_have_buffers_of_their_own():
    programs = {
        "a": weights("dp4", "", ""),
        "b": program("dp4", {"layers.0.w": ((64, 32), config("dp4", "", ""))}, torch.bfloat16),
    }
    storage = ShareWeights().lay_out(programs, 0)
    assert set(storage.numel) == {("resident", torch.float32), ("resident", torch.bfloat16)}


@pytest.mark.parametrize("resident", [("dp4",), ()])
def test_what_does_not_stay_takes_turns(resident):
    programs = {"dp4": weights("dp4", "", ""), "tp4": weights("tp4", "tp", ""), "tp2": weights("dp2.tp2", "", "tp")}
    storage = ShareWeights().lay_out(programs, 0, resident)
    assert storage.resident == resident
    assert storage.pool_bytes("arena") == (0 if resident else 3 * 64 * 32 * 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"offset": 1 << 20}, "goes beyond the buffer"),
        ({"offset": 0}, "it lies over layers.0.w of 'rows'"),
        ({"stride": (0, 1)}, "elements on top of each other"),
        ({"shape": (8, 32)}, r"holds torch.float32\[16, 32\], not torch.float32\[8, 32\]"),
        ({"pool": "arena"}, "goes beyond the buffer"),
        (None, "it has no view"),
    ],
)
def test_a_storage_in_which_weights_are_lost(change, why):
    """Under rows the rank has another quarter than under tp4: nothing lies inside of anything."""
    programs = {"rows": weights("dp2.tp2", "tp", ""), "tp4": weights("tp4", "tp", "")}
    storage = ShareWeights().lay_out(programs, 1)
    views = dict(storage.views["tp4"])
    check_storage("mine", programs, 1, ("rows", "tp4"), storage)
    view = views.pop("layers.1.w")
    if change is not None:
        views["layers.1.w"] = replace(view, **change)
    broken = replace(storage, views={**storage.views, "tp4": views})
    with pytest.raises(StorageError, match=rf"pass 'mine': layers.1.w of 'tp4' on rank 1: .*{why}"):
        check_storage("mine", programs, 1, ("rows", "tp4"), broken)


class OnTop(ShareWeights):
    """All weights at the same place."""

    def lay_out(self, programs, rank, resident=None):
        storage = super().lay_out(programs, rank, resident)
        views = {
            name: {fqn: replace(view, offset=0) for fqn, view in mine.items()} for name, mine in storage.views.items()
        }
        return replace(storage, views=views)


class Nothing(ShareWeights):
    def lay_out(self, programs, rank, resident=None):
        return {}


def test_what_a_pass_lays_out_is_checked_whatever_it_is_made_of():
    programs = {"tp4": weights("tp4", "tp", "")}
    with pytest.raises(StorageError, match="on rank 1: it lies over") as found:
        laid_out(OnTop(), programs, 1)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)  # told to all ranks
    with pytest.raises(
        PassContractError, match="lay_out returns a SharedStorage of buffers and views, no dict"
    ) as other:
        laid_out(Nothing(), programs, 1)
    assert str(pickle.loads(pickle.dumps(other.value))) == str(other.value)
