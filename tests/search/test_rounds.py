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


def candidates(known, *names):
    return [known.candidate(Strategy.parse(name), str) for name in names]


@pytest.fixture(scope="module")
def pricer(known):
    return SetPricer(LINKS, known.depth, outlined, problem().batches[:1], MEMORY, switches=known.switches)


@pytest.mark.parametrize("names", [pytest.param(NAMES, marks=pytest.mark.nightly), NAMES[1:3]])
def test_no_other_teams_are_faster(pricer, known, names):
    """Every pair of a strategy of both ranks and one of each rank, planned with its borders."""
    mine = candidates(known, *names)
    found = best_rounds(mine, 512, pricer, known, str)
    assert found is not None
    options = _options(mine, 512, pricer)
    assert list(options) == [2, 1]
    for size, each in options.items():  # those that are slower hold more
        held = [pricer.budgets(one, [512 if size == 2 else 1])[0] for one in each]
        assert held == sorted(held)
    guessed = sorted(_guessed_s(pair, 512, pricer) for pair in itertools.product(*options.values()))
    assert found.priced.predicted_s <= 1.01 * guessed[0]  # settled: with exact tokens
    assert max(found.priced.memory_bytes.values()) <= MEMORY
    groups = length_groups({found.limit: found.text}, world=2, token_budget=found.token_budget)
    assert [str(group.strategy) for group in groups] == [group.strategy for group in found.priced.groups]


def test_the_widest_holds_the_longest_sequence(pricer, known):
    """Of others there are no rounds."""
    assert best_rounds(candidates(known, NAMES[1]), 512, pricer, known, str) is None
