"""Random numbers by element number: the published vectors, any box of a tensor, and the distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fxpar.store.philox import fill, normal, philox, truncated_normal, uniform
from tests.repeat import examples

DRAWS = [uniform(-0.5, 2.0), normal(0.3, 0.02), truncated_normal(0.0, 0.02, -0.06, 0.06), truncated_normal(0, 1, 4, 9)]
# Random123, tests/kat_vectors, "philox4x32 10": counter, key, what comes out
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((a, b, c, d), key)) == want


def drawn(shape, box, draw, dtype=torch.float32, name="w"):
    target = torch.empty([stop - start for start, stop in box], dtype=dtype)
    fill(target, box, shape, name, draw)
    return target


@st.composite
def boxes(draw):
    sizes = st.lists(st.sampled_from((1, 2, 7, 40, 300)), min_size=0, max_size=3)
    shape = tuple(draw(sizes.filter(lambda found: math.prod(found) <= 100_000)))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, tuple((start, stop) for start, stop in ends)


@settings(max_examples=examples(60), deadline=None)
@given(case=boxes(), draw=st.sampled_from(DRAWS), dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_a_box_has_the_values_of_the_whole(case, draw, dtype):
    shape, box = case
    whole = drawn(shape, tuple((0, size) for size in shape), draw, dtype)
    assert torch.equal(drawn(shape, box, draw, dtype), whole[tuple(slice(*ends) for ends in box)])


def test_large_tensors_too():
    """More than one block of elements, and numbers above 2**32."""
    shape = (1 << 20, 1 << 14)
    ends = ((1 << 19, (1 << 19) + 3), (5, (1 << 14) - 2))
    rows = drawn(shape, ((1 << 19, (1 << 19) + 3), (0, 1 << 14)), normal(0, 1))
    assert torch.equal(drawn(shape, ends, normal(0, 1)), rows[:, 5:-2])
    assert not torch.equal(rows, drawn(shape, ((0, 3), (0, 1 << 14)), normal(0, 1)))
    assert not torch.equal(rows, drawn(shape, ((1 << 19, (1 << 19) + 3), (0, 1 << 14)), normal(0, 1), name="v"))


@pytest.mark.parametrize(
    ("draw", "known"),
    [
        (DRAWS[0], stats.uniform(-0.5, 2.5)),
        (DRAWS[1], stats.norm(0.3, 0.02)),
        (DRAWS[2], stats.truncnorm(-3, 3, 0, 0.02)),
        (DRAWS[3], stats.truncnorm(4, 9)),
        (truncated_normal(1.0, 2.0, -40.0, -5.0), stats.truncnorm(-20.5, -3, 1, 2)),
    ],
)
def test_distributions(draw, known):
    values = drawn((200, 1000), ((0, 200), (0, 1000)), draw, torch.float64).numpy()
    assert stats.kstest(values.ravel(), known.cdf).pvalue > 1e-3
    low, high = known.support()
    assert low <= values.min()
    assert values.max() <= high
    count = values.size
    assert abs(values.mean() - known.mean()) < 5 * known.std() / math.sqrt(count)
    assert abs(values.std() / known.std() - 1) < 0.02
    # Neighbours, along rows and columns, and another draw know nothing of each other.
    other = drawn((200, 1000), ((0, 200), (0, 1000)), draw, torch.float64, name="v").numpy()
    for a, b in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1]), (values, other)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(count)
