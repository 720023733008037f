"""Predicted peaks against measured ones, and what the sums are made of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ClusterError, DimNameError
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.lowering import lower
from fxpar.memory import Conditions, body_series, predict_memory, program_peak
from fxpar.memory.predict import program_series
from fxpar.passes.pack_documents import pack_documents
from fxpar.store import home_layout, param_specs
from fxpar.switch.node_first import NodeFirstPlan, cheapest_reduction
from fxpar.switch.terms import gradient_placements
from tests.captured import llama
from tests.memory.measured import allocated_bytes, body_bytes, model
from tests.repeat import thinned

SIZES = {"layers": "2", "dim": "128", "ffn": "256", "vocab": "512"}
CASES = [
    ("llama", 256, "float32", SIZES, "dp1", 2),
    ("llama", 256, "float32", SIZES, "dp1+remat", 1),
    ("llama", 256, "float32", SIZES, "dp1+remat(selective)", 2),
    ("llama", 256, "float32", SIZES, "tp2+sp+remat", 2),
    ("llama", 256, "float32", SIZES, "dp2+zero3+remat", 1),
    ("llama", 256, "float32", SIZES, "cp2", 1),
    ("llama", 256, "float32", SIZES, "ring4", 1),
    ("llama", 256, "bfloat16", SIZES, "dp1", 1),
    ("llama", 256, "bfloat16", SIZES, "tp2+remat", 1),
    ("llama", 256, "float32", SIZES | {"vocab": "4096"}, "dp1+chunks(8)", 2),
    ("llama", 256, "bfloat16", SIZES | {"vocab": "4096"}, "tp2+sp+chunks(4)", 1),
    ("llama", 256, "float32", SIZES, "dp1+offload", 2),
    ("llama", 256, "float32", SIZES | {"layers": "4"}, "tp2+sp+offload(0.6)", 1),
    ("gpt", 256, "float32", {}, "dp1+remat", 1),
    ("gpt", 256, "float32", {}, "tp2", 2),
    ("vit", 16, "float32", {}, "tp2+remat", 2),
    ("mlp", 300, "float32", {}, "dp2", 1),
]


@pytest.mark.parametrize(
    ("spec", "tokens", "dtype", "options", "strategy", "micro_batches"),
    thinned(CASES, [CASES[i] for i in (0, 2, 3, 4, 6, 8, 9, 11, 15)]),
)
def test_peak(spec, tokens, dtype, options, strategy, micro_batches):
    """Within a tenth of a run's peak."""
    torch.set_num_threads(1)
    captured = model(spec, tokens, dtype, **options)
    program = lower(captured.graph, strategy)
    positions = captured.batches[0].get("position_ids")
    conditions = Conditions(longest=None if positions is None else int(positions.max()) + 1)
    predicted = program_peak(
        program, captured.graph.example_dims(), micro_batches=micro_batches, conditions=conditions
    ).total_bytes
    measured = body_bytes(captured, program, micro_batches)
    assert 0.9 * measured <= predicted <= 1.1 * measured


def test_what_waits_on_the_host_is_a_figure_of_its_own():
    """It is no longer on the device, where what a block needs comes back in its place."""
    plain, moved = (lower(llama(layers=2).graph, strategy) for strategy in ("dp1", "dp1+offload"))
    before, after = (program_peak(program, llama(layers=2).graph.example_dims()) for program in (plain, moved))
    assert before.host_bytes == 0 < after.host_bytes
    assert after.saved_bytes < 0.2 * before.saved_bytes
    assert after.saved_bytes + after.host_bytes == before.saved_bytes
    assert after.total_bytes < before.total_bytes
    series = program_series(moved, llama(layers=2).graph.example_dims())
    assert after.total_bytes == max(moment.total_bytes for moment in series.moments)
    prediction = predict_memory(lower(llama(layers=2).graph, "dp1+offload", for_store=True))
    assert ("host", after.host_bytes) in [row[:2] for row in prediction.rows()]


def test_the_measurement_measures():
    assert allocated_bytes(10_000) == 10_000


