"""Which losses are sums over tokens, which are means: all are asked inside of one capture."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import errors
from fxpar.tracer import capture
from fxpar.tracer.context import current
from fxpar.tracer.loss import as_sum

CLASSES, WIDTH, TOKENS = 11, 4, 7


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.head, self.classes = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, 3)
        self.log_var = nn.Parameter(torch.zeros(()))
        self.register_buffer("temperature", torch.tensor(2.0))


@dataclass
class Case:
    """What the losses below are made of. One value of each key of the batch per token, as fxpar's batches have."""

    model: Tokens
    labels: Tensor
    weights: Tensor
    vectors: Tensor
    positions: Tensor
    weight: Tensor  # of the sequence
    vector: Tensor
    logits: Tensor

    @cached_property
    def each(self) -> Tensor:
        return self.cross_entropy("none").view(self.labels.shape)

    @cached_property
    def sum(self) -> Tensor:
        return self.cross_entropy("sum")

    @cached_property
    def mean(self) -> Tensor:
        return self.cross_entropy("mean")

    @cached_property
    def mask(self) -> Tensor:
        return (self.labels != -100).float()

    @cached_property
    def count(self) -> Tensor:
        return self.mask.sum()

    @property
    def T(self) -> int:
        return self.labels.shape[1]

    def cross_entropy(self, reduction: str, **options) -> Tensor:
        return F.cross_entropy(self.logits.flatten(0, 1), self.labels.flatten(), reduction=reduction, **options)

    def pooled(self, masked: bool = False) -> Tensor:
        x = self.vector
        return (x * self.mask[..., None]).sum(1) / self.count if masked else x.mean(1)


def added(c):
    loss = c.cross_entropy("mean")
    loss += 0.1 * c.model.log_var**2
    return loss


def added_to_sum(c):
    loss = c.cross_entropy("sum")
    loss += c.mean
    return loss


def divided(c):
    loss = c.cross_entropy("sum")
    loss /= c.count
    return loss


def each_divided(c):
    losses = c.cross_entropy("none")
    losses /= c.count
    return losses.sum()


def each_written_to(c):
    losses = c.cross_entropy("none") / c.count
    losses[c.labels[0] == -100] = 0.0
    return losses.sum()


def squared(c):
    loss = c.mean
    return loss * loss


