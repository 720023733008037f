"""The section of the memory tab says what `fxpar.memory` predicts."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.memory import MemoryOverTime, memory_over_time
from fxpar.viz.memory import memory_section, thinned
from tests.viz.shown import STRATEGIES, viewed


@functools.cache
def predicted(name: str) -> MemoryOverTime:
    view = viewed(name)
    return memory_over_time(view.stored, micro_batches=view.runs)


@pytest.fixture(scope="module")
def section():
    return json.loads(json.dumps(memory_section([viewed(name) for name in STRATEGIES])))


@pytest.mark.parametrize("name", STRATEGIES)
def test_numbers_are_the_prediction(section, name):
    found, shown = predicted(name).prediction, section["by_strategy"][name]
    assert shown["peak_bytes"] == found.peak_bytes == sum(shown["peak"].values())
    assert (shown["micro_batches"], shown["schedule"]) == (found.micro_batches, found.schedule)
    assert (shown["sizes"], shown["asked"]) == ({"T": 14 if "+sp" in name else 13}, {"T": 13})
    table = {what: size for what, size, _ in shown["table"]}
    assert table["peak"] == found.peak_bytes
    assert table["weights"] == shown["peak"]["weights"] == found.weight_bytes
    assert table["activations"] == found.body.forward_bytes + found.body.again_bytes
    assert found.body.kept_bytes <= table["for backward"] == found.body.saved_bytes <= found.peak_bytes
    assert table["staging"] == found.staging_bytes
    assert shown["stages"] == [json.loads(json.dumps(stage.to_json())) for stage in found.stages]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_series_holds_its_peak(section, name):
    ranks, shown = predicted(name).ranks, section["by_strategy"][name]["ranks"]
    assert [one["ranks"] for one in shown] == [list(rank.ranks) for rank in ranks]
    for rank, one in zip(ranks, shown, strict=True):
        totals = [sum(sizes) for sizes in zip(*one["series"].values(), strict=True)]
        assert max(totals) == rank.prediction.body.total_bytes
        node, _, _, during = (one["names"][place] for place in one["at"][totals.index(max(totals))])
        assert rank.prediction.body.node == ".".join(filter(None, (during, node)))
        assert sum(one["level"].values()) == rank.prediction.state_bytes + rank.accumulator_bytes
        assert len(one["x"]) == len(one["at"]) == len(totals) <= one["moments"] == len(rank.series.moments)
        assert one["x"] == sorted(one["x"])
        assert one["x"][-1] <= one["end_ms"] + 1e-6


def test_backward_begins_inside(section):
    body, staged = (section["by_strategy"][name]["ranks"][0] for name in ("dp2.tp2+sp", "pp2.tp2"))
    assert 0 < body["backward_ms"] < body["end_ms"]
    assert staged["backward_ms"] is None  # forwards and backwards take turns
    modules = {body["names"][module] for _, module, _, _ in body["at"]}
    assert {"layers.1.ffn.up_proj", "head"} <= modules


def test_as_many_micro_batches_as_told():
    view = replace(viewed("pp2.tp2"), micro_batches=5)
    assert view.runs == 5
    assert [viewed(name).runs for name in ("pp2.tp2", "dp2.tp2+sp")] == [4, 2]  # as `fxpar memory`


def test_nothing_to_show():
    assert memory_section([]) is None
    assert memory_section([replace(viewed("pp2.tp2"), stored=None)]) is None


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=90), most=st.integers(2, 40))
def test_thinning_keeps_maxima(values, most):
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 1)
    assert values.index(max(values)) in kept
    assert min(values[i] for i in kept) == min(values)
