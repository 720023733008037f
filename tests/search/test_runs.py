"""How long micro-batches keep replicas busy."""

from __future__ import annotations

import pytest

from fxpar.batching import GroupPlan
from fxpar.batching.plan import MicroBatch
from fxpar.cost.group_cost import GroupCost, TeamsCost
from fxpar.search.runs import busy_s


def test_bubbles_and_idle_replicas_are_no_work():
    """Two stages; one replica has two micro-batches of 0.2 s, another one of 0.3 s."""
    cost, batch = GroupCost(0.1, 0.01, 0.0, stages=2), (10, 10, 15, 5)
    replicas = (MicroBatch((0,), 10), MicroBatch((1,), 10)), (MicroBatch((2, 3), 20),)
    took = cost.replica_s([[10], [10]])
    plan = GroupPlan(0, replicas, took)
    assert busy_s(cost, plan, batch) == pytest.approx((0.2 + 0.2 + 0.3) / 2)
    assert took == pytest.approx(0.6)
    assert busy_s(TeamsCost((cost, cost)), plan, batch) == took
