"""Plans of all planners on random layouts: carried out they give the target, broken ones are caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ClusterError, LayoutError, NoOwnerError, PlannerError, SwitchPlanError
from fxpar.switch import ParamLayout, plan_switch
from fxpar.switch.planners import NAMES, PLAIN
from fxpar.switch.planners.simple import least_seconds
from tests.repeat import examples
from tests.switch.moving import carry_out, simple_layout, state_of, switches, whole_tensors

FOUR_BY_TWO = ClusterSpec(4, 2, 200, 25, 10)


def covered(sources: list[ParamLayout]) -> bool:
    """Sources may hold nothing of an element only if a piece of theirs is empty; here: every element has an owner."""
    whole = whole_tensors(sources[0])
    states = [state for layout in sources for state in state_of(layout, whole)]
    return all(torch.equal(torch.stack([s[fqn] for s in states]).amax(0), t) for fqn, t in whole.items())


@pytest.mark.parametrize("planner", NAMES)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_carried_out_on_real_tensors(planner, data):
    sources, target, cluster = data.draw(switches(extra=data.draw(st.booleans())))
    assert covered(sources)
    plan = plan_switch(sources[0], target, cluster, planner, sources[1:])
    plan.verify()
    whole = whole_tensors(target)
    for found, wanted in zip(carry_out(plan, sources, whole), state_of(target, whole), strict=True):
        for fqn in whole:
            assert torch.equal(found[fqn], wanted[fqn]), fqn
    assert plan.intra_node_bytes + plan.inter_node_bytes == plan.transfers["nbytes"].sum()
    node = cluster.node_of
    assert plan.intra_node_bytes == sum(m.nbytes for m in plan.moves() if node(m.src) == node(m.dst))


@settings(max_examples=examples(25))
@given(switch=switches())
def test_relays_never_cross_more(switch):
    """Between nodes relay sends each slice once per node that lacks it; an assignment cannot do with less."""
    (source, *_), target, cluster = switch
    relay, direct = (plan_switch(source, target, cluster, name) for name in ("relay", "hotspa"))
    problem, floor = relay.problem, 0
    for cls in problem.classes:
        for piece, size in enumerate(cls.nbytes):
            lacking = {int(problem.node_of[rank]) for rank in np.flatnonzero(cls.needed[piece])}
            having = {int(problem.node_of[rank]) for rank in np.flatnonzero(cls.held[piece])}
            floor += len(cls.members) * int(size) * len(lacking - having)
    assert relay.inter_node_bytes == floor <= direct.inter_node_bytes
    plain = [plan_switch(source, target, cluster, name) for name in PLAIN]
    assert all(least_seconds(problem) <= plan.predicted_s for plan in plain if len(plan.transfers))
    # What no plain plan can undercut is taken without a look at these.
    best = plan_switch(source, target, cluster)
    assert best.predicted_s == min(plan.predicted_s for plan in (direct, relay, *plain))


HOW = st.sampled_from(("drop", "twice", "source", "early", "bytes", "rank", "slice"))


@settings(max_examples=examples(25))
@given(switch=switches(), how=HOW, where=st.integers(0, 999))
def test_broken_plans_are_caught(switch, how, where):
    sources, target, cluster = switch
    plan = plan_switch(sources[0], target, cluster, "relay")
    table = plan.transfers.copy()
    if not len(table):
        return
    at = where % len(table)
    if how == "drop":
        table = np.delete(table, at)
    elif how == "twice":
        table = np.append(table, table[at : at + 1])
    elif how == "source":  # a rank that never holds the slice
        cls = plan.problem.classes[plan.problem.class_of[table["tensor"][at]]]
        piece = table["slice"][at]
        strangers = np.flatnonzero(~(cls.held[piece] | cls.needed[piece]))
        if not len(strangers):
            return
        table["src"][at] = strangers[0]
    elif how == "early":  # the relay sends before it has received
        relayed = np.flatnonzero(table["step"] == 1)
        if not len(relayed):
            return
        table["step"][relayed[where % len(relayed)]] = 0
    elif how == "bytes":
        table["nbytes"][at] += 1
    elif how == "rank":
        table["dst"][at] = plan.problem.world
    else:
        table["slice"][at] = 10_000
    with pytest.raises(SwitchPlanError):
        replace(plan, transfers=table).verify()


def test_error_names_tensor_box_and_rank():
    plan = plan_switch(simple_layout("a", "tp8@0"), simple_layout("b", "dp8"), FOUR_BY_TWO, "hotspa")
    rows = plan.transfers
    table = rows[(rows["tensor"] != 1) | (rows["dst"] != 5) | (rows["slice"] != 3)]
    with pytest.raises(SwitchPlanError, match=r"layers\.1\.weight\[3:4, 0:4\] on rank 5 is never written"):
        replace(plan, transfers=table).verify()


def test_fingerprint_follows_the_transfers():
    a, b = simple_layout("a", "dp2.tp4@0"), simple_layout("b", "dp8")
    plan = plan_switch(a, b, FOUR_BY_TWO, "hotspa")
    assert plan.fingerprint == plan_switch(a, b, FOUR_BY_TWO, "hotspa").fingerprint
    assert plan.fingerprint != plan_switch(a, b, FOUR_BY_TWO, "first_come").fingerprint
    changed = plan.transfers.copy()
    changed["src"][0] ^= 1
    assert replace(plan, transfers=changed).fingerprint != plan.fingerprint
    other = simple_layout("a", "dp2.tp4@0", tensors=4), simple_layout("b", "dp8", tensors=4)
    assert plan_switch(*other, FOUR_BY_TWO, "hotspa").fingerprint != plan.fingerprint


def test_retained_copies_are_sources():
    cut, whole = simple_layout("cut", "tp8@0"), simple_layout("whole", "dp8")
    assert plan_switch(cut, whole, FOUR_BY_TWO).inter_node_bytes > 0
    assert len(plan_switch(cut, whole, FOUR_BY_TWO, extra_holders=[whole]).transfers) == 0


def test_relay_enters_each_node_once():
    cut, whole = simple_layout("cut", "tp8@0", tensors=8), simple_layout("whole", "dp8", tensors=8)
    relay, direct = (plan_switch(cut, whole, FOUR_BY_TWO, name) for name in ("relay", "hotspa"))
    node_of, rows = relay.problem.node_of, relay.transfers
    entries = rows[node_of[rows["src"]] != node_of[rows["dst"]]]
    arrivals = np.stack([entries["tensor"], entries["slice"], node_of[entries["dst"]]])
    assert np.unique(arrivals, axis=1).shape[1] == len(entries)
    assert relay.inter_node_bytes * 2 == direct.inter_node_bytes
    assert relay.traffic.sent_between.max() * 8 == relay.inter_node_bytes  # perfectly even
    assert relay.traffic.received_between.max() * 8 == relay.inter_node_bytes


def test_relay_is_even_over_tensors_of_different_classes():
    """One tensor per class, so that only the shared counters can alternate the receivers."""
    cut, whole = ({}, {})
    for rows in (8, 16, 24, 32):
        for params, text in ((cut, "tp8@0"), (whole, "dp8")):
            params[f"w{rows}"] = simple_layout("x", text, (rows, 4)).params["layers.0.weight"]
    plan = plan_switch(ParamLayout("cut", 8, cut), ParamLayout("whole", 8, whole), FOUR_BY_TWO, "relay")
    received = plan.traffic.received_between
    assert received.max() - received.min() <= plan.transfers["nbytes"].max()
    sent = plan.traffic.sent_inside
    assert sent.max() - sent.min() <= 2 * plan.transfers["nbytes"].max()


def test_a_further_holder_need_not_have_all_tensors():
    """As of another task, with its own part of the model."""
    a, b = simple_layout("a", "tp8@0", tensors=3), simple_layout("b", "dp8", tensors=3)
    some = ParamLayout("some", 8, {"layers.1.weight": b.params["layers.1.weight"]})
    plan = plan_switch(a, b, FOUR_BY_TWO, extra_holders=[some])
    plan.verify()
    moved = {plan.problem.tensors[number] for number in plan.transfers["tensor"]}
    assert moved == {"layers.0.weight", "layers.2.weight"}


def test_bad_input():
    a, b = simple_layout("a", "tp8@0"), simple_layout("b", "dp8")
    with pytest.raises(PlannerError, match="did you mean 'relay'"):
        plan_switch(a, b, FOUR_BY_TWO, "relai")
    with pytest.raises(ClusterError, match="too small for strategies on 8 ranks"):
        plan_switch(a, b, ClusterSpec(1, 4, 1, 1, 1))
    with pytest.raises(LayoutError, match=r"'c': layers\.0\.weight is torch\.bfloat16 \[8, 8\]"):
        plan_switch(simple_layout("c", "tp8@0", (8, 8)), b, FOUR_BY_TWO)
    with pytest.raises(LayoutError, match=r"'a' *: *has no parameter 'layers\.3\.weight'"):
        plan_switch(a, simple_layout("b", "dp8", tensors=4), FOUR_BY_TWO)
    nobody = ParamLayout("nobody", 8, {fqn: replace(p, copies=()) for fqn, p in a.params.items()})
    with pytest.raises(NoOwnerError, match=r"layers\.0\.weight\[0:8, 0:4\] is needed on rank\(s\) 0, 1, 2, 3"):
        plan_switch(nobody, b, FOUR_BY_TWO)
    summed = replace(a.params["layers.0.weight"].copies[0], dims=((), ()), partial=(("tp", "sum"),))
    param = a.params["layers.0.weight"]
    with pytest.raises(LayoutError, match="partial sum"):
        ParamLayout("p", 8, {"w": replace(param, copies=(summed,))})
    with pytest.raises(LayoutError, match="ranks up to 7 of 4"):
        replace(a, world=4)
