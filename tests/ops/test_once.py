"""Backward ops of fxpar are not differentiated: their derivative would be taken for zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar import errors, losses
from fxpar.tracer import capture

IDS = torch.arange(20).view(2, 10)
TOKENS = {"input_ids": IDS, "labels": IDS}


def _penalty(model, batch):
    logits = model(batch["input_ids"])
    loss = losses.cross_entropy_sum(logits, batch["labels"])
    return loss + torch.autograd.grad(loss, logits, create_graph=True)[0].square().sum()


def _smoothness(model, batch):
    total = model(batch["input_ids"]).square().sum()
    (grad,) = torch.autograd.grad(total, model.inner.weight, create_graph=True)
    return total + grad.square().sum()


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(61, 8), nn.Linear(8, 8)

    def forward(self, input_ids):
        x = self.inner(self.table(input_ids))[:, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


class _Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(61, 8)

    def forward(self, input_ids):
        return self.inner(input_ids).tanh()


@pytest.mark.parametrize(
    ("model", "loss", "named"),
    [
        (_Embeds, _penalty, "F.cross_entropy"),
        (_Attends, _smoothness, "attention"),
        (_Embeds, _smoothness, "F.embedding"),
    ],
)
def test_second_derivatives_are_refused_and_not_taken_for_zero(model, loss, named) -> None:
    with pytest.raises(errors.UnsupportedOpError, match=f"second derivative of {named} "):
        capture(model(), loss, TOKENS)
