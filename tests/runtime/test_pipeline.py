"""Pipelines on ranks that are threads: loss and gradients are those of one device, whatever the schedule."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpar.checking import CheckResult, local_params, run_world
from fxpar.checking import driver as checking
from fxpar.errors import MicroBatchError, NotAChainError, UnknownCutError
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.strategy_text import SCHEDULES
from fxpar.lowering import lower
from fxpar.runtime.binding import bind_here
from fxpar.runtime.channels import ThreadChannels, ThreadWorld
from fxpar.runtime.micro import MicroRun, replica_of
from fxpar.runtime.padding import pad
from fxpar.runtime.pipeline import forward_only, plan_pipeline
from fxpar.schedule import simulate
from fxpar.torch_api.threaded import run_threads
from fxpar.transport.groups import ProcessGroups
from tests.captured import Captured, gpt, llama, squared, take, vectors
from tests.captured import odd as small
from tests.repeat import crossed, examples, thinned
from tests.stages.models import Model, loaded, odd, random_model
from tests.stages.running import whole

AXES = ["pp2", "pp3", "pp2.tp2+sp", "dp2.pp2", "dp2.pp2+zero1", "cp2.pp2"]


def compare(model: Captured | Model, strategy: str, **options: Any) -> CheckResult:
    """Five micro-batches (or as many as the model has) of different lengths against one device, in fp64."""
    (result,) = checking.check(model.graph, [strategy], model.params, model.buffers, model.batches, **options)
    assert result.ok, result
    assert result.loss_rel_err <= 1e-10
    assert result.grad_max_rel_err <= 1e-10
    return result


@pytest.mark.parametrize(("axes", "schedule"), crossed(AXES, SCHEDULES))
def test_llama(axes, schedule):
    """Stages are uneven; pp3 with two stages per rank needs six layers."""
    layers = 6 if (axes, schedule) == ("pp3", "interleaved_1f1b") else 4
    compare(llama(layers=layers), f"{axes}+{schedule}")


@pytest.mark.parametrize(
    "strategy",
    thinned(["pp2", "dp2.pp2+zero1+zb_h1", "tp2.pp2+gpipe", "cp2.pp2+zb_h1"], ["tp2.pp2+gpipe", "dp2.pp2+zero1+zb_h1"]),
)
def test_gpt_with_dropout_and_a_tied_head(strategy):
    """The same masks on any mesh; the head's gradient is made on the last stage, the embedding's on the first."""
    compare(gpt(), strategy)


@pytest.mark.parametrize(
    "strategy",
    thinned(
        ["pp2+interleaved_1f1b", "pp4", "cp2.pp2+zb_h1", "dp2.pp2+zero3+interleaved_1f1b"],
        ["dp2.pp2+zero3+interleaved_1f1b"],
    ),
)
def test_tied_llama(strategy):
    compare(llama(layers=4, tied=True), strategy)


HOSTS = {
    "hf:qwen3": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "hf:gpt2": {"n_layer": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("spec", HOSTS)
def test_models_of_transformers(spec):
    """Both with a tied head."""
    compare(loaded(spec, **HOSTS[spec]), "dp2.pp2+zero1+zb_h1")


@pytest.mark.parametrize(
    "strategy",
    thinned(
        ["dp2.pp2+zero2", "dp2.pp2+zero3+zb_h1", "dp3.pp2+zero3+gpipe", "dp2.pp2+zero2+interleaved_1f1b"],
        ["dp3.pp2+zero3+gpipe", "dp2.pp2+zero2+interleaved_1f1b"],
    ),
)
def test_zero_with_unequal_numbers_of_micro_batches(strategy):
    """Replicas talk inside of the stages, so one with fewer micro-batches has idle ones."""
    compare(llama(layers=4), strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("pp2+remat", marks=pytest.mark.nightly),
        "pp2+zb_h1+remat(selective)+offload",
        pytest.param("pp2.tp2+sp+zb_h1+remat(*.ffn)", marks=pytest.mark.nightly),
        "pp2+remat(layers.0.ffn)",  # on the first stage only
    ],
)
def test_recomputation(strategy):
    compare(llama(layers=4), strategy)


@pytest.mark.parametrize(
    ("name", "strategy"),
    crossed(["skips", "counted", "recomputed", "seq2seq", "means"], ["pp2+zb_h1", "dp2.pp2+zero3"]),
)
def test_odd_models(name, strategy):
    """Values that go over several boundaries, a buffer that is written and sent, recomputed dropout, an embedding on
    three stages, gradients that are smallest inside of a layer.
    """
    compare(odd(name), strategy)


class Again(nn.Module):
    """A weight that runs behind the first layer and behind the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = x @ self.shared if i % 2 == 0 else x
        return x


