"""Options of `fxpar.parallelize` that make no sense are named before anything is captured or allocated."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar import losses
from fxpar.batching import length_groups
from fxpar.cost.cluster import usual_cluster
from fxpar.errors import (
    BatchError,
    ExampleNeededError,
    FxparError,
    LossError,
    MeanLossError,
    MetricError,
    ParallelizeError,
    PlannerError,
)
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.compiling import capture_step, compile_strategies
from fxpar.runtime.decided import Decided, _alone, with_multiples
from fxpar.runtime.options import ParallelizeOptions
from fxpar.runtime.session import Session
from fxpar.runtime.task import CompiledModel, Task

TWO = {64: "dp2", 512: "tp2"}
BAD = [
    ("length_multiple", 0),
    ("length_multiple", "2"),
    ("memory_budget_bytes", "1GB"),
    ("memory_budget_bytes", 0),
    ("staging_bytes", -1),
    ("timeout_s", -1),
    ("timeout_s", "5"),
    ("cost", 3),
    ("home", "R"),
    ("precision", torch.bfloat16),
    ("packed", "false"),  # it would be taken for True: rows without a proof
    ("packed", 0),
    ("overlap", "no"),
    ("monitor", "off"),
    ("loss_scale", 0),
    ("loss_scale", "2**16"),
    ("seed", 1.5),
    ("planner", 3),
    ("timeout_s", math.nan),  # no comparison with it is true
    ("memory_budget_bytes", math.nan),
    ("staging_bytes", math.inf),
    ("loss_scale", math.inf),
    ("order", "dp2"),  # its letters would be taken for strategies
    ("order", 3),
    ("resident", "dp2"),
    ("plain", 3),
    ("compiled", 3),
    ("initializer", 3),
    ("home", {"*": 3}),
    ("home", {3: "R"}),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_value_of_another_kind_is_named(name, value):
    with pytest.raises(ParallelizeError, match=f"{name}=.* (is not a|must be) "):
        ParallelizeOptions(strategies=TWO, **{name: value})


def test_a_planner_that_nobody_has_is_named_even_if_nothing_is_switched():
    with pytest.raises(PlannerError, match="did you mean 'relay'"):
        ParallelizeOptions(strategies=TWO, planner="relayy")


def test_an_execution_that_nobody_has_is_named_even_if_nothing_is_switched():
    with pytest.raises(ParallelizeError, match="did you mean 'p2p'"):
        ParallelizeOptions(strategies=TWO, execution="p2pp")


def test_what_is_meant_is_taken():
    ParallelizeOptions(strategies=TWO, planner="turns")
    ParallelizeOptions(
        strategies=TWO, memory_budget_bytes=8e9, timeout_s=0.5, home={"*": "R"}, precision="bf16", planner="hotspa"
    )
    ParallelizeOptions(strategies=TWO, seed=-1, loss_scale=1, packed=False, monitor=False)


def test_numpy_integers_are_integers():
    found = ParallelizeOptions(strategies=TWO, memory_budget_bytes=np.int64(8e9), length_multiple=np.int32(8))
    assert (found.memory_budget_bytes, found.length_multiple) == (8_000_000_000, 8)
    assert {type(found.memory_budget_bytes), type(found.length_multiple)} == {int}
    with pytest.raises(ParallelizeError, match="length_multiple=0 is not a whole number of 1 or more"):
        ParallelizeOptions(strategies=TWO, length_multiple=np.int64(0))


def test_a_model_without_tokens_is_told_that_no_step_takes_it():
    batch = {"x": torch.randn(6, 5), "labels": torch.zeros(6, dtype=torch.long)}
    logical = capture_step(
        nn.Linear(5, 3), lambda model, batch: losses.cross_entropy_sum(model(batch["x"]), batch["labels"]), batch
    )
    compiled = CompiledModel(logical, {}, unpacked="it has no dim of tokens")
    task, cluster = Task(losses.causal_lm), usual_cluster(2)
    said = _alone(Decided("", task, compiled, (), [], torch.device("cpu"), cluster, None, False, None))
    assert said.startswith("its batch is x, labels, without 'input_ids', ")
    assert said.endswith("by plain calls, model(x)")


def test_the_refusal_of_a_length_says_why_rows_are_not_packed():
    groups = length_groups({64: "tp2+sp"}, world=2)
    program = SimpleNamespace(divisors={"T": 2}, padding_hazard="fxpar.attention.default sees behind")
    with pytest.raises(ParallelizeError, match=r"not packed, since aten\.nll_loss\.default mixes tokens"):
        with_multiples(groups, [program], 1, "aten.nll_loss.default mixes tokens")
    with pytest.raises(ParallelizeError) as caught:  # nothing is said twice
        with_multiples(groups, [program], 1, "fxpar.attention.default mixes tokens")
    assert "not packed" not in str(caught.value)


@pytest.mark.parametrize("state", [None, {}, {"seed": 3}])
def test_a_state_that_is_none_is_named(state):
    with pytest.raises(ParallelizeError, match="engine_state"):
        Session.load_state(SimpleNamespace(), state)


@pytest.mark.parametrize("strategies", ["dp2", {}, {8: 1}, {0: "dp2"}], ids=str)
def test_strategies_are_looked_at_before_the_model(strategies):
    with pytest.raises(FxparError, match="strateg"):
        compile_strategies(nn.Linear(5, 3), strategies, losses.causal_lm)


@pytest.mark.parametrize(
    ("example", "words"),
    [(3, "the example batch: it is int"), ({}, "use the batch: there is no"), ({"x": 3}, "use input 'x': it is int")],
)
def test_an_example_that_is_no_batch_is_named(example, words):
    with pytest.raises(BatchError, match=words):
        capture_step(nn.Linear(5, 3), losses.causal_lm, example)


@pytest.mark.parametrize(
    ("positional", "options", "message"),
    [
        ((), {"strategis": TWO}, "there is no option 'strategis'; did you mean 'strategies'"),
        ((), {"seed": 3}, "strategies= is missing"),
        ((TWO,), {}, "Options are given by name"),
    ],
)
def test_options_that_do_not_fit_are_named(positional, options, message):
    with pytest.raises(ParallelizeError, match=message):
        fxpar.parallelize(nn.Linear(5, 3), *positional, **options)


def test_a_key_that_the_example_lacks_is_named_with_what_to_do():
    with pytest.raises(ExampleNeededError, match=r"reads 'images'.*example=\{'images': \.\.\.\}"):
        capture_step(nn.Linear(5, 3), lambda model, batch: model(batch["images"]), None)
    with pytest.raises(ExampleNeededError, match="no example if they are read as 'position_ids'"):
        capture_step(nn.Linear(5, 3), lambda model, batch: model(batch["pos"]), None)
    with pytest.raises(KeyError, match="position_ids"):  # of a dict of its own: no example mends that
        capture_step(nn.Linear(5, 3), lambda model, batch: {"x": batch["position_ids"]}["position_ids"], None)


def test_a_loss_may_ask_which_tokens_are_none():
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["input_ids"]) * batch["is_token"][..., None] * batch["position_ids"][..., None]).sum()

    found = capture_step(nn.Embedding(5, 3), loss, None)
    assert {info.fqn for info in found.inputs if info.kind == "batch"} >= {"position_ids", "is_token"}


def test_a_model_of_no_text_without_example_is_told_what_to_give():
    """The default loss gives it token ids, and whatever it says of those is of no help."""
    give = r"takes 'input' and failed.*loss=\.\.\., example=\{'input': \.\.\.\}"
    with pytest.raises(ExampleNeededError, match=give) as found:
        capture_step(nn.Conv2d(3, 4, 2), losses.causal_lm, None)
    assert isinstance(found.value.__cause__, RuntimeError)


class Words(nn.Module):
    """Takes token ids under another name than fxpar has for them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def counted_mean(model, batch):
    total = losses.cross_entropy_sum(model(batch["input_ids"]), batch["labels"])
    return total / (batch["labels"] != -100).sum()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (counted_mean, MeanLossError, r"a division by what `sum` makes of the batch.*test_options\.py.*denominator="),
        (lambda model, batch: model(batch["input_ids"]), LossError, "not a scalar"),
        (
            lambda model, batch: (model(batch["input_ids"]).sum(), {"m": model(batch["input_ids"]).mean()}),
            MetricError,
            "m",
        ),
    ],
    ids=["counted mean", "no scalar", "metric"],
)
def test_a_loss_that_cannot_be_summed_is_told_as_such_whatever_forward_calls_its_ids(loss, error, words):
    with pytest.raises(error, match=words):
        capture_step(Words(), loss, None)


