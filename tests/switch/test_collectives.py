"""All-gathers and broadcasts found in plans."""

from __future__ import annotations

from dataclasses import replace

from fxpar.cost.cluster import ClusterSpec
from fxpar.switch import plan_switch
from fxpar.switch.collectives import find_collectives
from tests.switch.moving import simple_layout


def found(source: str, target: str, cluster: ClusterSpec, planner: str) -> list[tuple[str, int, tuple[int, ...], int]]:
    plan = plan_switch(simple_layout("a", source), simple_layout("b", target), cluster, planner)
    return [(c.kind, c.step, c.ranks, len(c.transfers)) for c in find_collectives(plan.problem, plan.transfers)]


ONE = ClusterSpec(1, 8, 200, 25, 10)


def test_all_gather_over_all_ranks_and_over_groups():
    assert found("tp8@0", "dp8", ONE, "hotspa") == [("all_gather", 0, tuple(range(8)), 3 * 8 * 7)]
    # Replicas gather each from its own ranks where these are the only ones on their node.
    apart = ClusterSpec(2, 4, 200, 25, 10)
    groups = found("dp2.tp4@0", "dp8", apart, "hotspa")
    assert groups == [("all_gather", 0, (0, 1, 2, 3), 3 * 4 * 3), ("all_gather", 0, (4, 5, 6, 7), 3 * 4 * 3)]


def test_broadcasts():
    whole = simple_layout("b", "dp8")
    one = simple_layout("a", "dp1")
    first = replace(one, world=8)
    plan = plan_switch(first, whole, ONE, "hotspa")
    (only,) = find_collectives(plan.problem, plan.transfers)
    assert (only.kind, only.ranks, only.nbytes) == ("broadcast", tuple(range(8)), 3 * 7 * 64)
    # Relayed: rank 0 serves its node and one door of the other; each door (one per tensor) serves the rest there.
    relayed = plan_switch(first, whole, ClusterSpec(2, 4, 200, 25, 10), "relay")
    steps = [(c.kind, c.step, c.ranks) for c in find_collectives(relayed.problem, relayed.transfers)]
    assert steps[:3] == [("broadcast", 0, (0, 1, 2, 3, door)) for door in (4, 5, 6)]
    assert steps[3:] == [("broadcast", 1, (4, 5, 6, 7))] * 3


def test_plain_transfers_are_none():
    assert found("tp8@0", "tp8@1", ONE, "hotspa") == []  # an all-to-all: every slice goes to one rank
    assert found("dp8", "tp8@0", ONE, "hotspa") == []  # nothing moves
