"""Where strategies may have rules, and how these are written."""

from __future__ import annotations

import pytest

from fxpar.ir.strategy import Strategy
from fxpar.search.kinds import Layers
from fxpar.search.positions import globs_of_attention, globs_of_weight, position_of, times, with_run
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


@pytest.mark.parametrize(
    ("less", "more", "count", "want"),
    [
        ("dp4", "dp4+remat", 8, "dp4[model.layers.{0-7}: +remat]"),
        ("dp4", "dp4+remat", 52, "dp4+remat[model.layers.{52-59}: +remat(none)]"),
        ("dp4", "dp4+remat", 1, "dp4[model.layers.0: +remat]"),
        (
            "pp4+remat(selective)",
            "pp4+remat",
            3,
            "pp4+remat(selective)[model.layers.{0-2,15-17,30-32,45-47}: +remat]",
        ),
        ("pp2+remat(selective)", "pp2+remat", 28, "pp2+remat[model.layers.{28-29,58-59}: +remat(selective)]"),
    ],
)
def test_runs_of_layers(less, more, count, want):
    """What most of the layers do is the strategy's own; the text is read as it was written."""
    found = with_run(Strategy.parse(less), Strategy.parse(more), DEEP, count)
    assert str(found) == want
    assert Strategy.parse(want) == found
    full = [found.remat_of(f"model.layers.{i}") == Strategy.parse(more).remat for i in range(60)]
    each = 60 // found.stages
    assert full == [i % each < count for i in range(60)]
