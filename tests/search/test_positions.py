"""Where strategies may have rules, and how these are written."""

from __future__ import annotations

import pytest

from fxpar.ir.strategy import Strategy
from fxpar.search.layer_list import Layers
from fxpar.search.positions import (
    PlannedStage,
    experts_by_glob,
    globs_of_attention,
    globs_of_weight,
    of_planned,
    position_of,
    times,
)
from fxpar.search.price import candidate
from tests.search.shallow import shallow
from tests.search.test_kinds import CLUSTER, LAYERS

DEEP = Layers("model.layers", 60, ("", "mlp", "mlp.up", "self_attn"), ("lm_head", "model", "model.norm", "vision.mlp"))


@pytest.mark.parametrize(
    ("fqn", "glob"),
    [
        ("model.layers.7.self_attn.q_proj", "*.self_attn"),
        ("model.layers.7.mlp", "model.layers.*.mlp"),  # there is another mlp
        ("model.layers.7", "model.layers.{0-59}"),
        ("model.norm", "model.norm"),
        ("", ""),
    ],
)
def test_positions(fqn, glob):
    assert position_of(fqn, DEEP) == glob


def test_layers_are_in_a_small_model_less_often():
    assert (times("*.self_attn", DEEP, 3), times("lm_head", DEEP, 3)) == (20, 1)


def test_positions_of_a_model_have_matrices_and_weight():
    model = shallow("stack", LAYERS)
    flat = candidate(model.lower, Strategy.parse("dp8"), CLUSTER, model.depth, (64, 512))
    layers = Layers("layers", LAYERS, ("", "attention", "ffn"), ("embedding", "head", "norm"))
    assert globs_of_weight(flat, layers, 0.0) == ["embedding", "*.attention", "*.ffn", "head"]
    assert set(globs_of_weight(flat, layers, 0.2)) <= {"*.attention", "*.ffn"}
    assert globs_of_attention(flat, layers) == {"*.attention"}


FEW, MORE = "dp4", "dp4+remat"


@pytest.mark.parametrize(
    ("stages", "want"),
    [
        ([((MORE, FEW), (8, 52))], "dp4[model.layers.{0-7}: +remat]"),
        ([((MORE, FEW), (52, 8))], "dp4+remat[model.layers.{52-59}: +remat(none)]"),
        ([(("dp4+zero3", FEW), (1, 59))], "dp4[model.layers.0: +zero3]"),
        (
            [((MORE, FEW), (3, 25)), ((MORE, FEW), (1, 31))],
            "dp4.pp2+cut(model.layers.28)[model.layers.{0-2,28}: +remat]",
        ),
        ([((MORE, FEW), (28, 0)), ((MORE, FEW), (0, 32))], "dp4.pp2+cut(model.layers.28)[model.layers.{0-27}: +remat]"),
        (
            [(("tp2+sp+remat", "tp2+sp"), (3, 25)), (("tp3+sp+chunks(4)",), (32,))],
            "tp2+sp+cut(model.layers.28)[model.layers.{0-2}: +remat] > tp3+sp+chunks(4)",
        ),
        # Of two rules for one module neither would win.
        (
            [(("tp4+sp+remat[*.mlp: cp4; lm_head: cp4]", "tp4+sp[*.mlp: cp4; lm_head: cp4]"), (8, 52))],
            "tp4+sp[*.mlp: cp4; lm_head: cp4; model.layers.{0-7}: +remat]",
        ),
        (
            [(("tp4+sp[*.mlp: cp4]", "tp4+sp+offload[*.mlp: cp2.tp2+sp; *.self_attn: cp4]"), (8, 52))],
            "tp4+sp+offload[model.layers.{0-7}.mlp: cp4; model.layers.{8-59}.mlp: cp2.tp2+sp; "
            "model.layers.{8-59}.self_attn: cp4; model.layers.{0-7}: +offload(none)]",
        ),
    ],
)
def test_stages_are_written_as_short_as_they_can_be(stages, want):
    """What most of the layers do is the strategy's own; the text is read as it was written."""
    planned = [PlannedStage(tuple(map(Strategy.parse, texts)), counts) for texts, counts in stages]
    found = of_planned(planned, "1f1b", DEEP)
    assert str(found) == want
    assert Strategy.parse(want) == found


def test_positions_with_experts():
    model = shallow("mixture", 1)
    flat = candidate(model.lower, Strategy.parse("dp8"), CLUSTER, model.depth, (64, 512))
    assert experts_by_glob(flat, Layers("layers", 1, ("", "attention", "ffn"), ("embedding", "head", "norm"))) == {
        "*.ffn": 8
    }
