"""Ranked sets against all of them."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxpar.search import sets
from fxpar.search.bounds import Intervals
from fxpar.search.sets import ranked_sets

EDGES = (8, 16, 32)
numbers = st.integers(0, 50).map(float)


@given(
    st.lists(st.lists(numbers, min_size=9, max_size=9), min_size=1, max_size=3),
    st.lists(numbers, min_size=3, max_size=3),
    st.sampled_from([None, "abc", "aab", "aaa"]),
)
def test_the_first_set_is_the_best_of_all(tables, borders, accumulators):
    found = Intervals(EDGES, ((1, 12, 30),))
    seconds = [np.where(found.inside, np.array(t).reshape(3, 3), np.inf)[None] for t in tables]
    borders = borders[: len(tables)]
    ranked = ranked_sets(seconds, borders, found, 3, accumulators)

    def guess(groups):
        first = {(accumulators or "abc")[s]: s for _, s in reversed(groups)}
        edges = [-1, *(edge for edge, _ in groups)]
        runs = sum(seconds[s][0, before + 1, edge] for before, (edge, s) in zip(edges, groups, strict=False))
        return runs + sum(borders[s] for s in first.values())

    every = []
    for count in (1, 2, 3):
        for limits in itertools.combinations((0, 1), count - 1):
            for names in itertools.product(range(len(tables)), repeat=count):
                every.append(guess(list(zip((*limits, 2), names, strict=True))))
    assert ranked[0].guess_s == min(every)
    assert all(one.least_s <= one.guess_s for one in ranked)
    assert len({one.groups for one in ranked}) == len(ranked)


def test_sets_that_run_the_same_tokens_are_one_kind():
    """No sequence has 9 to 16 tokens: a limit there makes no other set, and nor does a group of nothing else."""
    found = Intervals(EDGES, ((*[4] * 50, *[30] * 20),))
    fast, slow = (np.where(found.inside, each * found.tokens, np.inf) for each in (1.0, 1.5))
    ranked = ranked_sets([fast, slow], [0.0, 0.0], found, 3)
    kinds = [{(s, round(tokens)) for s, tokens in one.tokens if tokens} for one in ranked]
    first = [{(0, 800)}, {(0, 200), (1, 600)}, {(0, 600), (1, 200)}, {(1, 800)}]
    assert sorted(map(sorted, kinds[:4])) == sorted(map(sorted, first))
    assert kinds[0] == {(0, 800)}
    assert all(kind in first for kind in kinds)
    # A limit of 16 is that of sequences of up to 8, too: no group is of those from 9 to 16 alone.
    assert {edge for one in ranked for edge, _ in one.groups} == {0, 1, 2}
    assert not any(edge == 1 and before == 0 for one in ranked for (before, _), (edge, _) in pairwise(one.groups))
    assert len({one.groups for one in ranked}) == len(ranked)


def test_neighbours_of_one_strategy_are_one_group():
    found = Intervals(EDGES, ((1,),))
    seconds = [np.where(found.inside, 1.0, np.inf)[None]]
    assert [one.groups for one in ranked_sets(seconds, [0.0], found, 3)] == [((2, 0),)]


def test_what_never_fits_is_in_no_set():
    found = Intervals(EDGES, ((1, 12, 20),))
    short = np.where(found.inside & np.array([True, True, False]), 1.0, np.inf)[None]
    whole = np.where(found.inside, 9.0, np.inf)[None]
    ranked = ranked_sets([short, whole], [0.0, 0.0], found, 2)
    assert {one.groups for one in ranked} == {((0, 0), (2, 1)), ((1, 0), (2, 1)), ((2, 1),)}
    assert ranked_sets([short], [0.0], found, 2) == []


def test_strategies_that_share_gradients_have_one_border():
    found = Intervals(EDGES, ((1, 12, 20),))
    short = np.where(found.inside & np.array([True, False, False]), 1.0, np.inf)[None]
    whole = np.where(found.inside, 9.0, np.inf)[None]
    both = ((0, 0), (2, 1))
    for accumulators, guess in ((None, 1.0 + 9.0 + 5.0 + 3.0), ("ab", 18.0), ("aa", 1.0 + 9.0 + 5.0)):
        ranked = ranked_sets([short, whole], [5.0, 3.0], found, 2, accumulators)
        assert {one.groups: one.guess_s for one in ranked}[both] == guess


def test_no_more_sets_are_made_up_than_are_kept(monkeypatch):
    """They are those of all, some of which share out the tokens alike: few are as short as the first limits."""
    found = Intervals(tuple(range(1, 25)), (tuple(range(1, 25)) * 9,))
    speeds = np.array([1.0, 1.05, 1.1, 1.3])
    seconds = [np.where(found.inside, each * found.tokens + each * each, np.inf) for each in speeds]
    made, kind = [], sets._kind
    monkeypatch.setattr(sets, "_kind", lambda one, few: made.append(one) or kind(one, few))
    ranked, count = ranked_sets(seconds, [0.0] * 4, found, 3), len(made)

    def of_all(partial, few):
        held = [(guess, least, groups, dict(one.tokens), cell) for guess, least, groups, one, cell in partial]
        for *_, tokens, (strategy, more) in held:
            tokens[strategy] = tokens.get(strategy, 0.0) + more
        every = [sets.RankedSet(*rest, tuple(sorted(tokens.items()))) for *rest, tokens, _ in held]
        return sets._kinds_first(sorted(every), few, sets.KEPT // 2)[: sets.KEPT]

    monkeypatch.setattr(sets, "_kept", of_all)
    made.clear()
    assert ranked_sets(seconds, [0.0] * 4, found, 3) == ranked
    assert count < len(made) / 2
