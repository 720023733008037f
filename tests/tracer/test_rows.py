"""A mean over the rows of the batch, of which a captured step has one: told, unless it is a chance that it is one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar.errors import FxparWarning
from fxpar.runtime.compiling import compile_task
from fxpar.runtime.task import Task
from fxpar.tracer import capture

CLASSES, WIDTH, TOKENS = 11, 4, 7


class Model(nn.Module):
    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.embed, self.head, self.rows = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES), rows

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.rows is not None and input_ids.shape[0] != self.rows:
            raise ValueError("another number of rows")
        return self.head(self.embed(input_ids))


def _each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(batch["input_ids"]), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def _said(loss, rows: int = 1, model: nn.Module | None = None) -> list[str]:
    ids = torch.randint(CLASSES, (rows, TOKENS))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture(model or Model(), loss, {"input_ids": ids, "labels": ids.roll(-1, 1)})
    return [str(one.message) for one in found if issubclass(one.category, FxparWarning)]


BY_ROWS = {
    "mean of sums": (lambda m, b: _each(m, b).sum(1).mean(), "is a mean over all elements"),
    "mean over dim 0": (lambda m, b: _each(m, b).sum(-1).mean(0), "has a mean"),
    "division": (lambda m, b: _each(m, b).sum() / b["labels"].shape[0], "has a division"),
    "division by len": (lambda m, b: _each(m, b).sum() / len(b["labels"]), "has a division"),
    "factor": (lambda m, b: _each(m, b).sum() * (1 / b["labels"].size(0)), "has a factor"),
    "division by a tensor": (lambda m, b: _each(m, b).sum() / torch.tensor(b["labels"].shape[0]), "has a division"),
    "division by what is filled": (lambda m, b: _each(m, b).sum() / torch.full((), len(b["labels"])), "has a division"),
    "loop": (lambda m, b: sum(row.sum() / len(b["labels"]) for row in _each(m, b)), "has a division"),
    "each": (lambda m, b: (_each(m, b) / b["labels"].shape[0]).sum(), "has a division"),
    "batchmean": (
        lambda m, b: F.kl_div(
            m(b["input_ids"]).log_softmax(-1), torch.full((CLASSES,), 1 / CLASSES), reduction="batchmean"
        ),
        "is F.kl_div(reduction='batchmean')",
    ),
}
BY_CHANCE = {
    "factor of one": lambda m, b: _each(m, b).sum() * 1.0,
    "division by one": lambda m, b: _each(m, b).sum() / 1,
    "division by a tensor of one": lambda m, b: _each(m, b).sum() / torch.tensor(1.0),
    "mean of one number": lambda m, b: _each(m, b).sum().mean(),
    "mean of one view": lambda m, b: _each(m, b).sum().view(1).mean(),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_mean_over_rows_is_told(name):
    loss, words = BY_ROWS[name]
    (said,) = _said(loss)
    assert said.startswith(f"the loss {words}")
    assert "which divides by the rows of the batch, of the example 1" in said
    assert "test_rows.py:" in said
    assert "pass train_step(denominator=...)" in said


@pytest.mark.parametrize("name", BY_CHANCE)
def test_a_number_that_is_one_by_chance_is_not(name):
    assert _said(BY_CHANCE[name]) == []


def test_a_batch_of_several_rows_is_told_of_once():
    (said,) = _said(BY_ROWS["division"][0], rows=3)
    assert "of the example 3" in said
    (said,) = _said(BY_ROWS["mean of sums"][0], rows=3)
    assert "of the example 3 for 21 tokens" in said


def test_a_model_that_takes_one_row_alone_has_no_mean_over_rows():
    assert _said(BY_ROWS["division"][0], model=Model(rows=1)) == []


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels = nn.Embedding(CLASSES, WIDTH), nn.Linear(3, WIDTH)


def _pairs(model: Pairs, batch: dict[str, Tensor]) -> Tensor:
    scores = model.pixels(batch["pixels"]) @ model.words(batch["ids"]).mean(1).T
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def _tokens(model: Pairs, batch: dict[str, Tensor]) -> Tensor:
    return (model.words(batch["ids"]) + model.pixels(batch["pixels"])[:, None]).sum(-1).mean()


def _numbers(model: Pairs, batch: dict[str, Tensor]) -> Tensor:
    return model.pixels(batch["pixels"]).square().mean()


def _some_labels(model: Pairs, batch: dict[str, Tensor]) -> Tensor:
    scores = model.words(batch["ids"]).transpose(1, 2)
    return F.cross_entropy(scores, batch["labels"], reduction="none").mean()


def _told(loss, batch: dict[str, Tensor], dynamic) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compile_task(Pairs(), Task(loss, batch, dynamic=dynamic, strategies={8: "dp1"}))
    return [str(one.message) for one in found if issubclass(one.category, FxparWarning)]


@pytest.mark.parametrize("dynamic", ["auto", {"pixels": {0: "B"}, "ids": {0: "B"}}])
def test_a_task_without_labels_counts_rows(dynamic):
    batch = {"pixels": torch.randn(5, 3), "ids": torch.ones(5, 6, dtype=torch.long)}
    assert [_told(loss, batch, dynamic) for loss in (_pairs, lambda m, batch: _pairs(m, batch) * 2)] == [[], []]
    (of_tokens,) = _told(_tokens, batch, dynamic)
    assert "divides by something else than rows. fxpar takes the sum and divides by the rows of the task's" in of_tokens


def test_a_task_without_ids_counts_rows():
    """Its mean over all numbers divides by more; one over rows does not."""
    batch = {"pixels": torch.randn(5, 3)}
    (of_numbers,) = _told(_numbers, batch, "auto")
    assert "divides by something else than rows" in of_numbers
    assert not _told(lambda m, batch: m.pixels(batch["pixels"]).square().sum(-1).mean(), batch, "auto")


def test_a_task_counts_its_labels():
    ids = torch.ones(5, 6, dtype=torch.long)
    labels = ids.clone()
    assert not _told(_some_labels, {"ids": ids, "labels": labels}, "auto")
    labels[2, 3:] = -100
    assert not _told(_some_labels, {"ids": ids, "labels": labels}, "auto")  # a step tells it (`fxpar.runtime.session`)
    by_name = {"ids": ids, "targets": labels}
    (of_others,) = _told(lambda m, b: F.cross_entropy(m.words(b["ids"]).transpose(1, 2), b["targets"]), by_name, "auto")
    assert "divides by something else than rows" in of_others
