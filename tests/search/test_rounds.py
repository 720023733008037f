"""Strategies for the teams of rounds: none of those that were priced makes mini-batches faster."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fxpar.batching import length_groups
from fxpar.cli.plan import ROUNDS, _choices, _rounds, _rounds_json
from fxpar.ir.strategy import Strategy
from fxpar.search.chosen import PlannedFor
from fxpar.search.plan_file import parse_plan
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Found
from fxpar.search.rounds import _guessed_s, _may_be_team, _options, best_rounds
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


@pytest.fixture(scope="module")
def teams(pricer, known):
    return functools.cache(lambda names: best_rounds(candidates(known, *names), 512, pricer, known, str))


@pytest.mark.parametrize("names", [pytest.param(NAMES, marks=pytest.mark.nightly), NAMES[1:3]])
def test_no_other_teams_are_faster(pricer, known, teams, names):
    """Every pair of a strategy of both ranks and one of each rank, planned with its borders."""
    mine = candidates(known, *names)
    found = teams(names)
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


def test_rounds_that_take_less_than_the_best_set_are_the_plan(teams):
    """In the same memory; else the set is."""
    rounds = teams(NAMES[1:3])
    least = rounds.priced.predicted_s
    for times, better in ((1.25, True), (1.0, False), (0.8, False)):
        best = replace(rounds.priced, groups=rounds.priced.groups[:1], predicted_s=times * least)
        unused = {"evaluated": 2, "pruned": 0, "planned_sets": 1, "refused": {}, "search_cpu_s": 0.0}
        found = Found((best,), best, 0.9 * least, least, times * least, rounds=rounds, **unused)
        plan = PlannedFor("llama", 2, 2048, (), 0, MEMORY).plan(found, found.best)
        assert parse_plan(plan.to_toml(), "p").strategies == plan.strategies
        assert plan.memory_budget_bytes == MEMORY - rounds.priced.optimizer_bytes
        assert plan.predicted_s == min(1.0, times) * least >= plan.lower_bound_s
        names, sets = _choices(found, 1)
        assert (found.rounds_win, sets[0] is rounds.priced, ROUNDS in names) == (better,) * 3
        assert ("20.0% less than plan 1" in _rounds(found)) == better == _rounds_json(found, rounds)["better"]
        if better:
            assert (plan.strategies, plan.token_budgets) == ({512: rounds.text}, {512: rounds.token_budget})
            assert plan.groups[0].seconds == pytest.approx(sum(group.seconds for group in rounds.priced.groups))
        else:
            assert len(plan.groups) == 1
            assert plan.strategies[best.groups[0].limit] == best.groups[0].strategy


@pytest.mark.parametrize(("name", "may"), [("dp2.pp2", True), ("pp2", True), ("dp2+zero1", False), ("rows2", False)])
def test_teams_are_what_takes_the_same_on_ranks_of_its_own(name, may):
    assert _may_be_team(SimpleNamespace(strategy=Strategy.parse(name))) == may


def test_the_widest_holds_the_longest_sequence(pricer, known):
    """Of others there are no rounds."""
    assert best_rounds(candidates(known, NAMES[1]), 512, pricer, known, str) is None
