"""Both streams of a mini-batch: what must come before what, and how much of the moving is exposed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import ScheduleDeadlockError
from fxpar.schedule import KINDS, Action, Costs, schedule
from fxpar.schedule.lanes import run_lanes
from fxpar.schedule.mini_batch import (
    Flow,
    GroupAction,
    blocking,
    in_waves,
    overlapped,
    pace_of,
    simulate_mini_batch,
    staged_bytes,
)

overwriting = st.lists(st.booleans(), min_size=1, max_size=6)


def of(kind, group):
    return GroupAction(kind, group)


@given(overwriting, st.data())
def test_any_durations_keep_the_order(overwrites, data):
    plan = overlapped(overwrites)
    groups = range(len(overwrites))
    assert sorted(plan.actions) == sorted(blocking(len(overwrites)).actions)
    seconds = {action: data.draw(st.floats(0, 9)) for action in plan.actions}
    found = simulate_mini_batch(plan, seconds)
    start = {action: span[0] for action, span in found.spans.items()}
    end = {action: span[1] for action, span in found.spans.items()}
    for group in groups:
        assert start[of("run", group)] >= end[of("switch", group)]
        assert start[of("reduce", group)] >= end[of("run", group)]
        if group:
            assert start[of("run", group)] >= end[of("run", group - 1)]
            # Sums do not depend on timing: gradients are added in the order of the groups.
            assert start[of("reduce", group)] >= end[of("reduce", group - 1)]
        if group >= 2:
            assert start[of("run", group)] >= end[of("reduce", group - 2)]
        if group and overwrites[group]:
            assert start[of("switch", group)] >= end[of("reduce", group - 1)]
    moving = sum(seconds[action] for action in plan.actions if action.kind != "run")
    assert found.makespan_s <= simulate_mini_batch(blocking(len(overwrites)), seconds).makespan_s + 1e-9
    assert -1e-9 <= found.exposed_s <= moving + 1e-9


def test_weights_of_a_wave_come_before_it_and_gradients_leave_behind_it():
    plan = in_waves([2, 1])
    assert [str(action) for action in plan.compute] == [
        *("switch 0", "switch 1", "run 0", "run 1", "reduce 0", "reduce 1"),
        *("switch 2", "run 2", "reduce 2"),
    ]
    assert not plan.transfer


def test_a_run_waits_for_what_comes_before_its_switch():
    """A replica without work takes no weights, and would be a group ahead with its gradients."""
    switch, run, reduce = ([of(kind, group) for group in range(3)] for kind in ("switch", "run", "reduce"))
    early, late = overlapped([False] * 3), overlapped([False, True, True])
    assert [early.needs[one] for one in run] == [(), (switch[0],), (reduce[0],)]
    assert [late.needs[one] for one in run] == [(), (reduce[0],), (reduce[1],)]


def test_what_is_exposed():
    """Long runs hide all but the first switch and the last reduction; blocking hides nothing."""
    seconds = {of(kind, g): {"run": 10.0}.get(kind, 1.0) for g in range(3) for kind in ("switch", "run", "reduce")}
    found = simulate_mini_batch(overlapped([False] * 3), seconds)
    assert (found.makespan_s, found.exposed_s) == (32.0, 2.0)
    assert found.spans[of("switch", 1)] == (1.0, 2.0)
    assert found.spans[of("reduce", 0)] == (11.0, 12.0)
    assert simulate_mini_batch(blocking(3), seconds).exposed_s == 6.0
    late = simulate_mini_batch(overlapped([False, True, False]), seconds)
    assert late.spans[of("switch", 1)] == (12.0, 13.0)
    assert late.exposed_s == 4.0


def test_a_run_begins_while_its_weights_come():
    """So late that it never waits: weights come in eight parts, and are used in the first seconds of the run."""
    plan, run = overlapped([False]), of("run", 0)
    seconds = {of("switch", 0): 8.0, run: 20.0, of("reduce", 0): 1.0}
    for used, begins in ((0.0, 8.0), (4.0, 4.5), (8.0, 1.0), (20.0, 1.0)):
        found = simulate_mini_batch(plan, seconds, {run: Flow(uses_s=used)})
        assert (found.spans[run], found.exposed_s) == ((begins, begins + 20.0), begins + 1.0)


def test_a_reduction_begins_while_its_gradients_are_made():
    """So late that it never waits: gradients are made in eight parts, in the last seconds of the run."""
    plan, run, reduce = overlapped([False]), of("run", 0), of("reduce", 0)
    seconds = {of("switch", 0): 1.0, run: 19.0, reduce: 8.0}
    for makes, begins in ((0.0, 20.0), (4.0, 16.5), (8.0, 13.0), (19.0, 13.0)):
        found = simulate_mini_batch(plan, seconds, {run: Flow(makes_s=makes)})
        assert (found.spans[reduce], found.exposed_s) == ((begins, begins + 8.0), begins + 8.0 - 19.0)


def test_a_micro_batch_uses_weights_in_its_forward_and_makes_gradients_in_its_backward():
    flow = Flow.of_run(12.0, 4)
    assert (flow.uses_s, flow.makes_s) == pytest.approx((1.0, 2.0))


@given(overwriting, st.data())
def test_what_flows_meanwhile_makes_nothing_slower(overwrites, data):
    plan = overlapped(overwrites)
    seconds = {action: data.draw(st.floats(0, 9)) for action in plan.actions}
    of_run = lambda run: st.floats(0, seconds[run])  # noqa: E731
    flows = {run: Flow(data.draw(of_run(run)), data.draw(of_run(run))) for run in plan.compute}
    found, whole = simulate_mini_batch(plan, seconds, flows), simulate_mini_batch(plan, seconds)
    assert found.makespan_s <= whole.makespan_s + 1e-9
    for action, feeding in plan.fed_by.items():
        begins, (begun, ended) = found.spans[action][0], found.spans[feeding]
        takes = flows[action].uses_s if action.kind == "run" else seconds[action]
        gives = ended - begun if action.kind == "run" else flows[feeding].makes_s
        assert begins >= max(begun, ended - min(takes, gives)) - 1e-9
        if action.kind == "run" and action.group >= 2:  # gradients of at most two groups
            assert begins >= found.spans[of("reduce", action.group - 2)][1]


@pytest.mark.parametrize(
    ("weights", "staged"),
    [(100, 200), (3 << 20, 4 << 20), (20 << 20, 10 << 20), (1 << 30, 64 << 20)],
)
def test_messages_need_two_buckets(weights, staged):
    """All both ways of little, an eighth of it twice of more, and never more than one may take."""
    assert staged_bytes(weights, 64 << 20) == staged


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 4))
def test_the_pace_of_a_pipeline_does_not_depend_on_its_micro_batches(kind, ranks, rounds):
    virtual = 2 if kind == "interleaved_1f1b" and ranks > 1 else 1
    few, many = (pace_of(schedule(kind, ranks, ranks * n, virtual=virtual)) for n in (1, rounds))
    assert (few.uses, few.makes, few.idle) == pytest.approx((many.uses, many.makes, many.idle))
    if virtual == 1:
        assert (few.uses, few.makes) == pytest.approx((1 / 3, 1 / 3 if kind == "zb_h1" else 2 / 3))


RANKS = 4  # of the pipelines below
Job = tuple[int, Action] | GroupAction


def whole_list(plan, groups, seconds):
    """When a mini-batch ends that runs every action of every stage: a lane per rank, and one for transfers. Of each
    group the schedule, and the seconds of one micro-batch.
    """
    lanes: dict[str, list[Job]] = {f"rank {r}": [] for r in range(RANKS)} | {"transfer": list(plan.transfer)}
    needs: dict[Job, list[tuple[Job, float]]] = defaultdict(list)
    took: dict[Job, float] = {action: seconds[action] for action in plan.transfer}
    before: list[Job] = []
    for number, (pipeline, each) in enumerate(groups):
        run, switch, reduce = (of(kind, number) for kind in ("run", "switch", "reduce"))
        costs, virtual = Costs(each / pipeline.virtual / 3, each / pipeline.virtual * 2 / 3), pipeline.virtual
        for rank, actions in enumerate(pipeline.actions):
            mine: list[Job] = [(number, action) for action in actions]
            lanes[f"rank {rank}"] += mine
            needs[mine[0]] += [(need, 0.0) for need in (*before, *plan.needs.get(run, ()))]
            for action in actions:
                took[number, action] = costs.of(action)
                needs[number, action] += [((number, need), 0.0) for need in pipeline.needs(action)]
            ends = {action.stage: action for action in actions if action.part in "BW"}
            for place, stage in enumerate(sorted(ends)):
                # Of a switch a stage gets its share; of two on a rank the first one's comes first, and leaves last.
                later, first = (virtual - 1 - place) / virtual, Action("F", stage, 0)
                part = min(seconds[switch] / virtual, costs.of(first)) * 7 / 8
                needs[number, first].append((switch, -seconds[switch] * later - part))
                part = min(seconds[reduce] / virtual, costs.of(ends[stage])) * 7 / 8
                needs[reduce].append(((number, ends[stage]), -seconds[reduce] * later - part))
        before = [lanes[f"rank {rank}"][-1] for rank in range(RANKS)]
    spans = run_lanes("all", lanes, took.__getitem__, needs.__getitem__)
    return max(end for _, end in spans.values())


@given(overwriting, st.data())
def test_of_pipelines_the_whole_list_ends_when_that_of_groups_does(overwrites, data):
    """A group ends where its last stage has told the others the loss: no rank is in two groups. So what bubbles hide is
    in the pace. Two stages on a rank use and make what they have in bursts, not evenly.
    """
    plan, groups, seconds, flows = overlapped(overwrites), [], {}, {}
    for number in range(len(overwrites)):
        kind = data.draw(st.sampled_from(sorted(KINDS)))
        virtual = 2 if kind == "interleaved_1f1b" and data.draw(st.booleans()) else 1
        pipeline, each = schedule(kind, RANKS, RANKS * data.draw(st.integers(1, 3)), virtual=virtual), 3.0
        pace = pace_of(pipeline)
        groups.append((pipeline, each))
        run = of("run", number)
        seconds[run] = each * (pipeline.micro_batches + pace.idle)
        seconds |= {of(kind, number): data.draw(st.floats(0, 40)) for kind in ("switch", "reduce")}
        flows[run] = Flow.of_run(seconds[run], pipeline.micro_batches, pace)
    whole, found = whole_list(plan, groups, seconds), simulate_mini_batch(plan, seconds, flows).makespan_s
    bursts = sum(one.virtual > 1 for one, _ in groups)
    assert found == pytest.approx(whole, rel=1e-9, abs=2 * bursts * 3.0)


def test_streams_that_wait_for_each_other_are_found():
    plan = overlapped([False, False])
    circle = {**plan.needs, of("switch", 0): (of("run", 1),)}
    broken = replace(plan, needs=circle)
    with pytest.raises(
        ScheduleDeadlockError, match="compute waits at run 0 for switch 0; transfer waits at switch 0 for run 1"
    ):
        simulate_mini_batch(broken, dict.fromkeys(plan.actions, 1.0))
