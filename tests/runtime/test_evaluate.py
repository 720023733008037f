"""Evaluation leaves the modes of a model as they were, and ranks with other sequences are named."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fxpar
from fxpar import losses
from fxpar.errors import BatchMismatchError, EvaluateStagesError
from tests.runtime.hot import World, parallel, precompile, sequences, small

TWO = {32: "dp2", 128: "tp2"}
LENGTHS = (5, 60, 8, 33)


class Dropped(nn.Module):
    """Its dropout can be in another mode than the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(131, 8), nn.Dropout(0.5), nn.Linear(8, 131)

    def forward(self, input_ids):
        return self.head(self.dropout(self.embed(input_ids)))


class Deep(nn.Module):
    """A layer for each of three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(131, 6), nn.Linear(6, 131)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


WORLD = World(2, lambda: precompile(small, TWO))


@WORLD.case
def modes(rank):
    found = []
    for frozen in (True, False):
        model = fxpar.parallelize(Dropped(), strategies={128: "dp2"}, monitor=False)
        model.train(frozen)
        model.dropout.train(not frozen)
        model.evaluate(sequences(1, LENGTHS))
        found.append([part.training for part in model.modules()])
    return found


def test_each_module_keeps_its_mode():
    for found in modes():
        assert found == [[True, True, False, True], [False, False, True, False]]


@WORLD.case
def other_sequences(rank):
    """What differs is all of them (a share of the data per rank), or one that is an error."""
    model, given = parallel(small, strategies=TWO), sequences(1, LENGTHS)
    for differing in (sequences(2, LENGTHS), [given[0], torch.zeros(0, dtype=torch.int64)], None):
        with pytest.raises(BatchMismatchError, match=r"mini-batch on rank 1 differs .* evaluate"):
            model.evaluate(differing if rank == 1 else given)
    return model.evaluate(given)


def test_ranks_with_other_sequences_are_named_before_anything_moves():
    assert len(set(other_sequences())) == 1


class Featured(nn.Module):
    """Attention over what is known of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(131, 6), nn.Linear(3, 6), nn.Linear(6, 131)

    def forward(self, input_ids, features):
        x = (self.embed(input_ids) + self.mix(features)).unsqueeze(1)
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def loss_of_features(model, batch):
    return losses.cross_entropy_sum(model(batch["input_ids"], batch["features"]), batch["labels"])


def row_of_features(tokens):
    ids = torch.arange(tokens) + 1
    return {"input_ids": ids, "labels": ids, "features": torch.linspace(0, 1, 3 * tokens).view(tokens, 3)}


@WORLD.case
def features(rank):
    """Of three tokens with three features each, the tokens are padded for two ranks."""
    example, batch = ({key: value[None] for key, value in row_of_features(n).items()} for n in (8, 3))
    torch.manual_seed(0)
    module = Featured()
    with torch.no_grad():
        expected = module(batch["input_ids"], batch["features"])
        mean = losses.cross_entropy_sum(expected, batch["labels"]).item() / 3
        options = {"strategies": {64: "cp2"}, "loss": loss_of_features, "example": example, "monitor": False}
        model = fxpar.parallelize(module, **options)
        found = model(batch["input_ids"], batch["features"])
        return mean, float(model.evaluate([row_of_features(3)])), (found - expected).abs().max().item()


def test_features_as_many_as_tokens_are_no_tokens():
    for mean, found, error in features():
        assert found == pytest.approx(mean, rel=1e-5)
        assert error <= 1e-5


def counted(model, batch):
    labels = batch["labels"]
    return losses.cross_entropy_sum(model(batch["input_ids"]), labels), {"count": (labels != -100).sum()}


class Auxiliary(Deep):
    """A head that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(6, 131)

    def forward(self, input_ids):
        out = super().forward(input_ids)
        return out + self.auxiliary(self.embed(input_ids)) if self.training else out


@WORLD.case
def other_stages(rank):
    model = fxpar.parallelize(Auxiliary(), strategies={128: "pp2"}, loss=losses.causal_lm, monitor=False)
    with pytest.raises(EvaluateStagesError, match=r"under pp2: parameter '\w+\.weight' is on other pipeline stages"):
        model.evaluate(sequences(1, LENGTHS))
    return True


def test_a_model_that_evaluates_with_other_stages_is_refused():
    assert all(other_stages())


@functools.cache
def of_three(strategy):
    return fxpar.compile_strategies(Deep(), {128: strategy}, counted)


THREE = World(3, lambda: [of_three("tp3"), of_three("pp3")])


@THREE.case
def counts(rank):
    """Thirds of 7 do not add up to 7."""
    found = []
    for strategy in ("tp3", "pp3"):
        options = {"loss": counted, "compiled": of_three(strategy), "monitor": False}
        model = fxpar.parallelize(Deep(), strategies={128: strategy}, **options)
        found.append([model.evaluate(sequences(1, (n + 1,))).metrics["count"] for n in (7, 14, 25, 62)])
    return found, model.fxpar_session.evaluation.bound["pp3"] is model.fxpar_session.engine.bound["pp3"]


def test_counts_are_whole_with_three_ranks_to_a_replica():
    assert [found for found, _ in counts()] == [[[7.0, 14.0, 25.0, 62.0]] * 2] * 3


def test_stages_evaluate_the_program_that_they_train():
    assert all(same for _, same in counts())
