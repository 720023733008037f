"""Plans by turns: what all ranks work out, each for itself, is one right plan; and what is known without it is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import NoOwnerError, SwitchPlanError
from fxpar.store import ParamSpec, home_layout
from fxpar.switch import ParamLayout, SwitchPlan, plan_large_switch, plan_switch
from fxpar.switch.by_turns import SAMPLE, SwitchByTurns, sampled
from fxpar.switch.least import least_seconds, of_turns
from fxpar.switch.reduction import ReductionByTurns, ReductionPlan, plan_reduction
from fxpar.switch.transfers import TRANSFER
from tests.repeat import examples
from tests.switch.moving import carry_out, simple_layout, state_of, switches, whole_tensors
from tests.switch.test_reduction import carry_out as add_up
from tests.switch.test_reduction import home, partial, reductions

FOUR_BY_TWO = ClusterSpec(4, 2, 200, 25, 10)


def apart(layout: ParamLayout) -> ParamLayout:
    """Of copies that share a rank only the first: transports refuse the others."""

    def kept(param):
        one, *more = param.copies
        alone = all(set(one.mesh.ranks).isdisjoint(other.mesh.ranks) for other in more)
        return param if alone else replace(param, copies=(one,))

    return replace(layout, params={fqn: kept(param) for fqn, param in layout.params.items()})


def joined(plan) -> np.ndarray:
    """All transfers, from what each rank has; sender and receiver agree on each."""
    own = [plan.rows_of(rank) for rank in range(plan.problem.world)]
    assert all(((rows["src"] == rank) | (rows["dst"] == rank)).all() for rank, rows in enumerate(own))
    table = np.unique(np.concatenate(own))
    assert 2 * len(table) == sum(map(len, own))
    for rank, rows in enumerate(own):
        assert ((table["src"] == rank) | (table["dst"] == rank)).sum() == len(np.unique(rows)) == len(rows)
    return table


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_the_parts_of_all_ranks_are_a_right_plan(data):
    sources, target, cluster = data.draw(switches(extra=data.draw(st.booleans())))
    sources, target = [apart(layout) for layout in sources], apart(target)
    plan = plan_large_switch(sources[0], target, cluster, "turns", sources[1:])
    plan.verify()
    table = np.sort(joined(plan)[list(TRANSFER.names)].astype(TRANSFER), order=("step", "tensor", "slice", "dst"))
    whole_plan = SwitchPlan("turns", problem=plan.problem, transfers=table)
    whole_plan.verify()
    whole = whole_tensors(target)
    for found, wanted in zip(carry_out(whole_plan, sources, whole), state_of(target, whole), strict=True):
        assert all((found[fqn] == wanted[fqn]).all() for fqn in whole)
    assert plan.total_bytes == table["nbytes"].sum() == plan.intra_node_bytes + plan.inter_node_bytes
    assert plan.steps >= whole_plan.steps
    assert_bounded(plan, table)
    if plan.problem.world <= SAMPLE:  # then the sample is everybody
        assert plan.predicted_s == pytest.approx(whole_plan.predicted_s)
    if all(len(p.copies) == 1 for layout in (*sources, target) for p in layout.params.values()):
        assert plan.inter_node_bytes == whole_plan.inter_node_bytes
        assert of_turns(plan) <= whole_plan.predicted_s * (1 + 1e-9)
    best = plan_switch(sources[0], target, cluster, extra_holders=sources[1:])
    least_s = least_seconds(sources[0], target, cluster, sources[1:])
    assert least_s <= min(best.predicted_s, whole_plan.predicted_s) * (1 + 1e-9)


@pytest.mark.parametrize("listed", [True, False])
def test_where_all_links_are_full_a_switch_takes_no_longer_than_it_must(listed):
    a, b = (simple_layout(text, text, (2048, 4096)) for text in ("tp8@0", "dp4.tp2@1"))
    expected = plan_switch(a, b, FOUR_BY_TWO).predicted_s
    found = least_seconds(a, b, FOUR_BY_TWO) if listed else of_turns(plan_large_switch(a, b, FOUR_BY_TWO, "turns"))
    assert found == pytest.approx(expected, rel=1e-12)
    assert least_seconds(a, b, FOUR_BY_TWO, [b]) == 0.0


def assert_bounded(plan, table) -> None:
    """No rank gets more than `most` says, nor sends more of what is packed once."""
    for tensor in range(len(plan.problem.tensors)):
        for step in range(plan.steps):
            rows = table[(table["tensor"] == tensor) & (table["step"] == step)]
            got = np.bincount(rows["dst"], rows["nbytes"], plan.problem.world)
            packed = np.unique(rows[["src", "slice", "nbytes"]])
            sent = np.bincount(packed["src"], packed["nbytes"], plan.problem.world)
            assert (got + sent).max(initial=0) <= plan.most[tensor, step]


@settings(max_examples=examples(40), deadline=None)
@given(reductions())
def test_sums_too(case):
    sources, target, cluster = case
    target = apart(target)
    plan = plan_reduction(sources, target, cluster, planner="turns")
    assert isinstance(plan, ReductionByTurns)
    plan.verify()
    table = np.sort(joined(plan), order=("tensor", "slice", "dst", "term"))
    whole_plan = ReductionPlan(plan.terms, plan.sources, target, problem=plan.problem, transfers=table)
    whole_plan.verify()
    add_up(whole_plan, sources)
    assert plan.total_bytes == table["nbytes"].sum()
    assert_bounded(plan, table)
    if plan.problem.world <= SAMPLE:
        assert plan.predicted_s == pytest.approx(whole_plan.predicted_s)
    copies = [len(placed) for placed in sources.values()] + [len(param.copies) for param in target.params.values()]
    if max(copies) == 1:
        assert plan.inter_node_bytes == whole_plan.inter_node_bytes


def test_senders_and_doors_take_turns():
    """The fullest rank sends and receives little more than in a relayed plan, which counts."""
    at_home = home_layout([ParamSpec("w", (512, 256), simple_layout("", "dp8").params["layers.0.weight"].dtype)], 64)
    for text, dim in (("dp16.tp4@0", 0), ("dp32.tp2@1", 1), ("dp64", None)):
        target = simple_layout(text, text, (512, 256), 1)
        target = replace(target, params={"w": target.params["layers.0.weight"]})
        source = replace(at_home, params={"w": replace(at_home.params["w"], dtype=target.params["w"].dtype)})
        cluster = ClusterSpec(8, 8, 200, 25, 0)
        plan, relay = (plan_large_switch(source, target, cluster, name) for name in ("turns", "relay"))
        assert plan.inter_node_bytes == relay.inter_node_bytes, dim
        assert plan.predicted_s <= 1.25 * relay.predicted_s
        whole = SwitchPlan("turns", problem=plan.problem, transfers=joined(plan)[list(TRANSFER.names)].astype(TRANSFER))
        assert whole.predicted_s <= 1.25 * plan.predicted_s, "the sample is not far off"


def test_long_plans_are_by_turns():
    a, b = simple_layout("a", "tp8@0"), simple_layout("b", "dp8")
    count = len(plan_switch(a, b, FOUR_BY_TWO).transfers)
    assert count == 3 * 8 * 7
    assert isinstance(plan_large_switch(a, b, FOUR_BY_TWO), SwitchPlan)
    assert isinstance(plan_large_switch(a, b, FOUR_BY_TWO, listed=3 * 8 * 8), SwitchPlan)
    assert isinstance(plan_large_switch(a, b, FOUR_BY_TWO, listed=3 * 8 * 8 - 1), SwitchByTurns)
    assert isinstance(plan_large_switch(a, b, FOUR_BY_TWO, "relay", listed=0), SwitchPlan)


def test_the_cheapest_source_of_each_class():
    """What another layout has already, needs no message; what it has on each node, none between nodes."""
    cut, halves, whole = simple_layout("h", "tp8@0"), simple_layout("m", "dp4.tp2@0"), simple_layout("w", "dp8")
    assert plan_large_switch(cut, whole, FOUR_BY_TWO, "turns", [whole]).total_bytes == 0
    plan = plan_large_switch(cut, whole, FOUR_BY_TWO, "turns", [halves])
    assert plan.inter_node_bytes == 0
    assert plan.total_bytes == 3 * 8 * 32
    assert plan.chosen == "turns"


def test_fingerprints():
    a, b = simple_layout("a", "tp8@0"), simple_layout("b", "dp8")
    prints = {
        plan_large_switch(a, b, FOUR_BY_TWO, "turns").fingerprint,
        plan_large_switch(b, a, FOUR_BY_TWO, "turns").fingerprint,
        plan_large_switch(a, b, ClusterSpec(2, 4, 200, 25, 10), "turns").fingerprint,
        plan_large_switch(a, simple_layout("b", "dp4.tp2@1"), FOUR_BY_TWO, "turns").fingerprint,
    }
    assert len(prints) == 4
    again = simple_layout("a", "tp8@0"), simple_layout("b", "dp8")
    assert plan_large_switch(*again, FOUR_BY_TWO, "turns").fingerprint in prints


def test_a_sender_without_the_slice_is_caught():
    plan = plan_large_switch(simple_layout("a", "tp8@0"), simple_layout("b", "dp8"), FOUR_BY_TWO, "turns")
    (leg,), (cls,) = plan.legs, plan.problem.classes
    wrong = replace(cls, before=replace(cls.before, has=np.roll(cls.before.has, 1, 1)))
    rule = replace(leg.rule)
    rule.__dict__["_before"] = leg.rule._before  # as it was looked up before
    broken = replace(plan, legs=(replace(leg, rule=rule),))
    broken.verify()
    object.__setattr__(rule, "cls", wrong)
    with pytest.raises(SwitchPlanError, match="does not hold it in step 0"):
        replace(plan, legs=(replace(leg, rule=rule),)).verify()


def test_slices_without_an_owner():
    a, whole = simple_layout("a", "tp8@0"), simple_layout("w", "dp8")
    nobody = ParamLayout("nobody", 8, {fqn: replace(param, copies=()) for fqn, param in a.params.items()})
    with pytest.raises(NoOwnerError):
        plan_large_switch(nobody, whole, FOUR_BY_TWO, "turns")
    assert plan_large_switch(nobody, whole, FOUR_BY_TWO, "turns", [a]).total_bytes == 3 * 8 * 7 * 8


def test_empty_tensors():
    a, b = simple_layout("a", "dp8", (0, 4)), simple_layout("b", "dp8", (0, 4))
    assert plan_large_switch(a, b, FOUR_BY_TWO, "turns").total_bytes == 0


def test_the_sample():
    assert sampled(4096)[0] == 0
    assert sampled(4096)[-1] == 4095
    assert len(sampled(4096)) == SAMPLE
    assert sampled(3) == [0, 1, 2]


def test_plans_that_are_listed_are_as_before():
    case = simple_layout("a", "dp4.tp2@1"), simple_layout("b", "tp8@0")
    assert plan_large_switch(*case, FOUR_BY_TWO).fingerprint == plan_switch(*case, FOUR_BY_TWO).fingerprint
    sums = {"w0": partial()}, home(), FOUR_BY_TWO
    assert isinstance(plan_reduction(*sums), ReductionPlan)
    assert isinstance(plan_reduction(*sums, listed=8 * 4), ReductionPlan)
    assert isinstance(plan_reduction(*sums, listed=8 * 4 - 1), ReductionByTurns)
