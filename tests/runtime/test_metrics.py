"""Metrics beside the loss, denominators of the user's, accumulation: those of one device, under every strategy."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar import errors, losses
from fxpar.runtime.compiling import compile_strategies
from fxpar.runtime.report import metrics_of
from tests.repeat import thinned
from tests.runtime.hot import World

VOCAB, LENGTHS = 37, (5, 60, 8, 33, 17, 2, 90)
STRATEGIES = {
    "dp2": {128: "dp2"},
    "tp2+sp": {128: "tp2+sp"},
    "pp2": {128: "pp2"},
    "dp2+zero3": {128: "dp2+zero3"},
    "hot": {16: "dp2", 48: "tp2+sp", 128: "pp2"},
}


class Model(nn.Module):
    """Two blocks, so that there can be two stages. `idx` is a name that fxpar does not know: plain calls pad it too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def weights_of(ids):
    """One per token, a key of the batch: what it multiplies is nothing at padding, which tp2+sp needs."""
    return (ids % 5 + 1).double() / 7


def weighted(model, batch):
    logits, labels, weights = model(batch["input_ids"]), batch["labels"], batch["weights"]
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    valid = labels != -100
    confidence = torch.where(valid, logits.softmax(-1).amax(-1), 0.0).sum()
    metrics = {
        "accuracy": losses.accuracy(logits, labels),
        "tokens": valid.sum(),
        "confidence": (confidence, valid.sum()),
        "weights": torch.where(valid, weights, 0.0).sum(),
    }
    return (each * weights.flatten()).sum(), metrics


def example():
    ids = torch.zeros(1, 61, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "weights": weights_of(ids)}


def sequences(seed=1):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in LENGTHS:
        ids = torch.randint(VOCAB, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": losses.next_token_labels(ids), "weights": weights_of(ids)})
    return made


def valid(one):
    return one["labels"] != -100


def total_weight(batch):
    return float(sum(weights_of(one["input_ids"])[valid(one)].sum() for one in batch))


def one_device(batch, denominator):
    """Loss, metrics and gradients by plain autograd, sequence by sequence."""
    model = make()
    sums = {"correct": 0, "valid": 0, "confidence": 0.0, "weights": 0.0}
    total = torch.zeros((), dtype=torch.float64)
    for one in batch:
        logits, mask, weights = model(one["input_ids"][None])[0], valid(one), weights_of(one["input_ids"])
        total = total + (F.cross_entropy(logits, one["labels"], reduction="none")[mask] * weights[mask]).sum()
        sums["correct"] += int((logits.argmax(-1) == one["labels"])[mask].sum())
        sums["valid"] += int(mask.sum())
        sums["confidence"] += float(logits.softmax(-1).amax(-1)[mask].sum())
        sums["weights"] += float(weights[mask].sum())
    (total / denominator).backward()
    metrics = {
        "accuracy": sums["correct"] / sums["valid"],
        "tokens": sums["valid"],
        "confidence": sums["confidence"] / sums["valid"],
        "weights": sums["weights"],
    }
    return float(total) / denominator, metrics, {name: p.grad for name, p in model.named_parameters()}


@functools.cache
def compiled():
    """All strategies, from one capture."""
    texts = [*dict.fromkeys(text for chosen in STRATEGIES.values() for text in chosen.values())]
    limits = {limit: text for limit, text in enumerate(texts, 128)}
    return compile_strategies(make(), limits, weighted, example(), token_budget=256)


WORLD, NIGHT = World(2, compiled), World(2, compiled)


def parallel(name):
    chosen, everything = STRATEGIES[name], compiled()
    some = replace(everything, programs={text: everything.programs[text] for text in chosen.values()})
    return fxpar.parallelize(
        make(), strategies=chosen, loss=weighted, example=example(), compiled=some, merge=False,
        token_budget=128, monitor=False,
    )  # fmt: skip


def gradients(model):
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


BY_DAY = ("dp2+zero3", "hot")  # which has each of the others in one of its groups


@WORLD.case
def one_step(rank):
    return steps_of(BY_DAY)


@NIGHT.case
def more_steps(rank):
    return steps_of([name for name in STRATEGIES if name not in BY_DAY])


def steps_of(names):
    """Also the same in two calls: gradients add up to those of one mini-batch."""
    found = {}
    for name in names:
        model, batch = parallel(name), sequences()
        weight = total_weight(batch)
        report = model.train_step(batch, denominator=weight)
        whole = gradients(model)
        model.zero_grad()
        # One sequence alone leaves a replica without: under zero3 it runs an idle micro-batch.
        parts = [model.train_step(part, denominator=weight) for part in (batch[:1], batch[1:])]
        evaluated = model.evaluate(batch, denominator=weight)
        found[name] = report, whole, parts, gradients(model), evaluated
    return found


@pytest.fixture
def stepped(name):
    return one_step() if name in BY_DAY else more_steps()


@pytest.fixture(scope="module")
def truth():
    batch = sequences()
    return one_device(batch, total_weight(batch))


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-13), name


