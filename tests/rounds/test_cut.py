"""Cuts: estimates of rounds, and the best cuts by them."""

from __future__ import annotations

import itertools

import numpy as np

from fxpar.rounds.cut import cuts, estimated, grid, rounds_of, times
from fxpar.rounds.fill import best_filled
from fxpar.rounds.layouts import all_layouts
from fxpar.rounds.work import Kinds, Work, longest_ms
from tests.rounds.plain import drawn, some


def a_batch() -> Work:
    return Work.of(drawn(150, 3900, seed=1), 16, 8, some(1, 2, 4, 8))


def test_estimates_are_close_to_rounds_that_are_filled():
    work, layouts = a_batch(), all_layouts(16, (8, 4, 2, 1), 8)
    places = grid(work)
    table = estimated(work, places)
    off = []
    for first, last in itertools.combinations(range(0, len(places), 3), 2):
        teams = best_filled(work, np.arange(places[first], places[last]), layouts, 4)
        if teams:
            off.append(table[first, last] / longest_ms(teams[0]) - 1)
    assert len(off) > 8
    assert np.median(np.abs(off)) < 0.08


def test_more_tokens_than_there_is_room_for_are_no_round():
    work = Work.of([900] * 12, 8, 8, some(1))
    places = np.array([0, 4, 8, 12])
    assert np.isinf(estimated(work, places)[0, 3])
    assert np.isfinite(estimated(work, places)[0, 2])


def test_the_best_cuts_by_estimate_are_found():
    """Against all cuts of the grid into up to three rounds."""
    work = a_batch()
    places = grid(work)
    table, last = estimated(work, places), len(places) - 1
    every = {}
    for count in range(3):
        for inner in itertools.combinations(range(1, last), count):
            at = (0, *inner, last)
            every[tuple(int(places[one]) for one in at)] = sum(table[a, b] for a, b in itertools.pairwise(at))
    found = cuts(work, 3, 4)
    assert every[found[0]] == min(every.values())
    for count in (2, 3):
        mine = [every[one] for one in found if len(one) == count + 1]
        best = sorted(value for one, value in every.items() if len(one) == count + 1)
        assert mine == [value for value in best[:4] if value <= 1.1 * min(every.values())]
    assert rounds_of(found[0])[0][0] == 0
    assert rounds_of(found[0])[-1][1] == 150


def test_sums_over_kinds_are_those_over_sequences():
    work = a_batch()
    kinds, places = Kinds.of(work), grid(work)
    found = kinds.between(kinds.lengths[None], places)[0]
    for a, b in itertools.combinations(range(len(places)), 2):
        assert found[a, b] == work.lengths[places[a] : places[b]].sum()


def test_times_begin_where_a_long_sequence_becomes_possible():
    work = a_batch()
    spans = times(work)
    assert (np.diff(spans) > 0).all()
    alone = work.fixed[0] + work.ms[0, 0]
    assert spans[np.searchsorted(spans, alone)] <= alone * (1 + 1e-8)
