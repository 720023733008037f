"""Shortcuts in the backward leave graphs that run, and give what autograd gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tracer.helpers import check, ops


class Pooled(nn.Module):
    """A mean over tokens right behind a linear layer, whose backward views an expanded gradient as rows."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.embed, self.linear, self.head, self.turned = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 5), turned

    def forward(self, ids):
        hidden = self.linear(self.embed(ids))
        return self.head(hidden.transpose(1, 2).mean(2) if self.turned else hidden.mean(1))


@pytest.mark.parametrize("turned", [False, True])
def test_a_view_of_what_is_now_expanded_copies(turned):
    batch = {"ids": torch.randint(13, (6, 7))}
    graph = check(Pooled(turned).double(), lambda model, batch: model(batch["ids"]).square().sum(), [batch])
    assert turned or "aten.reshape" in ops(graph)
