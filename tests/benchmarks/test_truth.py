"""How `bench_truth.py` measures memory."""

from __future__ import annotations

import pytest

from fxpar.ir.strategy import Strategy

CASES = {
    "one after the other": ([(0, 8), (0, -8), (8, 4), (8, -4)], 8),
    "two at a time": ([(0, 8), (8, 4), (0, -8), (0, 6)], 12),
    "there before": ([(64, -8), (0, 8)], 0),
    "freed by another thread, the same place": ([(0, 8), (0, 8), (0, 8)], 8),
    "freed by another thread, larger than before": ([(0, 8), (8, 8), (4, 16)], 16),
    "freed by another thread, a part of its place": ([(0, 16), (32, 4), (4, 8)], 20),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_at_the_peak(script, name):
    """Memory that is given to a second tensor has been freed, though nobody said so."""
    events, expected = CASES[name]
    assert script("bench_truth").most_bytes(events) == expected


def test_strategies_are_of_its_ranks(script):
    bench = script("bench_truth")
    for text in (*bench.STRATEGIES, *bench.BY_MODULE):
        Strategy.parse(text, world=bench.WORLD)