def test_lifetimes():
    """A value dies with its last reader, a view keeps its base, a result stays."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["local"] = TensorMeta((dim_symbol("T"),), torch.float32)
    a = graph.call_function(aten.sin.default, (x,))  # 400 bytes
    view = graph.call_function(aten.slice.Tensor, (a, 0, 0, 1))
    wide = graph.call_function(aten.outer.default, (x, x))  # 40 000
    total = graph.call_function(aten.sum.default, (wide,))
    doubled = graph.call_function(aten.mul.Tensor, (view, 2))
    for node in (total, doubled):
        node.meta["backward"] = True
    graph.output((total, doubled))
    peak = body_series(graph, {dim_symbol("T"): 100}).peak
    assert (peak.node, peak.total_bytes) == ("sum_default", 400 + 40_000 + 4)
    assert (peak.forward_bytes, peak.result_bytes, peak.backward_bytes) == (40_400, 4, 0)
    assert peak.saved_bytes == 40_400


def test_state():
    """Masters, moments and gradients over all ranks; the graph's own weights as it computes with them."""
    numel = sum(t.numel() for t in llama(dtype=torch.float32).params.values())
    graph = llama(dtype=torch.float32).graph
    one = predict_memory(lower(graph, "dp1", for_store=True))
    assert (one.master_bytes, one.optimizer_bytes, one.weight_bytes) == (4 * numel, 8 * numel, 4 * numel)
    assert (one.home_gradient_bytes, one.gradient_bytes, one.staging_bytes) == (4 * numel, 4 * numel, 0)
    four = predict_memory(lower(graph, "dp2.tp2", for_store=True))
    assert 0.25 <= four.master_bytes / one.master_bytes < 0.27  # uneven cuts are padded
    assert four.optimizer_bytes == 2 * four.master_bytes
    assert 0.5 < four.weight_bytes / one.weight_bytes < 0.55
    assert 0 < four.staging_bytes <= 2 * four.weight_bytes


def test_narrow_weights_have_wide_masters():
    captured = model("llama", 256, "bfloat16", **SIZES)
    found = predict_memory(lower(captured.graph, "dp1", for_store=True))
    assert found.master_bytes == 2 * found.weight_bytes == found.gradient_bytes
    assert found.optimizer_bytes == 2 * found.master_bytes


def test_tokens_and_micro_batches():
    program = lower(llama(layers=2).graph, "cp2+remat", for_store=True)
    (dim,) = program.dims
    small, large = (predict_memory(program, {dim.name: tokens}) for tokens in (64, 127))
    assert small.sizes == {dim.name: 64}
    assert large.sizes == {dim.name: 128}  # cp2 cuts the tokens in two: padded
    assert small.state_bytes == large.state_bytes
    assert large.body.saved_bytes == pytest.approx(2 * small.body.saved_bytes, rel=0.05)
    several = predict_memory(program, {dim.name: 64}, micro_batches=3)
    assert several.step_bytes == several.body.total_bytes + several.gradient_bytes
    assert several.peak_bytes == pytest.approx(small.peak_bytes, rel=0.02)  # no gradient is held twice
    assert small.body.result_bytes > 0 == several.body.result_bytes  # added to what is there, and freed
    with pytest.raises(DimNameError, match="'tokens' is not a dynamic dim of this model"):
        predict_memory(program, {"tokens": 64})


def test_sums():
    found = predict_memory(lower(llama().graph, "tp2+sp", for_store=True), micro_batches=2)
    data = json.loads(json.dumps(found.to_json()))
    assert data["peak_bytes"] == found.peak_bytes == data["state_bytes"] + max(data["step_bytes"], data["switch_bytes"])
    body = data["body"]
    parts = ("forward_bytes", "again_bytes", "backward_bytes", "result_bytes", "workspace_bytes")
    assert body["total_bytes"] == sum(body[part] for part in parts)
    assert data["step_bytes"] == body["total_bytes"] + data["gradient_bytes"]


def test_longer_documents_take_more():
    captured = model("hf:gemma2", 256)
    program = lower(pack_documents(captured.graph), "dp1+remat")
    dims = captured.graph.example_dims()
    short, long, row = (program_peak(program, dims, conditions=Conditions(longest=n)) for n in (32, 200, None))
    assert short.total_bytes <= long.total_bytes <= row.total_bytes
    assert short.total_bytes < row.total_bytes


def test_sums_of_a_node_are_those_of_the_reductions_plan():
    """What `cheapest_reduction` plans with, where the network is slow; nothing on one node."""
    program = lower(model("llama", 256, **SIZES).graph, "dp4", for_store=True)
    slow = ClusterSpec(2, 2, intra_gb_per_s=200, inter_gb_per_s=0.01, latency_us=0)
    found = predict_memory(program, cluster=slow, staging_bytes=1 << 16)
    home = home_layout(param_specs(program), 4)
    plan = cheapest_reduction(gradient_placements(program), home, slow, "dp4", 1 << 16)
    assert isinstance(plan, NodeFirstPlan)
    assert 0 < plan.sums_bytes <= found.sums_bytes
    assert found.sums_bytes < found.home_gradient_bytes  # in several rounds
    assert found.switch_bytes == predict_memory(program, staging_bytes=1 << 16).switch_bytes + found.sums_bytes
    assert predict_memory(program, cluster=replace(slow, nodes=1, devices_per_node=4)).sums_bytes == 0
    with pytest.raises(ClusterError, match="too small"):
        predict_memory(program, cluster=replace(slow, nodes=1))
