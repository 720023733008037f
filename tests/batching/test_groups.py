"""From `strategies={...}` to length groups: order, budgets, errors."""

from __future__ import annotations

import pytest

from fxpar.batching import LengthGroup, length_groups
from fxpar.errors import (
    LengthLimitError,
    NoStrategiesError,
    StrategiesTypeError,
    StrategySyntaxError,
    StrategyWorldsError,
    TokenBudgetError,
    UnknownBudgetError,
)
from fxpar.ir.strategy import Strategy

THREE = {32768: "cp4", 512: "dp4", 4096: Strategy.parse("dp2.tp2+sp")}


def test_sorted_by_limit():
    groups = length_groups(THREE, world=4)
    assert [(g.limit, str(g.strategy)) for g in groups] == [(512, "dp4"), (4096, "dp2.tp2+sp"), (32768, "cp4")]
    assert [g.replicas for g in groups] == [4, 2, 1]


def test_default_budget_is_equal_tokens_per_rank():
    groups = length_groups(THREE, world=4)
    assert [g.token_budget for g in groups] == [8192, 16384, 32768]


def test_default_budget_holds_the_limit():
    groups = length_groups({4000: "dp4", 5000: "tp4"}, world=4)
    assert [g.token_budget for g in groups] == [4000, 5000]


def test_stages_do_not_divide_the_default_budget():
    """Each rank of a pipeline holds a share of the layers, of as many micro-batches: as many tokens as without it."""
    groups = length_groups({512: "dp2.pp2", 1024: "dp2.tp2", 4096: "pp4"}, world=4)
    assert [g.token_budget for g in groups] == [4096, 8192, 4096]


def test_budget_for_all_or_by_limit():
    assert [g.token_budget for g in length_groups(THREE, world=4, token_budget=40_000)] == [40_000] * 3
    assert [g.token_budget for g in length_groups(THREE, world=4, token_budget={512: 700})] == [700, 16384, 32768]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("dp4", False), ("dp4+zero1", False), ("dp4+zero2", True), ("dp2.tp2+zero3", True), ("cp4+zero3", False)],
)
def test_lockstep_from_zero2_on(strategy, expected):
    assert LengthGroup(8, Strategy.parse(strategy), 8).lockstep is expected


def test_no_strategies():
    with pytest.raises(NoStrategiesError, match="at least one"):
        length_groups({}, world=4)


@pytest.mark.parametrize("limit", [0, -3, 2.5, "512", True, 2**30 + 1, 10**400])
def test_bad_limit(limit):
    with pytest.raises(LengthLimitError, match=r"key \S.*longest sequence.*from 1 to 1,073,741,824, such as"):
        length_groups({limit: "dp4"}, world=4)


def test_rounds_are_a_group_for_each_formation():
    """Each takes what its largest team holds, with as many tokens per rank."""
    groups = length_groups({100: "tp4", 800: "rounds(cp4)"}, world=4)
    assert [(g.limit, str(g.strategy), g.token_budget) for g in groups] == [
        (100, "tp4", 800),
        (200, "dp4", 200),
        (400, "dp2.cp2", 400),
        (400, "cp2 | dp2", 400),
        (800, "cp4", 800),
    ]
    assert [g.limit for g in length_groups({800: "rounds(cp4)"}, world=4, token_budget=2000)] == [500, 800, 800, 800]
    with pytest.raises(StrategyWorldsError):
        length_groups({800: "rounds(cp8)"}, world=4)


def test_unequal_worlds_name_every_size():
    with pytest.raises(StrategyWorldsError, match=r"all 4 ranks.*'dp4' .*uses 4.*'dp2.tp4' .*uses 8"):
        length_groups({8: "dp4", 16: "dp2.tp4"}, world=4)
    with pytest.raises(StrategyWorldsError, match=r"all 2 ranks.*, or the number of ranks$"):
        length_groups({8: "dp4"}, world=2)


@pytest.mark.parametrize("budget", [511, {4096: 4095}, 0, {512: 1000.0}, True])
def test_budget_below_the_limit(budget):
    with pytest.raises(TokenBudgetError, match="at least"):
        length_groups(THREE, world=4, token_budget=budget)


def test_budget_for_no_group():
    with pytest.raises(UnknownBudgetError, match=r"513.*512, 4096, 32768"):
        length_groups(THREE, world=4, token_budget={513: 1000})


def test_strategy_that_does_not_parse():
    with pytest.raises(StrategySyntaxError):
        length_groups({8: "dq4"}, world=4)


@pytest.mark.parametrize("given", ["dp2", ["dp2"], None, {8: 2}, {8: None}, {8: "dp2", 16: ("tp2",)}])
def test_strategies_are_a_mapping_to_strategies(given):
    with pytest.raises(StrategiesTypeError, match="Give a dict from the longest sequence"):
        length_groups(given, world=2)
