"""Strategies for the teams of rounds: none of those that were priced makes mini-batches faster."""

from __future__ import annotations

import itertools

import pytest

from fxpar.batching import length_groups
from fxpar.search.driver import _Search
from fxpar.search.rounds import _guessed_s, _options, best_rounds
from tests.search.test_driver import lowered, outlined, problem


@pytest.fixture(scope="module")
def search():
    given = problem()
    found = _Search(given, given.known(lowered, outlined), lambda _: None)
    found.lower_all()
    return found


def test_no_other_teams_are_faster(search):
    """Every pair of a strategy of both ranks and one of each rank, planned with its borders."""
    found = best_rounds(search.candidates, search.pricer, search.known, lambda _: None)
    assert found is not None
    options = _options(search.candidates, search.pricer)
    assert set(options) == {2, 1}
    pairs = [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values())]
    guessed = sorted(_guessed_s(pair, search.pricer) for pair in pairs)
    assert len(set(guessed)) > 1
    assert found.priced.predicted_s == pytest.approx(guessed[0], rel=0.01)  # settled: with exact tokens
    assert max(found.priced.memory_bytes.values()) <= search.problem.memory_bytes
    groups = length_groups({found.limit: found.text}, world=2, token_budget=found.token_budget)
    assert [str(group.strategy) for group in groups] == [group.strategy for group in found.priced.groups]


def test_only_what_holds_the_longest_sequence_is_widest(search):
    """And of one size those that are slower hold more."""
    for size, options in _options(search.candidates, search.pricer).items():
        held = [search.pricer.budgets(one, [512 if size == 2 else 1])[0] for one in options]
        assert held == sorted(held)
    narrow = [one for one in search.candidates if one.strategy.replicas == 2]
    assert best_rounds(narrow, search.pricer, search.known, lambda _: None) is None
