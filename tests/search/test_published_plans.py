"""A plan against single strategies, as `fxpar simulate hotspa-table3` holds one against HotSPa's."""

from __future__ import annotations

import pytest

from fxpar.errors import SequenceFitsNowhereError
from fxpar.ir.strategy import Strategy
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Problem
from fxpar.search.published_plans import Alone, hotspa_case
from fxpar.search.simulate import Named, simulate
from tests.search.test_driver import known, lowered, outlined, plan_of, problem


def alone_s(given: Problem, text: str) -> float:
    """Seconds of a strategy that runs everything, as a user asks for them."""
    pricer = SetPricer(given.cluster, given.depth, outlined, given.batches, given.memory_bytes)
    try:
        return simulate([Named.parse(text)], given.longest, lowered, pricer).plan.predicted_s
    except SequenceFitsNowhereError:
        return float("inf")


@pytest.mark.parametrize(
    ("memory_bytes", "best_of_space"), [(4_000_000, "tp2+sp"), (5_000_000, "dp2+remat(selective)")]
)
def test_a_plan_is_held_against_its_own_space_and_against_all(memory_bytes, best_of_space):
    """Layouts of dp, tp and pp, which may recompute; with less memory cp and ZeRO-3 are faster than all of them."""
    given = problem(memory_bytes, strategies=1)
    case = hotspa_case(given, known(given.cluster), Strategy.parse("tp2+sp"), Alone("published", "1.2.1", 1.0))
    assert case.predicted_s == plan_of(given).plans[0].predicted_s
    published, same, space, every = case.alone
    assert case.speedup(published) == 1.0 / case.predicted_s
    of_same = [alone_s(given, f"tp2+sp{more}") for more in ("", "+remat(selective|redo_comm)", "+remat")]
    of_dp = [alone_s(given, f"dp2{more}") for more in ("", "+remat(selective)", "+remat")]
    assert same.predicted_s == pytest.approx(min(of_same), rel=1e-9)
    assert (space.strategy, space.predicted_s) == (best_of_space, pytest.approx(min(of_same + of_dp), rel=1e-9))
    assert every.predicted_s == case.predicted_s <= space.predicted_s
