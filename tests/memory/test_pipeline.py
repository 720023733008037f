"""Predicted peaks of a pipeline's ranks against measured ones, and what is said about stages."""

from __future__ import annotations

import functools
import json

import pytest

from fxpar.errors import DimNameError, MicroBatchCountError
from fxpar.ir.exec_graph import collective_kind
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.lowering import lower
from fxpar.memory import (
    Conditions,
    memory_over_time,
    pipeline_peak,
    predict_memory,
    schedule_of,
    steady_micro_batches,
    walk,
)
from fxpar.memory.parts import trace_stage
from fxpar.memory.walk import rank_peak
from fxpar.remat import storages
from tests.captured import llama
from tests.memory.measured import model
from tests.memory.measured_pipeline import rank_bytes
from tests.repeat import thinned
from tests.stages.models import loaded

SIZES = {"layers": "2", "dim": "128", "ffn": "256", "vocab": "512"}
FOUR = "cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)"  # stages of two layers
CASES = [
    ("llama", 256, SIZES, "pp2", 3),
    ("llama", 256, SIZES, "pp2+gpipe", 3),
    ("llama", 256, SIZES, f"pp2+interleaved_1f1b+{FOUR}", 4),
    ("llama", 256, SIZES, f"pp4+remat+{FOUR}", 5),
    ("llama", 256, SIZES, "pp3+zb_h1+cut(layers.1|layers.1.ffn)", 4),
    ("llama", 256, SIZES, "pp2.tp2+sp+remat(selective)", 2),
    ("llama", 256, SIZES, "dp2.pp2+zero3+remat", 3),
    ("llama", 256, SIZES, "cp2.pp2", 3),
    ("llama", 256, SIZES, "tp2+sp > dp1", 3),
    ("llama", 256, SIZES, "cp2[*.ffn: tp2] > tp4+sp+remat", 3),
    ("gpt", 256, {}, "pp2", 1),
    ("gpt", 256, {}, "pp2+zb_h1", 3),
    ("mlp", 300, {"layers": "4"}, "pp2", 4),
    ("vit", 16, {}, "pp2", 4),
    ("llama", 256, SIZES, "pp2+chunks(2)+cut(head)", 3),  # the forward makes what the backward sends
    ("llama", 256, SIZES, "cp2+zb_h1 > tp2@1", 3),
]


@functools.cache
def staged(strategy: str) -> PipelineGraph:
    """Two layers."""
    program = lower(llama(layers=2).graph, strategy, for_store=True)
    assert isinstance(program, PipelineGraph)
    return program


@pytest.mark.parametrize(
    ("spec", "tokens", "options", "strategy", "micro_batches"),
    thinned(CASES, [CASES[i] for i in (2, 5, 8, -2)]),
)
def test_peak(spec, tokens, options, strategy, micro_batches):
    """Within a tenth of what each rank allocates in a group."""
    captured = model(spec, tokens, **options)
    program = lower(captured.graph, strategy, for_store=True)
    assert isinstance(program, PipelineGraph)
    positions = captured.batches[0].get("position_ids")
    conditions = Conditions(longest=None if positions is None else int(positions.max()) + 1)
    plan = schedule_of(program, micro_batches)
    for rank in range(plan.ranks):
        predicted = pipeline_peak(program, plan, rank, captured.graph.example_dims(), conditions).whole.total_bytes
        measured = rank_bytes(captured, program, rank, micro_batches)
        assert 0.9 * measured <= predicted <= 1.1 * measured, f"rank {rank}: {predicted} is not {measured}"


@functools.cache
def cut_further() -> PipelineGraph:
    program = lower(model("llama", 256, **SIZES).graph, "pp2.tp2+sp", for_store=True)
    assert isinstance(program, PipelineGraph)
    return program


def test_what_a_collective_reads_stays_until_it_is_waited_for():
    stage, dims = cut_further().stages[0], model("llama", 256, **SIZES).graph.example_dims()
    parts = trace_stage(stage, ("forward", "backward"), dims, {}, Conditions(), again=False).parts.values()
    begun = [step for part in parts for step in part.steps if collective_kind(step.node)]
    waits = [s for part in parts for s in part.steps if any(map(collective_kind, s.node.all_input_nodes))]
    assert not any(step.deaths for step in begun)
    assert sum(map(len, (step.deaths for step in waits))) > len(begun) / 2  # others stay for longer


