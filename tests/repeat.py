"""How often a property is tried: a few times on every run, often in `make test-nightly`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

# Examples of a Hypothesis property that does not say how many it needs, in the profiles of tests/conftest.py.
EVERY_RUN, NIGHTLY = 8, 800
_COUNTED_FOR = 40  # what the counts in the tests were measured beside


def examples(count: int) -> int:
    """`max_examples` of a property for which `count` are a good number: a fifth of it by day, twenty times at night."""
    return max(1, count * settings().max_examples // _COUNTED_FOR)


def crossed(*values: Sequence[Any]) -> list[Any]:
    """All combinations for `parametrize`. Every run has as many as the longest list: each value comes in one of them at
    least. The others are nightly.
    """
    longest = max(map(len, values))
    chosen = {tuple(i % len(each) for each in values) for i in range(longest)}
    every = itertools.product(*(range(len(each)) for each in values))
    return [
        pytest.param(
            *(each[i] for each, i in zip(values, places, strict=True)),
            marks=() if places in chosen else pytest.mark.nightly,
        )
        for places in every
    ]


def thinned(cases: Iterable[Any], every_run: Iterable[Any]) -> list[Any]:
    """The cases of `every_run`; the others are nightly. A case is a value, or a tuple of one per argument."""
    kept = list(every_run)
    cases = list(cases)
    assert all(case in cases for case in kept)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.nightly)
        for case in cases
    ]
