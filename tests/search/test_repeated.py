"""Pipelines put together from one of three stages, against those that are lowered whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.cost.cluster import usual_cluster
from fxpar.cost.group import rank_costs
from fxpar.cost.link_bytes import sent_by_position
from fxpar.ir.strategy import Strategy
from fxpar.memory import memory_over_time
from fxpar.search.known import KnownModel
from fxpar.search.repeated import of_few_stages, repeated
from fxpar.search.space import without_stages
from fxpar.store.home import home_layout, param_specs
from fxpar.switch.layout import layout_of
from fxpar.switch.terms import gradient_placements
from tests.repeat import thinned
from tests.search.shallow import shallow

CLUSTER, EACH = usual_cluster(16), 2
CASES = [
    ("stack", "layers", "dp2.pp4.tp2+sp"),
    ("llama", "layers", "dp2.pp4.tp2+sp"),
    ("hf:gpt2", "transformer.h", "pp4.cp2+remat"),
]


@pytest.mark.parametrize(("model", "layers", "text"), thinned(CASES, CASES[:1]))
def test_they_are_the_pipeline_that_is_lowered_whole(model, layers, text):
    rows, strategy = shallow(model, 8), Strategy.parse(text)
    cuts = tuple(f"{layers}.{EACH * stage}" for stage in range(1, 4))
    whole = rows.lower(replace(strategy, pipeline=replace(strategy.pipeline, cuts=cuts)), 4 * EACH)
    few = rows.lower(of_few_stages(strategy, layers, EACH), 3 * EACH)
    made = repeated(few, strategy, layers, EACH)
    assert (made.cuts, made.flops, made.terms) == (whole.cuts, whole.flops, whole.terms)
    assert list(rank_costs(made, CLUSTER).values()) == list(rank_costs(whole, CLUSTER).values())
    assert sent_by_position(made, CLUSTER) == sent_by_position(whole, CLUSTER)
    assert dict(layout_of(made).params) == dict(layout_of(whole).params)
    assert gradient_placements(made) == gradient_placements(whole)
    assert home_layout(param_specs(made), 16).params == home_layout(param_specs(whole), 16).params
    sizes = {dim.name: 512 for dim in whole.dims if dim.name == "T"}
    ours, theirs = (memory_over_time(one, sizes, cluster=CLUSTER) for one in (made, whole))
    assert [rank.prediction.peak_bytes for rank in ours.ranks] == [rank.prediction.peak_bytes for rank in theirs.ranks]


def test_a_deep_pipeline_captures_no_deep_model():
    rows, strategy = shallow("stack", 16), Strategy.parse("pp4")
    asked: list[int] = []

    def lower(one: Strategy, layers: int):
        asked.append(layers)
        return rows.lower(one, layers)

    known = KnownModel(lower, rows.outlines, CLUSTER, rows.depth, (64, 512))
    flat = known.candidate(without_stages(strategy), lambda _: None)
    found = known.candidate(strategy, lambda _: None)
    assert found is not None
    assert found.flat is flat
    assert found.samples == (8, 12)
    assert max(asked) == 9
    assert found.steps == 2
    looked_at = found.predicted(64)
    found.flat = None  # all positions are looked at
    found._samples.clear()
    assert found.predicted(64) == looked_at
