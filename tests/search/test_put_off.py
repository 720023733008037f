"""What is put off makes no difference: sets are ranked among the strategies that they would be ranked among."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fxpar.ir.strategy import Strategy
from fxpar.search.bounds import Intervals
from fxpar.search.driver import find_plan_of
from fxpar.search.known import KnownModel
from fxpar.search.lengths import length_edges, mini_batches, read_lengths
from fxpar.search.pricing import SetPricer
from fxpar.search.problem import Problem
from fxpar.search.put_off import Bound, PutOff
from fxpar.search.sets import PER_INTERVAL
from fxpar.search.space import shapes
from tests.search.shallow import shallow
from tests.search.test_floors import ANCHORS, CLUSTER, LAYERS, lowered

LONGEST = 2048
SHAPE = Strategy.parse("dp2.cp2.tp2+sp")
BATCHES = mini_batches(read_lengths(f"github:{LONGEST}"), 8192, 2)
FOUND = Intervals(length_edges(LONGEST), BATCHES)
PROBLEM = Problem((SHAPE,), CLUSTER, BATCHES, LONGEST, None, 2, shallow("stack", LAYERS).depth)
ZERO_3 = (SHAPE, 2)


def of(seconds: float) -> np.ndarray:
    return np.full(FOUND.tokens.shape, seconds)


def test_what_is_slower_than_six_does_not_rank():
    """With borders or without, for any lengths."""
    bound, known = Bound(of(3.0), of(3.0), 1.0), [of(2.0)] * PER_INTERVAL
    assert not bound.may_rank(known, [1.0] * PER_INTERVAL, FOUND)
    assert bound.may_rank(known[1:], [1.0] * (PER_INTERVAL - 1), FOUND)
    assert bound.may_rank(known, [3.0] * PER_INTERVAL, FOUND)  # with borders it may be the faster one
    some = of(3.0)
    some[:, 0, -1] = 2.0
    assert Bound(some, some, 1.0).may_rank(known, [1.0] * PER_INTERVAL, FOUND)
    assert not Bound(of(np.inf), of(np.inf), 0.0).may_rank([of(np.inf)] * PER_INTERVAL, [0.0] * PER_INTERVAL, FOUND)


def test_what_may_be_fastest_leads():
    """Of one mini-batch, for some lengths; also under another schedule."""
    assert not Bound(of(3.0), of(3.0), 0.0).may_lead([of(3.0)], of(3.0), FOUND)
    some = of(3.0)
    some[-1, 0, -1] = 2.9
    assert Bound(some, of(3.0), 0.0).may_lead([of(3.0)], of(3.0), FOUND)
    assert Bound(of(3.0), some, 0.0).may_lead([of(3.0)], of(3.0), FOUND)
    empty = np.where(FOUND.tokens == 0, 0.0, 3.0)
    assert (FOUND.tokens == 0).any()
    assert not Bound(empty, empty, 0.0).may_lead([of(3.0)], of(3.0), FOUND)


def put_off(seconds: float, problem: Problem = PROBLEM) -> tuple[PutOff, bool]:
    """ZeRO-3 of a strategy that others are as fast as, in so many seconds for any lengths."""
    known = SimpleNamespace(candidate=lambda strategy, said: lowered(strategy))
    pricer = SetPricer(CLUSTER, PROBLEM.depth, lambda strategy, layers: None, BATCHES, problem.memory_bytes)
    later = PutOff(problem, known, pricer, FOUND, lambda text: None)
    others = [lowered(SHAPE)] * PER_INTERVAL
    return later, later.put_off(ZERO_3, others, [of(seconds)] * PER_INTERVAL, of(seconds))


def test_it_waits_until_others_have_turned_out_to_take_longer():
    later, waits = put_off(1e-9)
    assert waits
    others = [lowered(SHAPE)] * PER_INTERVAL
    assert later.due(others, [of(1e-9)] * PER_INTERVAL) == []
    assert later.due(others, [of(1e9)] * PER_INTERVAL) == [ZERO_3]
    assert later.waiting == []


@pytest.mark.parametrize(
    ("seconds", "changes"),
    [(1e9, {}), (np.inf, {}), (1e-9, {"rules": True}), (1e-9, {"teams": True}), (1e-9, {"rounds": True})],
)
def test_it_does_not_wait(seconds, changes):
    """Where it may be fastest, where nothing is known to fit, and where searches start from all strategies."""
    later, waits = put_off(seconds, replace(PROBLEM, **changes))
    assert not waits
    assert later.waiting == []


def test_plans_are_those_of_a_search_that_puts_nothing_off(monkeypatch):
    """A device holds the longest sequence without saving memory, and no mini-batch."""
    rows, cluster = shallow("stack", LAYERS), CLUSTER.with_nodes(2, 2)
    known = KnownModel(rows.lower, rows.outlines, cluster, rows.depth, ANCHORS)
    held = known.candidate(Strategy.parse("dp4"), print).memory(LONGEST).peak_bytes
    given = replace(PROBLEM, shapes=tuple(shapes(4, 2, 1)), cluster=cluster, memory_bytes=held)
    found = find_plan_of(given, known)
    monkeypatch.setattr(PutOff, "put_off", lambda *_: False)
    whole = find_plan_of(given, known)
    assert found.plans == whole.plans
    assert found.best_static == whole.best_static
    assert found.lower_bound_s == whole.lower_bound_s
    assert found.evaluated < whole.evaluated
    assert found.pruned > whole.pruned
