"""Guessed layouts against those of the model, lowered and cut."""

from __future__ import annotations

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.ir.exec_graph import Outline
from fxpar.ir.strategy import Strategy
from fxpar.search.known import KnownModel
from fxpar.search.layouts import guessed_layout
from fxpar.search.price import Depth, candidate
from fxpar.search.space import without_stages
from fxpar.search.staged import StagedGuess
from fxpar.search.switching import KnownSwitches, placement_of
from fxpar.switch.layout import layout_of
from tests.repeat import thinned
from tests.search.shallow import shallow

CLUSTER, ANCHORS, LAYERS, DEEP = usual_cluster(8), (64, 4096), 4, 8


CASES = [(model, text) for model in ("llama", "hf:gpt2") for text in ("dp4.cp2+zero3", "pp2.cp2.tp2+sp+zero3")]
CASES += [("stack", CASES[-1][1])]


@pytest.mark.parametrize(("model", "text"), thinned(CASES, CASES[-1:]))  # at night also a tied embedding, of gpt2
def test_they_are_those_of_the_deep_model(model, text):
    rows, strategy = shallow(model, LAYERS), Strategy.parse(text)
    flat = candidate(rows.lower, without_stages(strategy), CLUSTER, rows.depth, ANCHORS)
    one = flat if strategy.pipeline_size == 1 else StagedGuess(strategy, CLUSTER, ANCHORS, flat)
    guess = guessed_layout(one, LAYERS)
    assert guess is not None
    assert dict(guess.params) == dict(layout_of(rows.outlines(strategy, LAYERS)).params)


def test_none_where_nothing_shallow_was_priced():
    rows = shallow("stack", LAYERS)
    pipeline = candidate(rows.lower, Strategy.parse("pp2"), CLUSTER, rows.depth, ANCHORS)
    flat = candidate(rows.lower, Strategy.parse("dp2"), CLUSTER, rows.depth, ANCHORS)
    assert guessed_layout(pipeline, LAYERS) is None
    assert guessed_layout(flat, flat.samples[1] - 1) is None


@pytest.mark.parametrize(
    "text",
    thinned(
        APART := [
            "dp8[layers.{0-2}: +zero3]",
            "dp2.pp2.tp2+sp+cut(layers.5)",
            "dp2.tp2+sp+cut(layers.5)[layers.{0-3}: +remat; *.ffn: cp2] > dp2.cp2+zero3",
        ],
        APART[:1],
    ),
)
def test_layers_that_are_told_apart_lie_as_in_the_deep_model(text):
    rows, strategy = shallow("stack", DEEP), Strategy.parse(text)
    known = KnownModel(rows.lower, rows.outlines, CLUSTER, Depth(DEEP), (64, 512))
    one = known.candidate(strategy, lambda _: None)
    assert one is not None, known.refused
    guess = guessed_layout(one, DEEP)
    assert guess is not None
    assert dict(guess.params) == dict(layout_of(rows.outlines(strategy, DEEP)).params)


def test_what_was_lowered_says_how_all_layers_lie():
    """Of a set that is settled, so that its switches are those of the deep model."""
    rows = shallow("stack", DEEP)
    known = KnownModel(rows.lower, rows.outlines, CLUSTER, Depth(DEEP), (64, 512))

    def refuse(*_: object) -> Outline:
        raise AssertionError("something deeper is captured")

    switches = KnownSwitches(CLUSTER, refuse, DEEP, guess=False)
    for strategy in map(Strategy.parse, ("dp8", "dp4.pp2")):
        one = known.candidate(strategy, lambda _: None)
        assert one is not None, known.refused
        switches.add([one])
        found = switches._layouts[placement_of(strategy)]
        assert dict(found.params) == dict(layout_of(rows.outlines(strategy, DEEP)).params)