@pytest.mark.parametrize("differ", [False, True])
def test_places_where_nothing_differs_are_looked_at_once(monkeypatch, differ):
    """The last place on each axis is the first one, as far as memory goes; or else has a walk of its own."""
    program = cut_further()
    plan, dims = schedule_of(program, 4), model("llama", 256, **SIZES).graph.example_dims()
    places: list[dict[str, int]] = [{}, {"tp": 1}]
    alone = [
        max(rank_peak(program, plan, position, dims, [at], Conditions()).whole.total_bytes for at in places)
        for position in range(2)
    ]
    traced, trace = [], walk.trace_stage
    monkeypatch.setattr(walk, "trace_stage", lambda *given, **named: traced.append(given) or trace(*given, **named))
    if differ:
        monkeypatch.setattr(storages, "is_same_call", lambda *_: False)
    found = [pipeline_peak(program, plan, position, dims, Conditions()).whole.total_bytes for position in range(2)]
    assert found == alone
    assert len(traced) == (8 if differ else 4)  # a first and a later micro-batch, at two positions


@pytest.mark.parametrize("strategy", ["pp2", f"pp4+{FOUR}", "pp2+zb_h1", f"pp2+interleaved_1f1b+{FOUR}"])
def test_two_micro_batches_per_rank_take_as_much_as_more(strategy):
    """What the engine and the planner count with, but for messages of interleaved stages. As many as there are ranks
    take less: gradients do not add up while the pipeline is full.
    """
    program = staged(strategy)
    ranks, steady = program.strategy.pipeline_size, steady_micro_batches(program.strategy)
    few, there, more = (predict_memory(program, micro_batches=n).peak_bytes for n in (ranks, steady, 3 * steady))
    assert few < there <= more < 1.002 * there


@pytest.mark.parametrize("strategy", ["pp2+zb_h1", f"pp2+interleaved_1f1b+{FOUR}"])
def test_what_micro_batches_do_alike_is_played_once(strategy, monkeypatch):
    """And the prediction is that of all of them."""
    program, played, play = staged(strategy), [], walk._Walk._play
    monkeypatch.setattr(walk._Walk, "_play", lambda *given: played.append(given) or play(*given))
    whole, steps = memory_over_time(program, micro_batches=12), len(played)
    found = memory_over_time(program, micro_batches=12, brief=True)
    assert found.prediction == whole.prediction
    assert [one.series.peak for one in found.ranks] == [one.series.peak for one in whole.ranks]
    assert 3 * (len(played) - steps) < steps


def test_stages():
    """Weights and gradients of each stage; messages in both directions; the fullest rank stands for all."""
    program = staged(f"pp4+{FOUR}")
    found = predict_memory(program)
    assert (found.micro_batches, found.schedule) == (4, "1f1b (4 ranks, 4 micro-batches)")
    assert [(s.stage, s.ranks, s.begins) for s in found.stages] == [
        (0, (0, 0), ""),
        (1, (1, 1), "layers.0.ffn_norm"),
        (2, (2, 2), "layers.1"),
        (3, (3, 3), "layers.1.ffn_norm"),
    ]
    params = llama(layers=2).params
    assert sum(s.weight_bytes for s in found.stages) == sum(t.numel() * t.element_size() for t in params.values())
    assert [s.in_flight for s in found.stages] == [4, 3, 2, 1]
    ends, middle = (found.stages[0], found.stages[3]), found.stages[1:3]
    assert {s.received_bytes for s in middle} == {2 * s.sent_bytes for s in ends} == {s.sent_bytes for s in middle}
    for stage in found.stages:
        assert stage.peak.saved_bytes == stage.in_flight * stage.saved_bytes
        assert stage.peak.total_bytes >= stage.peak.saved_bytes > 0
    assert found.peak_bytes == max(s.rank_peak_bytes for s in found.stages)
    assert found.stages[0].rank_peak_bytes > found.stages[2].rank_peak_bytes


def test_the_first_stage_keeps_its_embedding_summed_up():
    """So it saves what a later stage of one layer saves, [T/2, D], and the ids that it has looked up."""
    program = staged("pp3.tp2+sp+remat+cut(layers.1|norm)")
    (dim,) = program.dims
    first, second = predict_memory(program, {dim.name: 1024}).stages[:2]
    ids = 2 * 1024 * 8  # two rows of int64
    assert second.saved_bytes <= first.saved_bytes <= second.saved_bytes + 2 * ids


