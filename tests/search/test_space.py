"""Shapes of strategies, and the roles that the ranks of a replica may have."""

from __future__ import annotations

import pytest

from fxpar.ir.strategy import Strategy
from fxpar.search import space
from fxpar.search.space import (
    also_tried,
    in_bins,
    layout_of_ranks,
    layout_rule,
    placed_alike,
    role_layouts,
    shapes,
    single_axis,
    with_layout,
    with_savings,
)


def written(layouts) -> list[str]:
    return [".".join(f"{name}{degree}" for name, degree in one) for one in layouts]


def test_shapes_are_all_of_a_world():
    found = [str(one) for one in shapes(8, 4, 2)]
    assert found[0] == "dp8"
    assert len(set(found)) == len(found)
    assert {"dp8", "cp8", "dp2.pp2.tp2+sp", "dp2.tp4+sp", "pp2.cp4", "dp2.cp2.tp2+sp"} <= set(found)
    assert all(Strategy.parse(text).world == 8 for text in found)
    assert not any("tp8" in text or "pp4" in text for text in found)
    assert with_savings(Strategy.parse("tp4+sp"), 2) is None
    assert str(with_savings(Strategy.parse("tp4+sp"), 1)) == "tp4+sp+remat(selective|redo_comm)"
    assert str(with_savings(Strategy.parse("dp2.cp2"), 1)) == "dp2.cp2+remat(selective)"
    assert str(with_savings(Strategy.parse("dp4"), 4)) == "dp4+zero3+remat"


def test_shapes_of_a_model_with_experts_are_those_without_and_more():
    """Degrees of ep divide the number of experts; ranks inside of a stage are at most 64."""
    found, without = [str(one) for one in shapes(8, 4, 2, experts=6)], [str(one) for one in shapes(8, 4, 2)]
    assert [text for text in found if "ep" not in text] == without
    assert {"dp4.ep2", "ep2.cp4", "dp2.ep2.tp2+sp", "dp2.pp2.ep2", "pp2.ep2.cp2"} <= set(found)
    assert not any("ep4" in text or "ep8" in text for text in found)
    assert not any(one.degree("ep") * one.degree("cp") > 64 for one in shapes(128, 1, 1, experts=128))


@pytest.mark.parametrize(
    ("text", "kv_heads", "want"),
    [
        ("dp2.cp4", 4, []),
        ("dp2.cp8", 2, ["dp2.ring4.cp2"]),
        ("pp2.cp4.tp2+sp", 4, ["pp2.ring2.cp2.tp2+sp"]),
        ("cp2.tp4+sp", 2, ["ring2.tp4+sp"]),
        ("cp6", 4, ["ring3.cp2"]),
        ("dp4", 1, []),
    ],
)
def test_rings_take_the_ranks_beyond_the_heads(text, kv_heads, want):
    assert list(map(str, space.with_rings([Strategy.parse(text)], kv_heads))) == [text, *want]


@pytest.mark.parametrize(
    ("ranks", "per_node", "want"),
    [
        (1, 8, [""]),
        (4, 8, ["tp4", "cp2.tp2", "cp4"]),
        (16, 8, ["cp2.tp8", "cp4.tp4", "cp8.tp2", "cp16"]),
        (6, 8, ["tp6", "cp2.tp3", "cp3.tp2", "cp6"]),
    ],
)
def test_layouts_of_ranks(ranks, per_node, want):
    assert written(role_layouts(ranks, per_node)) == want


def test_a_line_more_is_a_role_more(monkeypatch):
    monkeypatch.setattr(space, "ROLES", (("ep", False), *space.ROLES))
    assert written(role_layouts(2, 8)) == ["tp2", "cp2", "ep2"]


def test_modules_with_experts_may_have_them_apart():
    assert written(role_layouts(4, 2, experts=6)) == ["cp2.tp2", "cp4", "ep2.tp2", "ep2.cp2"]
    assert written(role_layouts(4, 8, experts=4))[-1] == "ep4"


def test_other_roles_for_the_same_ranks():
    strategy = Strategy.parse("dp2.pp2.cp2.tp4+sp+zero1")
    assert layout_of_ranks(strategy) == (("cp", 2), ("tp", 4))
    assert str(with_layout(strategy, single_axis(layout_of_ranks(strategy)))) == "dp2.pp2.tp8+sp+zero1"
    assert str(with_layout(strategy, (("cp", 8),))) == "dp2.pp2.cp8+zero1"
    assert str(layout_rule("*.ffn", (("cp", 2), ("tp", 4)), None)) == "*.ffn: cp2.tp4+sp"
    assert str(layout_rule("*.ffn", (), 3)) == "*.ffn: +zero3"
    assert in_bins((("cp", 2), ("tp", 4))) == (("rows", 2), ("tp", 4))


def test_what_is_recomputed_or_runs_in_chunks_places_nothing():
    ruled = "dp4+remat+chunks(2)+capacity(2)[layers.{0-3}: +remat(none); head: +zero3+capacity(3)+chunks(4)]"
    assert str(placed_alike(Strategy.parse(ruled))) == "dp4[head: +zero3]"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("pp4", ["pp4+zb_h1"]),
        ("pp4+chunks(4)", ["pp4+chunks(4)+zb_h1", "pp4", "pp4+zb_h1"]),
    ],
)
def test_other_pipelines(text, want):
    assert [str(one) for one in also_tried(Strategy.parse(text), beside=True)] == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "dp2.tp2+sp+zero3+remat",
            [
                "dp2.tp2+sp+zero3+offload",
                "dp2.tp2+sp+zero3+remat(selective|redo_comm)+offload",
                "dp2.tp2+sp+zero3+remat+offload",
            ],
        ),
        ("dp4+remat(selective)", ["dp4+offload", "dp4+remat(selective)+offload"]),
        ("dp4+zero3+chunks(4)", ["dp4+zero3+offload+chunks(4)"]),
        ("dp4+chunks(4)", []),
        ("dp2.ep2+chunks(4)", ["dp2.ep2+chunks(4)+ep_chunks(2)"]),
        ("dp2.ep2+lsh(0.2)", []),
    ],
)
def test_what_runs_beside_kernels(text, want):
    one = Strategy.parse(text)
    assert also_tried(one, beside=True) == tuple(map(Strategy.parse, want))
    assert also_tried(one, beside=False) == ()
