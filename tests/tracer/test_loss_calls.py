"""A loss that fails on what it is called with is told how fxpar calls it, and what the batch is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpar import errors
from fxpar.tracer import capture
from tests.tracer.models import MLP

X = {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda output, labels=0: output.sum(), AttributeError),
        (lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels), AttributeError),
        (lambda model, batch: batch(model).sum(), TypeError),
    ],
    ids=["one argument", "of logits", "the batch called"],
)
def test_an_error_of_the_loss_says_how_it_is_called(loss, kind):
    with pytest.raises(errors.LossCallError) as caught:
        capture(MLP(), loss, X)
    assert isinstance(caught.value.__cause__, kind)
    assert f": {kind.__name__}: {caught.value.__cause__}. fxpar calls it" in str(caught.value)
    assert "loss(model, batch), and the batch is a dict with 'x', 'y'" in str(caught.value)


def test_a_key_of_a_dict_of_the_loss_stays_what_it_is():
    with pytest.raises(KeyError) as caught:
        capture(MLP(), lambda model, batch: {"x": model(batch["x"])}["y"].sum(), X)
    assert "loss(model, batch); the keys of the batch are 'x', 'y'" in caught.value.__notes__[0]


def test_a_batch_that_the_loss_cannot_read_is_named():
    with pytest.raises(errors.LossCallError, match=r"tuple indices .* the batch is a tuple\."):
        capture(MLP(), lambda model, batch: model(batch["x"]).sum(), tuple(X.values()))


def popped(model, batch):
    batch = dict(batch)
    batch.pop("y")
    return model(batch["xs"]).sum()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch["pixels"]).sum(), r"reads 'pixels', .* its keys are 'x', 'y'\. Give"),
        (lambda model, batch: model(({"z": 0, **batch})["pixels"]).sum(), "reads 'pixels'"),
        (popped, "reads 'xs', .* its keys are 'x', 'y'; did you mean 'x'"),
    ],
    ids=["a key", "of a dict with more", "of a dict with fewer"],
)
def test_a_key_that_the_batch_lacks_is_named(loss, words):
    with pytest.raises(errors.MissingInputError, match=words):
        capture(MLP(), loss, X)