MEANS = {
    "clamp": lambda c: c.mean.clamp(max=100.0),
    "relu": lambda c: F.relu(c.mean),
    "abs": lambda c: c.mean.abs(),
    "nan_to_num": lambda c: c.mean.nan_to_num(),
    "pow": lambda c: c.mean**1.0,
    "exp of log": lambda c: c.mean.log().exp(),
    "perplexity": lambda c: c.mean.exp(),
    "squared": squared,
    "maximum": lambda c: torch.maximum(c.mean, c.model.log_var),
    "smoothing": lambda c: c.cross_entropy("mean", label_smoothing=0.1).clamp(max=9.0),
    "uncertainty": lambda c: c.mean * (-c.model.log_var).exp() + c.model.log_var,
    "weights and tokens": lambda c: c.sum + (c.model.head.weight.mean() * c.each).mean(),
    "stack": lambda c: torch.stack([c.mean, c.mean]).mean(),
    "mean of means": lambda c: c.each.mean(1).mean(),
    "mean over tokens": lambda c: c.each.mean(1).relu().sum(),
    "root of mse": lambda c: F.mse_loss(c.vector, c.vectors).sqrt(),
    "aten": lambda c: torch.ops.aten.mse_loss(c.vector, c.vectors),
    "var_mean": lambda c: torch.var_mean(c.each)[1],
    "pool": lambda c: F.adaptive_avg_pool1d(c.each[None], 2).sum(),
    "nanmean": lambda c: c.each.nanmean() + c.sum,
    "scattered": lambda c: c.vector.new_zeros(3).scatter_reduce(0, c.labels[0], c.each[0], "mean").sum(),
    "scattered to tokens": lambda c: (
        c.each.new_zeros(c.T).scatter_reduce(0, c.labels[0], c.each[0], "mean", include_self=False).sum()
    ),
    "index_reduce": lambda c: c.vector.new_zeros(3).index_reduce(0, c.labels[0], c.each[0], "mean").sum(),
    "softmax of the mask": lambda c: (c.each * c.mask.softmax(-1)).sum(),
    "softmax of weights": lambda c: c.each[0] @ c.weights[0].softmax(0),
    "added in place": added,
    "added to a sum": added_to_sum,
    "divided in place": divided,
    "each divided in place": each_divided,
    "each written to": each_written_to,
    "power of count": lambda c: c.sum * c.count**-1,
    "rsqrt of count": lambda c: c.sum * c.count.square().rsqrt(),
    "exp of -log": lambda c: c.sum * (-c.count.log()).exp(),
    "difference of logs": lambda c: (c.sum.log() - c.count.log()).exp(),
    "addcdiv": lambda c: torch.addcdiv(c.model.log_var, c.sum, c.count),
    "where": lambda c: torch.where(c.count > 0, c.sum / c.count, 0.0),
    "count and parameter": lambda c: c.sum / (c.count * c.model.log_var.exp()),
    "number of Python": lambda c: c.sum * (1.0 / c.T),
    "alpha": lambda c: torch.add(c.model.log_var, c.sum, alpha=1.0 / c.T),
    "full": lambda c: (c.each * torch.full(c.labels.shape, 1.0 / c.T)).sum(),
    "ones": lambda c: c.sum / torch.ones_like(c.each).sum(),
    "losses above 0": lambda c: c.sum / (c.each > 0).sum(),
    "losses that are numbers": lambda c: c.sum * (~c.each.isnan()).float().sum().reciprocal(),
    "einsum": lambda c: torch.einsum("bt,bt->", c.each, c.mask / c.mask.sum()),
    "dot": lambda c: c.each.view(-1) @ (c.mask / c.mask.sum()).view(-1),
    "expand": lambda c: (c.each / c.count.expand(1, c.T)).sum(),
    "normalize": lambda c: (c.each * F.normalize(c.mask, p=1.0, dim=-1)).sum(),
    "clamp of each": lambda c: (c.each / c.count).clamp(max=9.0).sum(),
    "sum of weights": lambda c: c.sum / c.weights.sum(),
    "last position": lambda c: c.sum / (c.positions[0, -1] + 1),
    "given divisor": lambda c: c.sum / c.weight.sum(),
}
SUMS = {
    "sum": lambda c: c.sum,
    "smoothing": lambda c: c.cross_entropy("sum", label_smoothing=0.1),
    "z": lambda c: c.sum + 1e-3 * (c.logits.logsumexp(-1).square() * c.mask).sum(),
    "float mask": lambda c: (c.each * c.mask).sum(),
    "bool mask": lambda c: (c.each * (c.labels != -100)).sum(),
    "gather": lambda c: -c.logits.log_softmax(-1).gather(-1, c.labels[..., None]).sum(),
    "uncertainty": lambda c: c.sum * c.model.log_var.exp() + c.model.log_var,
    "experts": lambda c: c.sum + 0.01 * c.vector.softmax(-1).sum(),
    "softmax of losses": lambda c: (c.each * c.each.detach().softmax(-1)).sum(),
    "softmax of classes": lambda c: (c.each * c.vectors.softmax(-1)[..., 0]).sum(),
    "scattered sum": lambda c: c.vector.new_zeros(3).scatter_reduce(0, c.labels[0], c.each[0], "sum").sum(),
    "added at indices": lambda c: c.vector.new_zeros(3).index_add(0, c.labels[0], c.each[0]).sum(),
    "penalty": lambda c: c.sum + 0.1 * sum(w.square().sum() for w in c.model.parameters()),
    "penalty by means": lambda c: c.sum + 0.1 * sum(w.square().mean() for w in c.model.parameters()),
    "distance of weights": lambda c: c.sum + F.mse_loss(c.model.head.weight, c.model.embed.weight),
    "mean of a parameter alone": lambda c: c.model.head.weight.abs().mean(),
    "pooled": lambda c: F.cross_entropy(c.model.classes(c.pooled()), c.labels[:, 0].clamp(max=2), reduction="sum"),
    "pooled under a mask": lambda c: F.cross_entropy(
        c.model.classes(c.pooled(True)), c.labels[:, 0].clamp(max=2), reduction="sum"
    ),
    "score of a row": lambda c: F.softplus(c.vector[0].mean(0) @ c.model.classes.weight[0]),
    "one class": lambda c: F.binary_cross_entropy_with_logits(
        F.linear(c.pooled(), c.model.classes.weight[:1]), c.weights[:, :1], reduction="sum"
    ),
    "last token": lambda c: F.cross_entropy(
        c.model.classes(c.vector[torch.arange(1), c.mask.long().sum(1) - 1]), c.labels[:, 0], reduction="sum"
    ),
    "sentence": lambda c: (1 - F.cosine_similarity(c.pooled(), c.vectors[:, 0])).sum(),
    "first token": lambda c: -F.cosine_similarity(c.vector[:, 0], c.vectors[:, 0]).sum(),
    "distilled sentence": lambda c: F.mse_loss(c.pooled(True), c.vectors[:, 0], reduction="sum"),
    "kl": lambda c: F.kl_div(c.logits.log_softmax(-1), c.logits.detach().softmax(-1), reduction="sum"),
    "focal": lambda c: ((1 - (-c.each).exp()) ** 2 * c.each).sum(),
    "features": lambda c: (c.vector - c.vectors).square().mean(-1).sum(),
    "weights": lambda c: torch.einsum("bt,bt->", c.each, c.weights),
    "weight": lambda c: c.sum * c.weight.view(()).double(),
    "sum of one weight": lambda c: c.sum * c.weight.sum(),
    "first weight": lambda c: c.sum * (1 - 2 * c.weights[0, 0]),
    "any": lambda c: c.sum * (c.labels != -100).any().float(),
    "all": lambda c: c.sum * (c.labels != -100).all(),
    "where": lambda c: torch.where(c.count > 0, c.sum, 0.0),
    "first half": lambda c: (c.each * (c.positions < c.T // 2)).sum(),
    "buffer": lambda c: c.sum / c.model.temperature,
    "constant": lambda c: c.sum * torch.tensor(0.5),
    "nansum": lambda c: c.each.nansum(),
    "clamp": lambda c: c.each.clamp(max=5.0).sum(),
}
NO_SUMS = {
    "max": (lambda c: c.each.max(), "max"),
    "max of dim": (lambda c: c.each.max(1).values.sum(), "max"),
    "logsumexp": (lambda c: c.each.logsumexp((0, 1)), "logsumexp"),
    "std": (lambda c: c.each.std(), "std"),
    "norm": (lambda c: c.each.norm(), "linalg_vector_norm"),
    "square": (lambda c: c.sum**2, "pow"),
    "over their norm": (lambda c: (c.each / c.each.norm()).sum(), "linalg_vector_norm"),
    "root of a sum": (lambda c: c.each.square().sum().sqrt(), "sqrt"),
    "over a learned sum": (lambda c: c.sum / c.vector.square().sum(), "div"),
}
OTHER_SCALES = {
    "ignore_index": (lambda c: c.cross_entropy("mean", ignore_index=0), "the labels that are not 0"),
    "weight": (lambda c: c.cross_entropy("mean", weight=torch.ones(CLASSES)), "the weights of the labels"),
    "mse": (lambda c: F.mse_loss(c.vector, c.vectors), "28 for 7 tokens"),
    "mean": (lambda c: (c.vector - c.vectors).abs().mean(), "28 for 7 tokens"),
    "nll": (
        lambda c: F.nll_loss(c.logits.log_softmax(-1)[0], c.labels[0], ignore_index=3),
        "the labels that are not 3",
    ),
    "kl": (lambda c: F.kl_div(c.logits.log_softmax(-1), c.logits.detach().softmax(-1)), "77 for 7 tokens"),
    "hardest tokens": (lambda c: c.each.flatten().topk(2).values.mean(), "2 for 7 tokens"),
    "one vector": (lambda c: F.mse_loss(c.pooled(), c.vectors[:, 0]), "4 for 7 tokens"),
    "every second token": (lambda c: c.each[:, ::2].mean(), "4 for 7 tokens"),
    "first tokens": (lambda c: c.each[:, :3].mean(), "3 for 7 tokens"),
    "nanmean": (lambda c: c.each.nanmean(), "the numbers that are not NaN"),
}
BY_LABELS = {
    "cross entropy": lambda c: c.mean,
    "shifted": lambda c: F.cross_entropy(c.logits[0, :-1], c.labels[0, 1:]),
    "smoothing": lambda c: c.cross_entropy("mean", label_smoothing=0.1),
    "nll": lambda c: F.nll_loss(c.logits.log_softmax(-1)[0], c.labels[0]),
    "batchmean of one row": lambda c: F.kl_div(
        c.logits.log_softmax(-1), c.logits.detach().softmax(-1), reduction="batchmean"
    ),
}
BY_TOKENS = {
    "probabilities": (lambda c: F.cross_entropy(c.logits[0], c.logits[0].detach().softmax(-1)), 0),
    "one per token": (lambda c: c.vector.logsumexp(-1).mean(), 0),
    "features": (lambda c: (c.vector - c.vectors).square().mean(-1).mean(), 0),
    "l1": (lambda c: F.l1_loss(c.vector.sum(-1), c.weights), 0),
    "batchmean": (
        lambda c: F.kl_div(c.logits[0].log_softmax(-1), c.logits[0].detach().softmax(-1), reduction="batchmean"),
        0,
    ),
    "all but the last": (lambda c: (c.vector[:, :-1] - c.vectors[:, 1:]).square().sum(-1).mean(), 1),
    "ignored labels": (lambda c: c.each.mean(), 0),
    "ignored labels, masked": (lambda c: (c.vector.sum(-1) * c.mask).mean(), 0),
    "ignored labels, nll": (
        lambda c: F.nll_loss(c.logits.log_softmax(-1)[0], c.labels[0], reduction="none").mean(),
        0,
    ),
    "ignored labels, l1": (lambda c: F.l1_loss(c.each, c.weights), 0),
}


class Asked(Exception):
    """Ends the capture: what it would make of all these losses together is of no interest."""


@pytest.fixture(scope="module")
def found():
    """(group, name) -> what was made of each loss: "as it is", "its sum" or the error; the warnings; how many tokens
    fewer than all of a sequence the mean divides by, labelled or not.
    """
    results, fewer = {}, {}

    def ask(group, name, loss, case):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = loss(case)
                _, mean = as_sum(value, current())
                result = "as it is" if mean is None else "its sum"
                fewer[group, name] = None if mean is None else mean.fewer
            except errors.MeanLossError as error:
                result = str(error)
        said = [str(w.message) for w in caught if w.category is errors.FxparWarning]
        results[group, name] = result, said, fewer.get((group, name))

    def loss_fn(model, batch):
        vector = model.norm(model.embed(batch["input_ids"]))
        case = Case(
            model,
            **{key: value for key, value in batch.items() if key != "input_ids"},
            vector=vector,
            logits=model.head(vector),
        )
        for group, losses in (("means", MEANS), ("sums", SUMS), ("labels", BY_LABELS)):
            for name, loss in losses.items():
                ask(group, name, loss, case)
        for group, pairs in (("other", OTHER_SCALES), ("tokens", BY_TOKENS), ("no sums", NO_SUMS)):
            for name, (loss, _) in pairs.items():
                ask(group, name, loss, case)
        raise Asked

    batch = {
        "input_ids": torch.randint(CLASSES, (1, TOKENS)),
        "labels": torch.randint(3, (1, TOKENS)),
        "weights": torch.rand(1, TOKENS),
        "vectors": torch.rand(1, TOKENS, WIDTH),
        "positions": torch.arange(TOKENS)[None],
        "weight": torch.rand(1),
    }
    with pytest.raises(Asked):
        capture(Tokens(), loss_fn, batch)
    return results


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_found_wherever_it_stands(found, name):
    result, _, _ = found["means", name]
    assert "a factor that depends on the batch" in result
    assert "test_means.py:" in result


@pytest.mark.parametrize("name", SUMS)
def test_what_is_no_mean_is_taken_as_it_is(found, name):
    assert found["sums", name] == ("as it is", [], None)


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_neither_a_sum_nor_a_mean_is_taken_with_a_warning(found, name):
    result, (warning,), _ = found["no sums", name]
    assert result == "as it is"
    assert f"nor a mean of them: `{NO_SUMS[name][1]}` at " in warning
    assert "test_means.py:" in warning


@pytest.mark.parametrize("name", OTHER_SCALES)
def test_a_mean_over_something_else_than_tokens_is_a_sum_with_a_warning(found, name):
    result, (warning,), _ = found["other", name]
    assert result == "its sum"
    assert OTHER_SCALES[name][1] in warning
    assert "test_means.py:" in warning


@pytest.mark.parametrize("name", BY_LABELS)
def test_a_mean_by_labels_is_a_sum(found, name):
    assert found["labels", name] == ("its sum", [], None)


@pytest.mark.parametrize("name", BY_TOKENS)
def test_a_mean_over_tokens_is_a_sum_of_which_a_step_compares_the_number(found, name):
    assert found["tokens", name] == ("its sum", [], BY_TOKENS[name][1])
