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
from fxpar.errors import FxparError, FxparWarning, ParallelizeError


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


def test_strategies_change_in_a_run(alone):
    """What runs as before is kept; what is wrong changes nothing."""
    options = {"monitor": False, "token_budget": 64}
    model = fxpar.parallelize(Words(), strategies={32: "dp1", 64: "dp1+remat"}, **options)
    ahead = model.plan_ahead([[LABELLED]] * 3)
    model.train_step(next(ahead))
    before = model.fxpar_session
    params, grads = dict(model.named_parameters()), {name: one.grad.clone() for name, one in model.named_parameters()}
    with pytest.raises(FxparError, match="each strategy must use the one rank that there is, but "):
        model.change_strategies({64: "dp2"})
    assert model.fxpar_session is before
    assert model.change_strategies({32: "dp1+chunks(2)", 64: "dp1"}, order=["dp1", "dp1+chunks(2)"]) is model
    now = model.fxpar_session
    assert now.compiled.logical is before.compiled.logical
    assert now.programs["dp1"] is before.programs["dp1"]
    assert now.engine.options.order == ("dp1", "dp1+chunks(2)")
    assert [(group.limit, str(group.strategy)) for group in now.engine.groups] == [(32, "dp1+chunks(2)"), (64, "dp1")]
    begun = []
    now.engine.begin_plan = begun.append  # the session of before plans nothing any more
    report = model.train_step(next(ahead))
    assert begun == [[LABELLED]]
    assert report.step == model.step_count == 2
    for name, one in model.named_parameters():
        assert one is params[name]
        assert torch.allclose(one.grad.full_tensor(), 2 * grads[name].full_tensor(), rtol=1e-5, atol=1e-7)
    assert (
        model.change_strategies({64: "dp1"}, token_budget=128).fxpar_session.programs["dp1"] is not now.programs["dp1"]
    )


def test_strategies_of_tasks_change_with_their_tasks(alone):
    task = fxpar.Task(shifting, strategies={64: "dp1"})
    model = fxpar.parallelize(Words(), tasks={"words": task}, monitor=False)
    with pytest.raises(ParallelizeError, match="call change_tasks"):
        model.change_strategies({64: "dp1"})
