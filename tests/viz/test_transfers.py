"""A switch as JSON: all sums are the plan's, and what a rank gets and has is what it needs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given, settings

from fxpar.switch import plan_switch
from fxpar.viz import transfers
from fxpar.viz.mesh import parameter_kinds
from fxpar.viz.transfers import switch_json
from tests.repeat import examples
from tests.switch.moving import switches


def kinds_of(*layouts):
    return [kind.members for kind in parameter_kinds(layouts)]


def node_sums(plan, ranks):
    node = plan.problem.cluster.node_of
    sums = Counter()
    for src, dst, size in ranks:
        sums[node(src), node(dst)] += size
    return sums


@settings(max_examples=examples(6))
@given(switch=switches())
def test_matrices_add_up_to_the_plan(switch):
    (source, *_), target, cluster = switch
    plan = plan_switch(source, target, cluster)
    found = json.loads(json.dumps(switch_json(plan, kinds_of(source, target), "home")))
    wanted = Counter()
    for move in plan.moves():
        wanted[move.src, move.dst] += move.nbytes
    assert {(src, dst): size for src, dst, size in found["ranks"]} == wanted
    kinds = Counter()
    for kind in found["kinds"]:
        kinds.update({(src, dst): size for src, dst, size in kind["ranks"]})
        assert node_sums(plan, kind["ranks"]) == {(a, b): size for a, b, size in kind["nodes"]}
        assert kind["between_bytes"] == sum(size for a, b, size in kind["nodes"] if a != b)
        assert kind["inside_bytes"] == sum(size for a, b, size in kind["nodes"] if a == b)
    assert kinds == wanted
    assert {(a, b): size for a, b, size in found["nodes"]} == {
        (a, b): size for a, row in enumerate(plan.traffic.by_node.tolist()) for b, size in enumerate(row) if size
    }
    assert (found["inside_bytes"], found["between_bytes"]) == (plan.intra_node_bytes, plan.inter_node_bytes)
    assert found["local_bytes"] == sum(kind["local_bytes"] for kind in found["kinds"]) == plan.problem.local_bytes
    assert found["predicted_ms"] == 1e3 * plan.predicted_s
    assert (found["chosen"], found["from"], found["to"]) == (plan.chosen, "home", target.name)


@settings(max_examples=examples(6))
@given(switch=switches())
def test_a_rank_has_or_gets_each_slice_once(switch):
    (source, *_), target, cluster = switch
    plan = plan_switch(source, target, cluster)
    kinds = kinds_of(source, target)
    for kind, members in zip(switch_json(plan, kinds, "home")["kinds"], kinds, strict=True):
        numel = np.zeros(plan.problem.world, int)
        arrived = Counter((slice_, dst) for slice_, _, dst, _ in kind["moves"])
        arrived.update((slice_, rank) for rank, had in enumerate(kind["had"]) for slice_ in had)
        assert set(arrived.values()) <= {1}
        for slice_, rank in arrived:
            box = kind["slices"][slice_]
            numel[rank] += np.prod([stop - start for start, stop in zip(box[::2], box[1::2], strict=True)], dtype=int)
        param = target.params[members[0]]
        for rank in range(plan.problem.world):
            # Copies that share a rank may overlap there, so elements are counted one by one.
            covered = np.zeros(param.shape, bool)
            for dist in param.copies:
                for box in dist.boxes(rank, param.shape) if rank in dist.mesh else ():
                    covered[tuple(slice(start, stop) for start, stop in box)] = True
            assert numel[rank] == covered.sum()


@settings(max_examples=1)
@given(switch=switches())
def test_many_ranks_and_slices_are_summed_up(switch):
    (source, *_), target, cluster = switch
    plan, before = plan_switch(source, target, cluster), (transfers.MOST_RANKS, transfers.MOST_MOVES)
    try:
        transfers.MOST_RANKS, transfers.MOST_MOVES = 1, -1
        found = switch_json(plan, kinds_of(source, target), "home")
    finally:
        transfers.MOST_RANKS, transfers.MOST_MOVES = before
    assert found["ranks"] is None
    assert all(kind["moves"] is None and kind["ranks"] is None for kind in found["kinds"])
    assert sum(size for *_, size in found["nodes"]) == plan.intra_node_bytes + plan.inter_node_bytes
