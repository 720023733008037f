"""What a user's batch and loss are looked at for: numbers without a row, keys that nothing reads, a mean over rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpar.checking.batches import check_rows_add_up, check_values, unread_keys
from fxpar.errors import BatchIdError, RowMeanError
from fxpar.tracer import capture
from tests.cli.helpers import fxpar

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def loss(model, batch):
    return -model(batch["x"]).log_softmax(-1).gather(-1, batch["labels"][:, None]).sum()


def averaged(model, batch):
    return loss(model, batch) / batch["x"].shape[0]


def shifted(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"] + 1, reduction="sum")


def make(label: int = 1, keys: int = 0, mean: int = 0, shift: int = 0):
    batch = {"x": torch.arange(12.0).reshape(4, 3) / 7, "labels": torch.tensor([0, label, 2, 1])}
    batch |= {f"extra_{i}": torch.ones(4, 2) for i in range(keys)}
    return Head(3, 5), shifted if shift else averaged if mean else loss, batch
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "head.py"
    path.write_text(MODEL)
    return f"{path}:make"


def test_a_label_without_a_class(model):
    status, _, err = fxpar("check", model, "-s", "dp2", "--set", "label=9")
    assert status == 1
    assert err.startswith("error: 'labels' of the batch has the value 9, but the dim that it picks from at head.py:13")
    assert "has 5 rows (0 to 4)" in err


def test_a_batch_that_the_loss_does_not_run_on(model):
    """What is looked up is computed from a key: no limit is known of it."""
    status, _, err = fxpar("check", model, "-s", "dp2", "--set", "label=4", "--set", "shift=1")
    assert status == 1
    assert err.startswith("error: the model or its loss does not run on the example batch: IndexError at ")
    assert "head.py:21: Target 5 is out of bounds. It was captured from shapes alone; look at" in err


def test_a_key_that_nothing_reads(model):
    status, out, err = fxpar("check", model, "-s", "dp2", "--set", "keys=2")
    assert status == 0, err
    assert "note: nothing reads 'extra_0', 'extra_1' of the batch\n" in out
    assert "nothing reads" not in fxpar("check", model, "-s", "dp2")[1]


def test_a_mean_over_rows(model):
    status, _, err = fxpar("check", model, "-s", "dp2", "--set", "mean=1")
    assert status == 1
    assert err.startswith("error: the loss is a mean")


def summed(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")


def spread(model, batch):
    """A batch norm: rows do not add up, and their mean is not the loss of the batch."""
    return (model(batch["x"]) - model(batch["x"]).mean(0)).square().sum()


def batch_of(rows: int):
    return {"x": torch.randn(rows, 3), "labels": torch.arange(rows) % 5}


def test_rows_that_do_not_add_up():
    head, batch = nn.Linear(3, 5), batch_of(4)
    with pytest.raises(RowMeanError, match="a mean over the 4 rows of the batch: it is "):
        check_rows_add_up(head, lambda model, batch: summed(model, batch) / len(batch["x"]), batch)
    beside = {**batch, "mask": torch.ones(1, 3), "other": torch.ones(5)}
    with pytest.raises(RowMeanError, match="a mean over the 4 rows"):
        check_rows_add_up(head, lambda model, batch: summed(model, batch) / len(batch["x"]), beside, ["other"])
    for loss, given in (
        (summed, batch),
        (summed, beside),
        (spread, batch),
        (summed, batch_of(1)),
        (summed, {**batch, "n": torch.ones(2)}),
    ):
        check_rows_add_up(head, loss, given)


def test_a_row_that_does_not_run_alone():
    """Buffers are as they were."""
    model, batch = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5)), batch_of(4)
    before = {name: value.clone() for name, value in model.named_buffers()}
    check_rows_add_up(model, summed, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_limits_and_keys_of_a_graph():
    batch = batch_of(4)
    graph = capture(nn.Linear(3, 5), summed, batch)
    check_values(graph, [batch])
    assert unread_keys(graph, {**batch, "other": batch["x"]}) == ["other"]
    with pytest.raises(BatchIdError, match="'labels' of the batch has the value -3"):
        check_values(graph, [batch, {**batch, "labels": torch.tensor([0, -3, 1, 2])}])
