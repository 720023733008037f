"""Layouts: what an outline says is what the lowered program takes and gives."""

from __future__ import annotations

import pytest

from fxpar.errors import NoExpertsError, StageCountError, UnknownCutError
from fxpar.ir.dist_config import OuterShard
from fxpar.ir.mesh import Mesh
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower, outline
from fxpar.switch import ParamLayout, layout_of
from fxpar.switch.terms import gradient_placements
from tests.captured import llama
from tests.repeat import thinned
from tests.stages.models import loaded

FOUR = "cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)"
WHOLE = ["dp2", "dp2.tp2+sp", "dp2.tp2+zero1", "tp2.dp2+zero3", "cp2.dp2+zero3", "tp4"]
STAGES = ["pp2.tp2", "dp2.pp2+zero3", "pp3+cut(layers.1|layers.1.ffn)", f"pp2+interleaved_1f1b+{FOUR}"]


def taken(strategy: str | Strategy, layers: int = 2) -> ParamLayout:
    return layout_of(outline(llama(layers=layers).graph, strategy))


@pytest.mark.parametrize(
    ("layers", "text"),
    thinned(
        [*((1, text) for text in WHOLE), *((2, text) for text in STAGES + WHOLE)],
        [(1, "dp2.tp2+zero1"), (1, "tp2.dp2+zero3"), (1, "tp4"), (2, "pp2.tp2"), (2, "dp2.pp2+zero3")],
    ),
)
def test_as_the_lowered_program_takes_them(layers, text):
    graph = llama(layers=layers).graph
    program, outlined = lower(graph, text, for_store=True), outline(graph, text)
    expected, found = layout_of(program), layout_of(outlined)
    assert found == expected
    assert list(found.params) == list(expected.params)
    assert gradient_placements(outlined) == gradient_placements(program)
    if text in WHOLE:
        assert list(found.params) == [info.fqn for info in graph.params()]


def test_placements_of_the_user():
    strategy = Strategy.parse("tp2", overrides={"*.up_proj.weight": "R@tp"})
    assert taken(strategy, 1).params["layers.0.ffn.up_proj.weight"].copies[0].shard_axes == ()


def test_gradients_lie_as_zero_stores_them():
    stored = layout_of(lower(llama().graph, "dp2.tp2+zero1"))
    assert taken("dp2.tp2", 1).scattered().params == stored.params


def test_few_heads_are_cut_in_part():
    """Two heads on four ranks: each lies on two."""
    (dist,) = taken("tp4", 1).params["layers.0.attention.k_proj.weight"].copies
    assert isinstance(dist.placement("tp"), OuterShard)
    assert dist.local_shape((16, 32)) == (8, 32)


def stages(layout: ParamLayout, fqn: str) -> list[tuple[int, ...]]:
    return [dist.mesh.ranks for dist in layout.params[fqn].copies]


@pytest.mark.parametrize("text", ["dp2.pp2.tp2", "pp2.dp2.tp2", "dp2.tp2.pp2"])
def test_stages_are_consecutive_ranks_wherever_pp_stands(text):
    layout, first, last = taken(text), (0, 1, 2, 3), (4, 5, 6, 7)
    assert layout.world == 8
    assert stages(layout, "embedding.weight") == [first]
    assert [stages(layout, f"layers.{i}.ffn.up_proj.weight") for i in range(2)] == [[first], [last]]
    assert stages(layout, "norm.weight") == [last]
    dist = layout.params["layers.1.ffn.up_proj.weight"].copies[0]
    assert dist.mesh == Mesh((("dp", 2), ("tp", 2)), 4)
    assert str(dist) == "f64[_@tp, _]"


def test_a_tied_embedding_lies_on_both_ends():
    cuts = "layers.0.norm_2|layers.1|layers.1.norm_2"
    layout = layout_of(outline(loaded("gpt", layers=2, dropout=0.25).graph, f"pp4.tp2+cut({cuts})"))
    assert stages(layout, "embedding.weight") == [(0, 1), (6, 7)]
    assert "head.weight" not in layout.params
    assert stages(layout.scattered(), "embedding.weight") == [(0, 1)]


@pytest.mark.parametrize(
    ("text", "error"), [("pp6", StageCountError), ("ep2", NoExpertsError), ("pp2+cut(layers.9)", UnknownCutError)]
)
def test_what_cannot_be_lowered_has_no_layout(text, error):
    with pytest.raises(error):
        taken(text)
