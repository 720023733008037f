"""Batches with other dynamic dims than one token dim."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import losses
from fxpar.lowering import lower
from fxpar.models.llama import Llama, LlamaOptions
from tests.captured import Captured, Mlp, squared, take, tokens, vectors
from tests.repeat import thinned

BOTH = {key: {0: "B", 1: "T"} for key in ("input_ids", "labels", "position_ids")}


@functools.cache
def rows_and_tokens() -> Captured:
    """A Llama that was captured on 3 rows of 8 tokens and takes any number of rows."""
    torch.manual_seed(0)
    batches = [tokens(31, T, rows=B)[0] for B, T in ((3, 8), (2, 7), (5, 4), (1, 12))]
    return take(Llama(LlamaOptions(1, 16, 4, 2, 24, 31)), losses.causal_lm, batches, dynamic=BOTH)


@pytest.mark.parametrize(
    "strategy",
    thinned(["dp2", "tp2", "tp3", "cp2", "tp2+sp", "cp2.tp2+sp", "dp2.cp2+zero3"], ["cp2.tp2+sp", "dp2.cp2+zero3"]),
)
def test_rows_and_tokens(strategy):
    result = rows_and_tokens().check(strategy)
    assert result.ok, result


def test_dynamic_rows_do_not_change_the_choice():
    """Four all-reduces per layer, and those of embedding, head and loss."""
    found = lower(rows_and_tokens().graph, "tp2").collectives()
    assert found == {"all_gather": 1, "all_reduce": 4 + 3}


class ConvNet(nn.Module):
    """Images: rows are the only dynamic dim, channels are what tp cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, stride=2)
        self.back, self.head = nn.ConvTranspose2d(6, 4, 2, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(F.relu(self.two(F.relu(self.one(x))))).mean((2, 3)))


@functools.cache
def conv_net() -> Captured:
    torch.manual_seed(0)
    return take(ConvNet(), squared, [{"x": torch.randn(n, 3, 9, 9), "y": torch.randn(n, 4)} for n in (4, 6, 2)])


@pytest.mark.parametrize(
    "strategy", thinned(["dp2", "tp2", "tp3", "cp2", "tp2+sp", "dp2.tp2+zero3"], ["tp3", "cp2", "dp2.tp2+zero3"])
)
def test_images(strategy):
    result = conv_net().check(strategy)
    assert result.ok, result


@functools.cache
def fixed() -> Captured:
    torch.manual_seed(0)
    return take(Mlp(F.gelu), squared, vectors(6, 5, 4, 4, 4), dynamic=None)


@pytest.mark.parametrize("strategy", thinned(["dp2", "tp2", "tp3", "cp2", "tp2+sp"], ["dp2", "cp2", "tp2+sp"]))
def test_no_dynamic_dim_at_all(strategy):
    """There is nothing for cp or sp to cut; the strategies run all the same."""
    result = fixed().check(strategy)
    assert result.ok, result
    assert lower(fixed().graph, strategy).divisors.get("T", 1) == 1