@pytest.mark.parametrize("name", thinned(STRATEGIES, BY_DAY))
def test_weighted_mean_and_metrics_are_those_of_one_device(stepped, truth, name):
    loss, metrics, grads = truth
    for found in stepped:
        report, whole, *_ = found[name]
        assert report.loss == pytest.approx(loss, rel=1e-10)
        assert report.metrics == pytest.approx(metrics, rel=1e-10)
        assert report.metrics["tokens"] == metrics["tokens"] == report.valid_tokens
        assert report.metrics["accuracy"] == metrics["accuracy"]
        assert report.packed
        assert report.to_json()["metrics"] == report.metrics
        close(whole, grads)


@pytest.mark.parametrize("name", thinned(STRATEGIES, BY_DAY))
def test_calls_with_one_denominator_add_up_to_one_mini_batch(stepped, truth, name):
    loss, metrics, grads = truth
    for found in stepped:
        _, _, parts, accumulated, evaluated = found[name]
        assert sum(part.loss for part in parts) == pytest.approx(loss, rel=1e-10)
        assert sum(part.metrics["tokens"] for part in parts) == metrics["tokens"]
        assert evaluated == pytest.approx(loss, rel=1e-10)
        assert evaluated.metrics == pytest.approx(metrics, rel=1e-10)
        close(accumulated, grads)


@WORLD.case
def other_denominators(rank):
    model, batch = parallel("dp2"), sequences()
    for bad in (0, -1.0, float("nan"), float("inf"), "3", True, torch.ones(())):
        with pytest.raises(errors.DenominatorError, match="a number above 0"):
            model.train_step(batch, denominator=bad)
    with pytest.raises(errors.BatchMismatchError):
        model.train_step(batch, denominator=2.0 + rank)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(errors.NoGradError, match="outside of that block"):
            model.train_step(batch)
    with torch.set_grad_enabled(rank == 0), pytest.raises(errors.BatchMismatchError):
        model.train_step(batch)
    assert all(p.grad is None for p in model.parameters())
    return model.step_count


def test_a_denominator_is_a_number_above_0_and_gradients_are_on_the_same_on_every_rank():
    assert other_denominators() == [0, 0]


def moody(model, batch):
    """Leaves its metric out without gradients."""
    logits = model(batch["input_ids"])
    loss = losses.cross_entropy_sum(logits, batch["labels"])
    return (loss, {"tokens": (batch["labels"] != -100).sum()}) if torch.is_grad_enabled() else loss


@WORLD.case
def other_metrics(rank):
    model = fxpar.parallelize(make(), strategies={128: "dp2"}, loss=moody, monitor=False)
    with pytest.raises(errors.EvaluateLossError, match=r"other metrics \(none\) than when it was captured \(tokens\)"):
        model.evaluate([one["input_ids"] for one in sequences()])
    return True


def test_a_metric_that_evaluate_misses_is_named():
    assert all(other_metrics())


def test_metrics_of_no_count_are_no_number():
    found = metrics_of([{"a": 1.0, "b": 0.0, "b:count": 0.0}, {"a": 2.0, "b": 0.0, "b:count": 0.0}])
    assert found["a"] == 3.0
    assert found["b"] != found["b"]
