"""Sizes of mini-batches, on a small model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fxpar.errors import PlanOptionError
from fxpar.search.batch_size import RatedSize, near, rated_sizes, sizes, smallest_near
from fxpar.search.driver import find_plan
from fxpar.search.lengths import mini_batches
from tests.search.test_driver import LENGTHS, lowered, outlined, problem


def rated(tokens: int, tokens_per_s: float) -> RatedSize:
    given = replace(problem(), batches=((tokens,),))
    return RatedSize(tokens, given, SimpleNamespace(best=SimpleNamespace(predicted_s=tokens / tokens_per_s)))


def test_sizes_are_halved_as_long_as_they_hold_the_longest_sequence():
    assert sizes(512, 4096) == (4096, 2048, 1024, 512)
    assert sizes(500, 999) == (999,)
    assert len(sizes(1, 1 << 20)) == 6
    with pytest.raises(PlanOptionError, match="--max-tokens-per-step = 511: the longest sequence has 512 tokens"):
        sizes(512, 511)


def test_the_smallest_size_near_the_best_rate_is_taken():
    found = [rated(4096, 100.0), rated(2048, 99.0), rated(1024, 98.01), rated(512, 97.9)]
    assert [near(one, found) for one in found] == [True, True, True, False]
    assert smallest_near(found).tokens_per_step == 1024


def test_each_size_has_the_plan_of_a_search_for_it_alone():
    """Strategies are lowered once, for all sizes."""
    asked: list[str] = []

    def counted(strategy, layers):
        asked.append(str(strategy))
        return lowered(strategy, layers)

    def of_size(tokens):
        return replace(problem(None, strategies=1, names=("dp2", "cp2")), batches=mini_batches(LENGTHS, tokens, 2))

    found = rated_sizes((4096, 1024), of_size, counted, outlined)
    assert [one.tokens_per_step for one in found] == [4096, 1024]
    assert len(asked) == len(set(asked))
    for one in found:
        alone = find_plan(of_size(one.tokens_per_step), lowered, outlined)
        assert one.found.plans[0].predicted_s == pytest.approx(alone.plans[0].predicted_s, rel=1e-9)
        assert one.tokens_per_s == pytest.approx(one.problem.mean_tokens / alone.plans[0].predicted_s)


def test_it_stops_behind_the_first_size_that_loses():
    def of_size(tokens):
        return replace(problem(None, strategies=1, names=("dp2",)), batches=mini_batches(LENGTHS, tokens, 2))

    found = rated_sizes((4096, 512, 256), of_size, lowered, outlined)
    assert [one.tokens_per_step for one in found] == [4096, 512]
