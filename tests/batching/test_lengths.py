"""How long a sequence may be: bounds that the trace found, and the table that they come from."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fxpar import losses
from fxpar.batching.ids import IdLimit
from fxpar.batching.lengths import LengthLimits, length_limits
from fxpar.tracer import capture
from tests.captured import llama

IDS = torch.zeros(1, 7, dtype=torch.int64)


class Positions(nn.Module):
    """Positions by a lookup with an offset, by a cut of a buffer, or none; a larger table is indexed by token ids."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tokens, self.learned, self.head = nn.Embedding(61, 8), nn.Embedding(42, 8), nn.Linear(8, 61)
        self.register_buffer("fixed", torch.randn(40, 8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, T = self.tokens(input_ids), input_ids.shape[1]
        if self.how == "lookup":
            x = x + self.learned(torch.arange(T) + 2)
        if self.how == "cut":
            x = x + self.fixed[:T]
        if (self.how == "long" and T > 5) or (self.how == "short" and T <= 32):
            x = x * 2
        if self.how == "first":
            x = x + x[:, :20].sum(1, keepdim=True)
        if self.how == "product":
            x = x[:, 3:].sum(1, keepdim=True) + x
            x = torch.cat([x, x.new_zeros(1, 40 - T, 8)], 1)[:, :T]
        return self.head(x)


@pytest.mark.parametrize(("how", "table"), [("lookup", "the table of 'learned'"), ("cut", "the table 'fixed'")])
def test_the_table_is_named(how, table):
    found = length_limits(capture(Positions(how), losses.causal_lm, {"input_ids": IDS, "labels": IDS}))
    assert found == LengthLimits(1, 40, table)
    assert str(found) == f"at most 40 tokens (it has no more positions in {table})"
    assert found.hold(40)
    assert not found.hold(41)


def test_without_a_table_or_a_bound():
    assert length_limits(llama().graph) == LengthLimits(1, None, "")
    found = length_limits(capture(Positions("product"), losses.causal_lm, {"input_ids": IDS, "labels": IDS}))
    assert (found.least, found.most, found.table, found.least_at) == (3, 40, "", None)
    asked = (
        r"it asks for so many at \S*test_lengths\.py:40 and what it calls at \S*test_lengths\.py:41 is captured for so "
        r"few; in a slice, torch\.sym_min\(n, T\) holds for all lengths"
    )
    assert re.fullmatch(rf"at least 3 and at most 40 tokens \({asked}\)", str(found))
    assert not found.hold(2)


def test_a_slice_beyond_the_example_is_named():
    found = length_limits(capture(Positions("first"), losses.causal_lm, {"input_ids": IDS, "labels": IDS}))
    asked = r"what it calls at \S*test_lengths\.py:38 is captured for so few; in a slice, torch\.sym_min\(n, T\) holds"
    assert re.fullmatch(rf"at most 19 tokens \({asked} for all lengths\)", str(found))


@pytest.mark.parametrize("how", ["long", "short"])
def test_the_line_of_a_branch_is_named(how):
    """One `if` of the model, from either side."""
    found = length_limits(capture(Positions(how), losses.causal_lm, {"input_ids": IDS, "labels": IDS}))
    asked = r"its code branches on the length at \S*test_lengths\.py:\d+"
    if how == "long":
        assert (found.least, found.most, found.most_at, found.hold(5)) == (6, None, None, False)
        assert re.fullmatch(rf"at least 6 tokens \({asked}\)", str(found))
    else:
        assert (found.least, found.most, found.least_at, found.hold(32)) == (1, 32, None, True)
        assert re.fullmatch(rf"at most 32 tokens \({asked}\)", str(found))
        assert found.narrowed(IdLimit(16, "b")) == LengthLimits(1, 16, "b")


def test_the_smaller_of_two_tables_counts():
    limits = LengthLimits(1, 40, "a")
    assert limits.narrowed(None) == limits.narrowed(IdLimit(64, "b")) == limits
    assert limits.narrowed(IdLimit(16, "b")) == LengthLimits(1, 16, "b")
    assert LengthLimits().narrowed(IdLimit(16, "b")) == LengthLimits(1, 16, "b")
