"""Strategies for the teams of rounds: none of those that were priced makes mini-batches faster."""

from __future__ import annotations

import itertools

import pytest

from fxpar.batching import length_groups
from fxpar.ir.strategy import Strategy
from fxpar.search.pricing import SetPricer
from fxpar.search.rounds import _guessed_s, _options, best_rounds
from tests.search.test_driver import LINKS, lowered, outlined, problem

MEMORY = 5_000_000
NAMES = "dp2", "dp2+remat", "tp2+sp", "cp2+remat"


@pytest.fixture(scope="module")
def known():
    return problem().known(lowered, outlined)


@pytest.fixture(scope="module")
def candidates(known):
    return [known.candidate(Strategy.parse(name), str) for name in NAMES]


@pytest.fixture(scope="module")
def pricer(known):
    return SetPricer(LINKS, known.depth, outlined, problem().batches[:1], MEMORY, switches=known.switches)


def test_no_other_teams_are_faster(candidates, pricer, known):
    """Every pair of a strategy of both ranks and one of each rank, planned with its borders."""
    found = best_rounds(candidates, pricer, known, str)
    assert found is not None
    options = _options(candidates, pricer)
    assert set(options) == {2, 1}
    pairs = [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values())]
    guessed = sorted(_guessed_s(pair, pricer) for pair in pairs)
    assert len(set(guessed)) > 1
    assert found.priced.predicted_s == pytest.approx(guessed[0], rel=0.01)  # settled: with exact tokens
    assert max(found.priced.memory_bytes.values()) <= MEMORY
    groups = length_groups({found.limit: found.text}, world=2, token_budget=found.token_budget)
    assert [str(group.strategy) for group in groups] == [group.strategy for group in found.priced.groups]


def test_only_what_holds_the_longest_sequence_is_widest(candidates, pricer, known):
    """And of one size those that are slower hold more."""
    for size, options in _options(candidates, pricer).items():
        held = [pricer.budgets(one, [max(map(max, pricer.batches)) if size == 2 else 1])[0] for one in options]
        assert held == sorted(held)
    narrow = [one for one in candidates if one.strategy.replicas == 2]
    assert best_rounds(narrow, pricer, known, str) is None
