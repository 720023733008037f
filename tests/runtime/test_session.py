"""What a session tells of the mini-batches that it is given."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.errors import FxparWarning


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def shifting(model, batch):
    logits = model(batch["input_ids"])
    return fxpar.losses.cross_entropy_sum(logits[:, :-1], batch["labels"][:, 1:])


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


LOSSES = {"as they are": (fxpar.losses.causal_lm, 1), "shifted": (shifting, 0)}
LOSSES["a partial"] = functools.partial(fxpar.losses.causal_lm), 1


@pytest.mark.parametrize(("loss", "told"), LOSSES.values(), ids=LOSSES)
def test_labels_that_are_the_input_are_told_once_where_the_loss_does_not_shift(loss, told, alone):
    ids = torch.arange(20)
    batch = [{"input_ids": ids, "labels": ids}]
    model = fxpar.parallelize(Words(), strategies={64: "dp1"}, loss=loss, monitor=False, packed=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_step(batch)
        model.train_step(batch)
    said = [str(one.message) for one in found if issubclass(one.category, FxparWarning)]
    assert ["learns to copy" in text for text in said] == [True] * told


def distilled(model, batch):
    """The mean of what each token loses, whether or not it has a label."""
    logits = model(batch["input_ids"])[0].log_softmax(-1)
    return F.kl_div(logits, torch.full_like(logits, 1 / 23), reduction="batchmean")


LABELLED = torch.arange(9)
MASKED = torch.where(LABELLED < 6, -100, LABELLED)
SCALES = {
    "all have labels": (distilled, LABELLED, {}, []),
    "some have none": (distilled, MASKED, {}, ["by 18, where fxpar takes the sum and divides by the 6 valid tokens"]),
    "labels of a step": (distilled, None, {}, ["by 18, where fxpar takes the sum and divides by the 16 valid tokens"]),
    "a denominator": (distilled, MASKED, {"denominator": 18}, []),
    "by labels": (lambda m, b: F.cross_entropy(m(b["input_ids"])[0], b["labels"][0]), MASKED, {}, []),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_mean_over_tokens_without_labels_is_told_once(name, alone):
    loss, labels, options, told = SCALES[name]
    sequence = LABELLED if labels is None else {"input_ids": LABELLED, "labels": labels}
    model = fxpar.parallelize(Words(), strategies={64: "dp1"}, loss=loss, monitor=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_step([sequence, sequence], **options)
        model.train_step([sequence, sequence], **options)
    said = [str(one.message) for one in found if issubclass(one.category, FxparWarning)]
    assert len(said) == len(told)
    assert all(words in text for words, text in zip(told, said, strict=True))


def over_all(model, batch):
    """A mean over all places, whether or not they have a label."""
    return model(batch["ids"]).log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None]).mean()


def test_a_task_is_told_of_labels_that_a_later_batch_lacks(alone):
    """Its example has a label everywhere."""
    ids = torch.ones(3, 5, dtype=torch.int64)
    task = fxpar.Task(over_all, {"ids": ids, "labels": ids}, dynamic={key: {0: "B"} for key in ("ids", "labels")})
    model = fxpar.parallelize(Words(), tasks={"rows": task}, strategies={8: "dp1"}, monitor=False)
    few = {"ids": ids[:2], "labels": torch.where(torch.arange(5) < 4, ids[:2], -100)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_step({"rows": [{"ids": ids, "labels": ids}]})
        for _ in range(2):
            model.train_step({"rows": [few]})
    (said,) = (str(one.message) for one in found if issubclass(one.category, FxparWarning))
    assert said.startswith("task 'rows': the loss is ")
    assert "by 10, where fxpar takes the sum and divides by the 8 valid tokens" in said


def test_a_group_that_joins_another_is_logged_once(alone, caplog):
    model = fxpar.parallelize(Words(), strategies={16: "dp1", 64: "dp1"}, loss=distilled, monitor=False)
    report = replace(model.train_step([LABELLED]), merged=((16, 64),))
    caplog.set_level("INFO", "fxpar")
    session = model.fxpar_session
    for _ in range(2):
        session.log_merged(report)
        session.log_merged(replace(report, merged=(), tasks={"pairs": report}))
    text = "<=16 joined <=64: too small to be worth a switch of its own (first in step 1)"
    assert [record.getMessage() for record in caplog.records if record.name == "fxpar"] == [text, f"pairs: {text}"]
