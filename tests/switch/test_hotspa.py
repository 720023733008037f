"""Algorithm 1 against itself written down line by line, and what makes it better than the baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.switch import SwitchPlan, plan_switch
from tests.placements import moved
from tests.repeat import examples
from tests.switch.moving import simple_layout, switches


def algorithm_1(plan: SwitchPlan) -> set[tuple[int, int, int, int]]:
    """(tensor, slice, src, dst) by the published pseudo-code, one receiver at a time."""
    problem, found = plan.problem, set()
    node = problem.node_of
    intra, inter = np.zeros(problem.world, np.int64), np.zeros(problem.world, np.int64)
    for tensor in range(len(problem.tensors)):
        cls = problem.classes[problem.class_of[tensor]]
        for piece, size in enumerate(cls.nbytes):
            owners = np.flatnonzero(cls.held[piece])
            for dst in np.flatnonzero(cls.needed[piece]):
                if dst in owners:
                    continue
                local = [s for s in owners if node[s] == node[dst]]
                sent = intra if local else inter
                src = min(local or owners, key=lambda rank: sent[rank])  # the first of equals
                sent[src] += size
                found.add((tensor, piece, int(src), int(dst)))
    return found


@settings(max_examples=examples(40))
@given(switch=switches())
def test_decision_for_decision(switch):
    (source, *_), target, cluster = switch
    plan = plan_switch(source, target, cluster, "hotspa")
    made = plan.transfers[["tensor", "slice", "src", "dst"]].tolist()
    assert len(made) == len(set(made))
    assert set(made) == algorithm_1(plan)


@settings(max_examples=examples(25))
@given(switch=switches())
def test_no_assignment_undercuts_the_bound(switch):
    (source, *_), target, cluster = switch
    plan = plan_switch(source, target, cluster, "hotspa")
    inside, between = plan.lower_bounds
    assert plan.traffic.sent_inside.max() >= inside * (1 - 1e-9)
    assert plan.traffic.sent_between.max() >= between * (1 - 1e-9)


def test_bound_of_overlapping_holders():
    """Rank 0 and 1 may both send the first half, only rank 1 the second: 8 + 8 bytes leave 8 for each."""
    one, two = (DistConfig.replicated(Mesh((("dp", 1),), rank), 2) for rank in (1, 2))
    base = simple_layout("halves", "tp2@0", (2, 4), tensors=1)
    param = base.params["layers.0.weight"]
    source = replace(base, world=3, params={"w": replace(param, copies=(*param.copies, one))})
    target = replace(source, params={"w": replace(param, copies=(two,))})
    for devices, kind in ((4, 0), (1, 1)):
        plan = plan_switch(source, target, ClusterSpec(4, devices, 1, 1, 0), "hotspa")
        assert plan.lower_bounds[kind] == 8
        assert plan.max_send_bytes == 8
        assert plan.lower_bounds[1 - kind] == 0


def test_predicted_time():
    """8 tensors of 64 B, whole on both ranks of node 0, go to the two ranks of node 1."""
    base = simple_layout("before", "dp2", tensors=8)
    after = replace(
        base,
        name="after",
        world=4,
        params={f: replace(p, copies=(moved(p.copies[0], 2),)) for f, p in base.params.items()},
    )
    fast_inside = ClusterSpec(2, 2, intra_gb_per_s=100, inter_gb_per_s=1, latency_us=3)
    direct, relay = (plan_switch(base, after, fast_inside, name) for name in ("hotspa", "relay"))
    assert direct.predicted_s == (8 * 64) / 1e9 + 3e-6
    assert relay.predicted_s == (4 * 64) / 1e9 + (4 * 64) / 100e9 + 2 * 3e-6
    assert plan_switch(base, after, fast_inside).chosen == "hotspa"  # two latencies cost more than the bytes
    assert plan_switch(base, after, replace(fast_inside, latency_us=0)).chosen == "relay"
    capped = plan_switch(base, after, replace(fast_inside, latency_us=0, node_gb_per_s=0.5), "hotspa")
    assert capped.predicted_s == 2 * 8 * 64 / 0.5e9
    assert direct.to_json()["node_matrix"] == [[0, 1024], [0, 0]]
