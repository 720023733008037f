"""`model(x)`, `loss.backward()` with the loss outside: values and gradients equal eager's under every strategy."""

from __future__ import annotations

import functools
import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest

from fxpar.checking.widen import wide_tensor, widen
from fxpar.ir.graph import ForwardGraph
from fxpar.lowering import lower_forward
from fxpar.tracer import capture_forward
from tests.forwards import STRATEGIES, Case, Outcome, case, check, error, gathered, run, token_mean, truth
from tests.repeat import thinned


@pytest.mark.parametrize(
    ("spec", "strategy"),
    thinned(
        itertools.product(["llama", "gpt", "vit", "mlp"], STRATEGIES),
        [*(("llama", strategy) for strategy in STRATEGIES), ("gpt", "tp2"), ("mlp", "cp2")],
    ),
)
def test_like_eager(spec, strategy):
    """Token counts that do not divide are padded, and the values cut back; replicas have unequal ones."""
    options = {"dropout": "0.0"} if spec == "gpt" else {}
    one, replicas = case(spec, **options), 2 if strategy.startswith("dp2") else 1
    check(one.graph, strategy, one.params, one.buffers, one.batches, truth(spec, replicas, **options), one.keys)


def test_tied_weights():
    one = case("llama", tied="true")
    assert "head.weight" not in one.params
    check(one.graph, "dp2.tp2", one.params, one.buffers, one.batches, truth("llama", 2, tied="true"), one.keys)


@functools.cache
def hugging() -> tuple[Case, Any]:
    """The widened graph (its norms compute in float32) and what it gives on one device."""
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    one = case("hf:llama")
    wide = widen(one.graph)
    assert isinstance(wide, ForwardGraph)
    buffers = {name: b.double() if b.is_floating_point() else b for name, b in one.buffers.items()}
    one = replace(one, graph=wide, buffers=buffers)
    program = lower_forward(wide, "dp1")
    found = [run(program, one.params, buffers, [batch], token_mean, one.keys)[0] for batch in one.batches]
    sums = {fqn: sum(outcome.grads[fqn] for outcome in found) for fqn in found[0].grads}
    return one, ([outcome.values.logits for outcome in found], found[0].grads, sums)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, STRATEGIES[-2:]))
def test_hugging_face(strategy):
    one, (logits, first, both) = hugging()
    expected = (logits, both) if strategy.startswith("dp2") else (logits[:1], first)
    check(one.graph, strategy, one.params, one.buffers, one.batches, expected, one.keys)


def test_hugging_face_like_eager():
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    one = case("hf:llama")
    outputs, grads = truth("hf:llama", 1)
    (found,) = run(lower_forward(one.graph, "dp1"), one.params, one.buffers, one.batches, token_mean, one.keys)
    assert type(found.values) is type(outputs[0])
    assert found.values.past_key_values is None
    assert error({"": found.values.logits}, {"": outputs[0].logits}) <= 1e-10
    assert error(found.grads, grads) <= 1e-10


@functools.cache
def dropped(seed: int) -> Outcome:
    """GPT with dropout on one device."""
    one = case("gpt", dropout="0.3")
    program = lower_forward(one.graph, "dp1")
    return run(program, one.params, one.buffers, one.batches, token_mean, one.keys, seed)[0]


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, STRATEGIES[-2:]))
def test_dropout_is_the_same_under_every_strategy(strategy):
    one, program = case("gpt", dropout="0.3"), lower_forward(case("gpt", dropout="0.3").graph, strategy)
    outcomes = run(program, one.params, one.buffers, [one.batches[0]] * 2, token_mean, one.keys, seed=11)
    truth = dropped(11)
    assert error({"": dropped(12).values}, {"": truth.values}) > 1e-3
    assert all(error({"": o.values}, {"": truth.values}) <= 1e-10 for o in outcomes)
    replicas = program.strategy.degree("dp")
    whole = {fqn: grad / replicas for fqn, grad in gathered(program, outcomes).items()}
    assert error(whole, truth.grads) <= 1e-10


def test_pickle():
    one = case("llama")
    program = pickle.loads(pickle.dumps(lower_forward(one.graph, "tp2")))
    (expected, _), _ = truth("llama", 2)
    outcomes = run(program, one.params, one.buffers, one.batches, token_mean, one.keys)
    assert error({"": outcomes[1].values}, {"": expected}) <= 1e-10
    assert program.fingerprint() == lower_forward(one.graph, "tp2").fingerprint()


def test_loss_inside_of_the_model():
    """Hugging Face models return a loss if they are given labels."""
    pytest.importorskip("transformers", reason="the extra fxpar[hf] is not installed")
    one = case("hf:llama")
    batch = {key: one.batches[0][key][:, :12] for key in ("input_ids", "labels")}  # it shifts labels: no padding
    wide = widen(capture_forward(one.model, (), batch))
    assert isinstance(wide, ForwardGraph)
    program, keys = lower_forward(wide, "cp2.tp2+sp"), tuple(batch)
    buffers = {name: wide_tensor(b) for name, b in one.buffers.items()}
    outcomes = run(program, one.params, buffers, [batch], lambda output, _: output.loss, keys)
    one.model.zero_grad()
    loss = one.model(**batch).loss
    loss.backward()
    assert abs(float(outcomes[0].values.loss) - float(loss)) <= 1e-6 * float(loss)  # eager's norms are float32
    grads = {name: p.grad for name, p in one.model.named_parameters()}
    assert error(gathered(program, outcomes), grads) <= 1e-5
