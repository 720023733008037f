"""All moments of a prediction: the peak is the fullest of them, and each says what is held for what."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.lowering import lower
from fxpar.memory import KINDS, Moment, Series, body_series, memory_over_time, predict_memory
from tests.captured import llama

PEAK_KINDS = ("again", "backward", "result", "message")


def test_each_call_has_a_moment():
    """A value is there from the call that makes it to its last reader; the backward reads what is saved."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["local"] = TensorMeta((dim_symbol("T"),), torch.float32)
    kept = graph.call_function(aten.sin.default, (x,))
    passing = graph.call_function(aten.cos.default, (kept,))
    loss = graph.call_function(aten.sum.default, (passing,))
    gradient = graph.call_function(aten.mul.Tensor, (kept, 2))
    result = graph.call_function(aten.neg.default, (gradient,))
    for node in (gradient, result):
        node.meta["backward"] = True
    graph.output((loss, result))
    found = body_series(graph, {dim_symbol("T"): 100})
    assert [moment.node for moment in found.moments] == [kept, passing, loss, gradient, result]
    seen = [{kind: size for kind, size in zip(KINDS, moment.sums, strict=True) if size} for moment in found.moments]
    assert seen == [
        {"saved": 400},
        {"saved": 400, "forward": 400},
        {"saved": 400, "forward": 400, "result": 4},
        {"saved": 400, "backward": 400, "result": 4},
        {"backward": 400, "result": 404},
    ]
    assert (found.saved_bytes, found.peak.forward_bytes, found.peak.node) == (400, 800, "sum_default")


def test_nothing_runs():
    assert Series((), 0).peak.total_bytes == 0


def test_a_moment_names_its_action():
    assert Moment(None, (0,) * len(KINDS), during="activation 0 0->1").name == "activation 0 0->1"


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [("dp2+remat", 1), ("dp2+zero3", 3), ("pp2+zb_h1+remat", 3)],
)
def test_the_peak_is_the_fullest_moment(strategy, micro_batches):
    program = lower(llama(layers=2).graph, strategy, for_store=True)
    found = memory_over_time(program, micro_batches=micro_batches)
    assert found.prediction == predict_memory(program, micro_batches=micro_batches)
    assert len(found.ranks) == program.strategy.degree("pp")
    assert max(rank.prediction.peak_bytes for rank in found.ranks) == found.prediction.peak_bytes
    block = program.strategy.world // len(found.ranks)
    assert [rank.ranks for rank in found.ranks] == [(i * block, (i + 1) * block - 1) for i in range(len(found.ranks))]
    for rank in found.ranks:
        body = rank.prediction.body
        fullest = max(rank.series.moments, key=lambda moment: moment.total_bytes)
        sums = dict(zip(KINDS, fullest.sums, strict=True))
        assert (fullest.name, fullest.total_bytes) == (body.node, body.total_bytes)
        assert {kind: sums[kind] for kind in PEAK_KINDS} == {kind: asdict(body)[f"{kind}_bytes"] for kind in PEAK_KINDS}
        assert sums["saved"] + sums["forward"] == body.forward_bytes
        # A batch that a forward keeps counts as saved from then on, whoever else holds it.
        assert max(moment.sums[0] for moment in rank.series.moments) <= 1.01 * rank.series.saved_bytes
        assert rank.series.saved_bytes == body.saved_bytes > 0
        assert (max(moment.sums[KINDS.index("again")] for moment in rank.series.moments) > 0) == ("remat" in strategy)