def test_two_stages_of_a_rank_with_the_same_parameter():
    """Their terms are added before they leave the rank."""
    torch.manual_seed(0)
    model, strategy = take(Again(), squared, vectors(6, 6, 4, 8, 6)), "pp2+interleaved_1f1b"
    program = lower(model.graph, strategy)
    assert {fqn: sorted(stages) for fqn, stages in program.terms.items()} == {"shared": [0, 2]}
    first, second = run_world(program, *tensors(model), [[0, 1, 2]], 1.0)
    steps = [whole(model.graph, one_device(model, i, model.buffers)) for i in range(3)]
    torch.testing.assert_close(first["grads"]["shared"], sum(s.grads["shared"] for s in steps), rtol=1e-10, atol=0)
    assert "shared" not in second["grads"]


@pytest.mark.parametrize(
    ("name", "strategy"), crossed(["counter", "sizes", "adapted", "experts"], ["pp2+zb_h1", "dp2.pp2+zero3"])
)
def test_odd_modules(name, strategy):
    cut = {"counter": "out", "sizes": "out"}.get(name, "head")
    compare(small(name), f"{strategy}+cut({cut})")


# --------------------------------------------------------------------------------------------------- written buffers
def tensors(model: Captured | Model) -> tuple[Any, Any, Any]:
    return model.params, model.buffers, model.batches


