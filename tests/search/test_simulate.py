"""A named set is priced as the search prices its own."""

from __future__ import annotations

import pytest

from fxpar.errors import PlanOptionError, SequenceFitsNowhereError, SetDoesNotFitError
from fxpar.ir.strategy import Strategy
from fxpar.search.driver import find_plan
from fxpar.search.pricing import SetPricer
from fxpar.search.simulate import PLANNED, Named, simulate
from tests.search.test_driver import lowered, outlined, problem


def priced(*texts: str, memory_bytes: int | None = 5_000_000, tries: int = PLANNED):
    given = problem(memory_bytes)
    pricer = SetPricer(given.cluster, given.depth, outlined, given.batches, memory_bytes)
    return simulate([Named.parse(text) for text in texts], given.longest, lowered, pricer, tries=tries)


def test_the_set_that_a_search_finds_has_its_price():
    best = find_plan(problem(), lowered, outlined).plans[0]
    named = priced(*(f"{group.strategy}:{group.limit}" for group in best.groups))
    assert named.plan == best


def test_limits_are_chosen_where_none_is_named():
    found = find_plan(problem(None, strategies=3), lowered, outlined)
    free = priced("dp2", "cp2", "tp2+sp", memory_bytes=None)
    assert free.plan.predicted_s == pytest.approx(found.plans[0].predicted_s, rel=1e-9)
    for limit in (64, 128, 256):
        fixed = priced(f"dp2:{limit}", "cp2", memory_bytes=None)
        assert free.plan.predicted_s <= fixed.plan.predicted_s * (1 + 1e-9)


def test_no_choice_of_limits_is_worse_than_one_strategy_for_all():
    """However few choices are planned."""
    found = priced("dp2", "cp2", memory_bytes=None, tries=0)
    assert found.plan == found.best_static


def test_the_best_alone_is_of_the_set():
    found = priced("dp2:64", "cp2", memory_bytes=None)
    assert len({one.predicted_s for one in found.statics.values()}) == 2
    assert found.plan.strategies == ("dp2", "cp2")
    best = found.best_static
    assert best is not None
    assert best.predicted_s == min(one.predicted_s for one in found.statics.values())
    assert found.speedup == best.predicted_s / found.plan.predicted_s
    assert priced("cp2").speedup == 1.0


def test_a_strategy_with_its_limit():
    assert Named.parse("tp2+sp:96") == Named(Strategy.parse("tp2+sp"), 96)
    assert Named.parse("tp2") == Named(Strategy.parse("tp2"))
    ruled = "tp2[layers.{0-1}: +remat; head: cp2]"
    assert Named.parse(ruled) == Named(Strategy.parse(ruled))
    assert Named.parse(f"{ruled}:96") == Named(Strategy.parse(ruled), 96)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["dp2:many"], "write a number of tokens"),
        (["dp2:0"], "write a number of tokens"),
        (["dp2:" + 400 * "9"], "write a number of tokens from 1 to 1,073,741,824"),
        (["dp2", "cp2", "tp2+sp:64"], r"--strategy = dp2,cp2,tp2\+sp:64: give each strategy a limit, or none"),
        (["dp2:64", "cp2:64"], "same limit"),
        (["dp2:64", "cp2:128"], "--strategy = dp2:64,cp2:128: sequences have up to 512 tokens"),
    ],
)
def test_limits_that_do_not_fit_together(texts, why):
    with pytest.raises(PlanOptionError, match=why):
        priced(*texts)


def test_a_set_that_does_not_fit_with_its_limits():
    """Alone, the strategy would."""
    message = (
        r"4.20MB per device: tp2\+sp needs 4.5\dMB for a sequence of 512 tokens, 3.9\dMB without .* .\+zero3 shards"
    )
    with pytest.raises(SetDoesNotFitError, match=message):
        priced("dp2:64", "tp2+sp", memory_bytes=4_200_000)
    with pytest.raises(SetDoesNotFitError, match=r"dp2 needs .* of 512 tokens\. Take one that needs less"):
        priced("tp2+sp:64", "dp2", memory_bytes=4_200_000)
    with pytest.raises(SetDoesNotFitError, match=r"dp2 needs .* of 448 tokens\. Give it a lower limit"):
        priced("dp2:448", "tp2+sp", memory_bytes=4_600_000)


def test_a_set_that_holds_no_long_sequence():
    with pytest.raises(SequenceFitsNowhereError, match="512 tokens"):
        priced("dp2", "cp2", memory_bytes=1_000_000)
