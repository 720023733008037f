"""What a session tells of the mini-batches that it is given."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize(("loss", "told"), [(fxpar.losses.causal_lm, 1), (shifting, 0)], ids=["as they are", "shifted"])
def test_labels_that_are_the_input_are_told_once_where_the_loss_does_not_shift(loss, told):
    ids = torch.arange(20)
    batch = [{"input_ids": ids, "labels": ids}]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = fxpar.parallelize(Words(), strategies={64: "dp1"}, loss=loss, monitor=False, packed=False)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.train_step(batch)
            model.train_step(batch)
    finally:
        dist.destroy_process_group()
    said = [str(one.message) for one in found if issubclass(one.category, FxparWarning)]
    assert ["learns to copy" in text for text in said] == [True] * told