def test_a_key_that_another_dict_lacks_is_no_matter_of_the_example():
    sizes = {"small": 3}
    with pytest.raises(KeyError, match="large"):
        capture_step(nn.Linear(5, 3), lambda model, batch: model(_read(sizes, "large")), None)


def _read(table, key):
    return table[key]


def test_a_forward_that_fails_on_tokens_says_what_they_were():
    class Failing(nn.Linear):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)  # which are whole numbers

    with pytest.raises(RuntimeError) as caught:
        capture_step(Failing(5, 3), losses.causal_lm, None)
    assert any("of 61 tokens" in note for note in caught.value.__notes__)
    assert any("takes fewer" in note and "example=batch" in note for note in caught.value.__notes__)


def test_a_loss_that_is_no_function_is_named():
    with pytest.raises(ParallelizeError, match="loss='ce' is not a function of a model and a batch"):
        fxpar.parallelize(nn.Linear(5, 3), strategies={8: "dp1"}, loss="ce")


def test_a_plain_call_under_what_is_no_strategy_is_named():
    calls = SimpleNamespace(strategies={"dp2": None})
    with (
        pytest.raises(ParallelizeError, match=r"using\(3\): the model was parallelized with dp2"),
        PlainCalls.using(calls, 3),
    ):
        pass


@pytest.mark.parametrize("spelled", ["tp2|dp2", "tp2 | dp2", " tp2  |dp2"])
def test_strategies_are_named_in_any_spelling(spelled: str) -> None:
    given = {64: "dp4", 128: "tp2 | dp2"}
    options = ParallelizeOptions(strategies=given, order=["dp4", spelled], resident=[spelled], plain=spelled)
    assert (options.order, options.resident, options.plain) == (["dp4", "tp2 | dp2"], ["tp2 | dp2"], "tp2 | dp2")