def test_more_micro_batches():
    """1F1B keeps as many as there are ranks behind, GPipe all of them."""
    most = "cut(layers.1.ffn_norm)"  # on the first stage
    program, deep = staged(f"pp2+{most}"), staged(f"pp2+gpipe+{most}")
    few, many = (predict_memory(program, micro_batches=n) for n in (2, 8))
    assert [s.in_flight for s in many.stages] == [s.in_flight for s in few.stages] == [2, 1]
    assert many.body.saved_bytes == few.body.saved_bytes
    assert [s.in_flight for s in predict_memory(deep, micro_batches=8).stages] == [8, 8]
    assert predict_memory(deep, micro_batches=8).body.saved_bytes == 4 * predict_memory(deep).body.saved_bytes
    one = predict_memory(program, micro_batches=1)
    assert one.step_bytes == one.body.total_bytes < few.step_bytes


def test_several_stages_on_a_rank():
    found = predict_memory(staged(f"pp2+interleaved_1f1b+{FOUR}"))
    assert [s.ranks for s in found.stages] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    pairs = [[s for s in found.stages if s.ranks == (rank, rank)] for rank in range(2)]
    for first, second in pairs:
        assert first.rank_peak_bytes == second.rank_peak_bytes
    first, second = max(pairs, key=lambda pair: pair[0].rank_peak_bytes)
    assert max(first.peak.total_bytes, second.peak.total_bytes) < found.body.total_bytes
    assert found.body.total_bytes <= first.peak.total_bytes + second.peak.total_bytes
    assert found.gradient_bytes == first.gradient_bytes + second.gradient_bytes


def test_tied_weights_are_on_both_ranks():
    tied = loaded("gpt", layers=2, dropout=0.25)
    first, last = predict_memory(lower(tied.graph, "pp2", for_store=True)).stages
    embedding = tied.params["embedding.weight"]
    whole = sum(t.numel() * t.element_size() for t in tied.params.values())
    assert first.weight_bytes + last.weight_bytes == whole + embedding.numel() * embedding.element_size()


def test_each_micro_batch_in_flight_waits_on_the_host():
    """The first stage of two has two of them, the last one one; what it says of the device is without them."""
    found = [predict_memory(staged("pp2+offload"), micro_batches=count) for count in (1, 4)]
    (alone, last), (first, again) = (prediction.stages for prediction in found)
    assert (first.in_flight, first.peak.host_bytes) == (2, 2 * alone.peak.host_bytes)
    assert (again.in_flight, again.peak.host_bytes) == (1, last.peak.host_bytes)
    assert found[1].body.host_bytes == first.peak.host_bytes > 0
    assert first.saved_bytes < 0.2 * predict_memory(staged("pp2"), micro_batches=4).stages[0].saved_bytes


def test_sizes_and_sums():
    program = staged("cp2.pp2")
    (dim,) = program.dims
    small, large = (predict_memory(program, {dim.name: tokens}) for tokens in (64, 127))
    assert large.sizes == {dim.name: 128}
    assert small.state_bytes == large.state_bytes
    assert [s.sent_bytes * 2 for s in small.stages] == [s.sent_bytes for s in large.stages]
    data = json.loads(json.dumps(large.to_json()))
    parts = ("forward_bytes", "again_bytes", "backward_bytes", "result_bytes", "workspace_bytes", "message_bytes")
    for peak in (data["body"], *(stage["peak"] for stage in data["stages"])):
        assert peak["total_bytes"] == sum(peak[part] for part in parts)
    assert data["step_bytes"] == data["body"]["total_bytes"]  # accumulators are part of it
    assert data["stages"][1]["begins"] == "layers.1"


def test_mistakes():
    program = staged(f"pp2+interleaved_1f1b+{FOUR}")
    with pytest.raises(MicroBatchCountError, match="needs a multiple of 2 micro-batches, got 1"):
        predict_memory(program, micro_batches=1)
    with pytest.raises(DimNameError, match="'tokens' is not a dynamic dim"):
        predict_memory(program, {"tokens": 64})
