"""What is not the same has another number."""

from __future__ import annotations

import pytest
import torch

from fxpar.ir.content import content

WIDTHS = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_signs_are_told_apart(dtype):
    """Only the highest bit of a word differs, twice."""
    one, other = torch.ones(64, dtype=dtype), torch.ones(64, dtype=dtype)
    one[[3, 40]] *= -1
    other[[5, 41]] *= -1
    assert len({int(content(value)) for value in (one, other, torch.ones(64, dtype=dtype))}) == 3


@pytest.mark.parametrize("dtype", WIDTHS)
def test_ones_at_other_places_are_told_apart(dtype):
    places = [0, 1, 512, 1024, 2048, 4095]
    found = {int(content(torch.zeros(4096, dtype=dtype).index_fill(0, torch.tensor(p), 1))) for p in places}
    assert len(found) == len(places)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_as_many_ones_with_the_same_sum_of_places_are_told_apart(dtype):
    pairs = ([1, 0, 0, 1], [0, 1, 1, 0]), ([1, 0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 1, 0, 1])
    for pair in pairs:
        one, other = (content(torch.tensor(values).to(dtype)) for values in pair)
        assert one != other
