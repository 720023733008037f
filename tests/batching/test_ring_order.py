"""Tokens of a row over a ring: each once, as many on every rank, and no rank with much more attention than the mean."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.batching.ring_order import Piece, ring_layout, ring_order


def unevenness(layout: list[list[Piece]]) -> float:
    """Load of the slowest rank against the mean: pairs of a query and a key that it sees, counted one by one."""
    loads = [sum(sum(range(p.begin + 1, p.end + 1)) for p in pieces) for pieces in layout]
    return max(loads) * len(loads) / sum(loads)


def in_order(lengths: list[int], degree: int) -> list[list[Piece]]:
    """Equal pieces of the row as it is."""
    share, begin, found = sum(lengths) // degree, 0, [[] for _ in range(degree)]
    for i, length in enumerate(lengths):
        for at in range(length):
            found[(begin + at) // share].append(Piece(i, at, at + 1))
        begin += length
    return found


def padded(lengths: list[int], degree: int) -> list[int]:
    missing = -sum(lengths) % degree
    return [*lengths, missing] if missing else lengths


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=30), st.integers(2, 9))
def test_each_token_once_and_as_many_on_each_rank(lengths: list[int], degree: int) -> None:
    """And the pieces of a document in its order on each rank, which kernels take together."""
    lengths = padded(lengths, degree)
    layout = ring_layout(lengths, degree)
    assert sorted(ring_order(lengths, degree)) == list(range(sum(lengths)))
    assert {sum(p.end - p.begin for p in pieces) for pieces in layout} == {sum(lengths) // degree}
    for pieces in layout:
        assert pieces == sorted(pieces, key=lambda p: (p.document, p.begin))


def rows(count: int, most: int, seed: int) -> list[list[int]]:
    """Rows of up to `most` tokens with lengths like those of Wikipedia: a median of 350, a mean of a thousand."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        row: list[int] = []
        while (length := min(most, 1 + int(rng.lognormvariate(5.85, 1.4)))) + sum(row) <= most:
            row.append(length)
        found.append(row)
    return found


@pytest.mark.parametrize("most", [16_384, 65_536])
def test_a_ring_of_eight_is_even(most: int) -> None:
    worst = max(unevenness(ring_layout(padded(row, 8), 8)) for row in rows(20, most, 1))
    assert worst <= 1.05


def test_a_row_as_it_is_would_not_be() -> None:
    """One document: the last rank has 15 of 8 parts, twice the mean almost."""
    assert unevenness(in_order([4096], 8)) == pytest.approx(1.87, abs=0.01)
    assert unevenness(ring_layout([4096], 8)) <= 1.001


def test_short_documents_lie_whole() -> None:
    """Nobody waits for their keys."""
    layout = ring_layout([4000, *[40] * 16], 8)
    assert all(len([p for p in pieces if p.document]) == 2 for pieces in layout)
    assert all([p.document for p in pieces].count(0) == 2 for pieces in layout)