def one_device(model: Captured | Model, number: int, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the captured graph takes for a micro-batch, by kind."""
    return {
        "param": model.params,
        "buffer": buffers,
        "batch": model.batches[number],
        "constant": model.graph.constants,
        "scale": {"scale": torch.tensor(1.0, dtype=torch.float64)},
        "seed": {"seed": torch.tensor(number)},
    }


def buffers_after(model: Captured | Model, order: list[int]) -> Mapping[str, Tensor]:
    """Of one device after these micro-batches in turn."""
    buffers = dict(model.buffers)
    for i in order:
        buffers |= whole(model.graph, one_device(model, i, buffers)).buffers
    return buffers


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, ["zb_h1", "interleaved_1f1b"]))
def test_buffers_are_the_same_on_all_ranks(schedule):
    """Batch norms on every stage and a count at the root; idle micro-batches of interleaved do not count."""
    model = odd("norms")
    order = [0, 1, 2, 0, 1]
    want = buffers_after(model, order)
    assert int(want["calls"]) == 5
    for rank in run_world(lower(model.graph, f"pp2+{schedule}"), *tensors(model), [order], 1.0):
        assert rank["buffers"].keys() == {out.fqn for out in model.graph.outputs if out.kind == "buffer"}
        assert all(torch.equal(value, want[fqn]) for fqn, value in rank["buffers"].items())
    compare(model, f"dp2.pp2+zero2+{schedule}")


@pytest.mark.parametrize("plan", [[[0, 1], []], [[0, 2], [1]]], ids=str)
def test_buffers_over_replicas_are_those_of_a_graph_without_stages(plan):
    """The mean over replicas, of which one may have had nothing to do."""
    model = odd("norms")
    want = run_world(lower(model.graph, "dp2"), *tensors(model), plan, 1.0)[0]["buffers"]
    for rank in run_world(lower(model.graph, "dp2.pp2"), *tensors(model), plan, 1.0):
        assert rank["buffers"].keys() == want.keys()
        assert all(torch.equal(value, want[fqn]) for fqn, value in rank["buffers"].items())


# ---------------------------------------------------------------------------------------------------- micro-batches
@pytest.mark.parametrize(
    ("schedule", "plan"), crossed(["1f1b", "interleaved_1f1b"], [[[], [3]], [[0], [1, 2, 3, 4]]]), ids=str
)
def test_replicas_with_few_or_no_micro_batches(plan, schedule, monkeypatch):
    monkeypatch.setattr(checking, "assign", lambda strategy, count: plan)
    compare(llama(layers=4), f"dp2.pp2+zero1+{schedule}")


@pytest.mark.parametrize("count", thinned([1, 3], [3]))
def test_fewer_micro_batches_than_stages(count, monkeypatch):
    monkeypatch.setattr(checking, "assign", lambda strategy, _: [list(range(count))])
    for schedule in SCHEDULES[:2] + SCHEDULES[3:]:
        compare(llama(layers=4), f"pp4+{schedule}")


def run_pipeline(program: PipelineGraph, model: Captured | Model, work: Any) -> list[Any]:
    """`work(bound, runs)` on all ranks, with the micro-batches of each and how often each was loaded."""
    world = ThreadWorld()

    def main(rank: int) -> Any:
        bound = bind_here(program, ProcessGroups(), channels=ThreadChannels(world, rank))
        loads: list[int] = []

        def load(number: int) -> Mapping[str, Tensor]:
            loads.append(number)
            return pad(program, model.batches[number])

        runs = [MicroRun(partial(load, i), 1.0, i) for i in range(len(model.batches))]
        return work(bound, runs, local_params(program, model.params, rank)), loads

    return run_threads(program.strategy.world, main)


def test_groups_follow_each_other():
    """The same bound pipeline again with other numbers of micro-batches: nothing is left of the group before."""
    model = llama(layers=4)
    program = lower(model.graph, "pp2+interleaved_1f1b")

    def work(bound: Any, runs: list[MicroRun], params: Any) -> list[Any]:
        found = []
        for chosen in (runs, runs[:1], [], runs):
            bound.prepare(params, model.buffers)
            bound.run_all(chosen)
            found.append(bound.finish())
        return found

    for (first, one, none, last), loads in run_pipeline(program, model, work):
        assert torch.equal(first["loss"], last["loss"])
        assert not torch.equal(first["loss"], one["loss"])
        assert all(torch.equal(value, last["grads"][fqn]) for fqn, value in first["grads"].items())
        assert none["loss"] == 0
        assert not any(value.any() for value in none["grads"].values())
        # Five micro-batches and one that is idle, loaded once each, for both stages of the rank.
        assert loads == [0, 1, 2, 3, 4, 4, 0, 0, 0, 1, 2, 3, 4, 4]


def test_forwards_alone():
    model = llama(layers=4)
    program = lower(model.graph, "dp2.pp2+interleaved_1f1b")

    def work(bound: Any, runs: list[MicroRun], params: Any) -> Tensor:
        mine = runs[:3] if replica_of(program, bound.rank) == 0 else []
        bound.prepare(params, model.buffers)
        return bound.run_forward(mine)["loss"]

    truth = sum(whole(model.graph, one_device(model, i, model.buffers)).loss for i in range(3))
    assert all(abs(float(loss / truth) - 1) <= 1e-12 for loss, _ in run_pipeline(program, model, work))


def test_nothing_has_run():
    model = llama(layers=2)
    program = lower(model.graph, "pp2")

    def work(bound: Any, runs: list[MicroRun], params: Any) -> None:
        bound.prepare(params, model.buffers)
        with pytest.raises(MicroBatchError, match="no micro-batch has run"):
            bound.finish()

    run_pipeline(program, model, work)


# --------------------------------------------------------------------------------------------------------- schedules
@pytest.mark.parametrize(
    "flags",
    [
        "pp4+gpipe",
        "pp4",
        "pp4+zb_h1",
        "pp2+interleaved_1f1b",
        pytest.param("pp2+interleaved_1f1b(3)", marks=pytest.mark.nightly),
    ],
)
def test_schedules_of_programs(flags):
    program = lower(llama(layers=6 if "3" in flags else 4).graph, flags)
    strategy = Strategy.parse(flags)
    for micro_batches in (1, 2, 3, 7):
        for plan in (plan_pipeline(program, micro_batches), forward_only(program, micro_batches)):
            assert (plan.ranks, plan.stages) == (strategy.degree("pp"), len(program.stages))
            assert micro_batches <= plan.micro_batches < micro_batches + plan.ranks
        assert plan_pipeline(program, 4 * micro_batches).micro_batches == 4 * micro_batches
        kept = simulate(plan_pipeline(program, 12)).peak_saved_on_rank
        if strategy.pipeline.schedule in ("1f1b", "zb_h1"):
            assert max(kept) == strategy.degree("pp")


# ------------------------------------------------------------------------------------------------------ random models
@settings(max_examples=examples(3))
@given(st.integers(0, 10_000))
@pytest.mark.filterwarnings("ignore::fxpar.errors.FxparWarning")  # some weights of random models do nothing
def test_random_models_with_random_cuts(seed):
    """Layers that read any earlier values and weights of one another."""
    choice = random.Random(seed)
    model = random_model(seed)
    ran = {n.meta["fqn"] for n in model.graph.gm.graph.nodes if n.op == "call_function"}
    steps = [f"steps.{i}" for i in range(8) if f"steps.{i}" in ran]
    stages = choice.choice((2, 2, 3))
    chosen = sorted(choice.sample(steps, stages - 1))
    flags = choice.choice(("gpipe", "1f1b", "zb_h1"))
    axes = choice.choice((f"pp{stages}", f"dp2.pp{stages}", f"pp{stages}.tp2", f"pp{stages}.tp2+sp"))
    zero = choice.choice(("", "+zero1", "+zero3")) if axes.startswith("dp") else ""
    strategy = f"{axes}{zero}+{flags}+cut({'|'.join(chosen)})"
    try:
        lower(model.graph, strategy)
    except (NotAChainError, UnknownCutError):
        return  # what may be refused is for tests/stages
    compare(model, strategy)
