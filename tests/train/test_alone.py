"""A run of several strategies says where its own predictions find one of them alone to be faster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxpar.batching.groups import LengthGroup
from fxpar.batching.planner import plan_batch
from fxpar.cost.group_cost import GroupCost
from fxpar.ir.strategy import Strategy
from fxpar.train.alone import Faster, faster_alone

BATCHES = [[100, 60, 500], [40, 40, 300]]


def engine(border_s=0.0, merge=False, budget=64, multiple=1):
    """dp2 is half as dear per token as tp2, and takes sequences up to 64; a second strategy costs `border_s`."""
    groups = (LengthGroup(64, Strategy.parse("dp2"), budget), LengthGroup(512, Strategy.parse("tp2"), 512, multiple))
    return SimpleNamespace(
        names=("dp2", "tp2"),
        groups=groups,
        costs=(GroupCost(0.0, 1e-3, 0.0), GroupCost(0.0, 1e-3, 0.0)),
        options=SimpleNamespace(packed=True, merge=merge),
        border_seconds=lambda running, runs: border_s * (len(running) - 1),
    )


def test_a_dear_switch():
    """dp2 runs 60 tokens, then 40 and 40 side by side; tp2 the others, or all."""
    found = faster_alone(engine(border_s=1.0), BATCHES)
    assert (found.strategy, found.mini_batches) == ("tp2", 2)
    together, alone = 0.6 + 0.06 + 0.3 + 0.04 + 2 * 1.0, 0.66 + 0.38
    assert found.times == pytest.approx(together / alone)
    assert found.line().startswith("predicted: tp2 alone is 2.88 times as fast (the last 2 mini-batches")
    assert found.line().endswith("--compare tp2")


def test_several_are_faster_or_hardly_slower():
    assert faster_alone(engine(), BATCHES) is None
    assert faster_alone(engine(border_s=0.02), BATCHES) is None  # 1.04 against 1.04
    assert faster_alone(engine(border_s=1.0, merge=True), BATCHES) is None  # the planner has merged them


def test_a_strategy_that_would_need_larger_micro_batches_is_not_named():
    assert faster_alone(engine(border_s=1.0), [[60, 98, 497]]).strategy == "tp2"
    assert faster_alone(engine(border_s=1.0, multiple=7), [[60, 98, 497]]) is None  # 60 is no multiple
    found = faster_alone(engine(border_s=1.0, budget=512), BATCHES)
    assert found.strategy == "dp2"


def test_one_strategy_or_no_mini_batch():
    one = engine()
    one.names = ("tp2", "tp2")
    assert faster_alone(one, BATCHES) is None
    assert faster_alone(engine(border_s=1.0), []) is None


def test_the_prices_are_those_of_the_planner():
    of = engine(border_s=1.0)
    plans = [plan_batch(n, of.groups, of.costs, of.border_seconds, merge=False) for n in BATCHES]
    alone = faster_alone(of, BATCHES)
    assert sum(plan.predicted_s for plan in plans) == pytest.approx(alone.times * 1.04)


def test_the_line_can_be_pasted():
    """'>' between stages is a redirection in a shell."""
    assert Faster("tp2 > dp1", 1.2, 3).line().endswith("--compare 'tp2 > dp1'")
    assert Faster("dp4", 1.2, 3).line().endswith("--compare dp4")
