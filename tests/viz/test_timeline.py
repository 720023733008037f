"""Steps as spans: nothing overlaps, sums are the planner's, pipelines run as their schedule does on paper."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from fxpar.cost.calls import node_costs
from fxpar.cost.group import group_cost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.runtime.pipeline import plan_pipeline
from fxpar.schedule import Costs, schedule, simulate
from fxpar.schedule.mini_batch import Pace, blocking, overlapped, pace_of
from fxpar.viz.inside import ACTION_PARTS, Inside, block_of
from fxpar.viz.step import Lane, Planned, StepGroup, predict_step
from fxpar.viz.timeline import predicted_step, timeline_section
from tests.captured import llama
from tests.viz.steps import CLUSTER, inside, planned, predicted, program, shown_step, step_groups, views


def lanes_of(timeline):
    for lane in range(len(timeline.lanes)):
        yield sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start_ms)


def test_borders_that_block_are_the_default():
    assert predicted(blocking(3)) == predicted()


def test_gradients_leave_once_where_groups_add_to_the_same():
    strategies = "dp2.tp2+sp", "dp2.tp2+sp+remat", "dp4+zero2"
    found = predicted_step(views(*strategies), {one: inside(one) for one in strategies})
    first, second, _ = found.groups
    assert first.reduce_bytes == 0 < second.reduce_bytes
    assert {span.group for span in found.spans if span.kind == "reduce"} == {1, 2}


@pytest.mark.parametrize("border_ms", [1e-3, 50.0])
def test_of_borders_beside_groups_the_waits_are_shown(border_ms):
    """The first switch and the last reduction at least; between them what a run is too short to hide."""
    groups = [replace(one, switch_ms=border_ms, reduce_ms=border_ms) for one in step_groups()]
    run_ms = [predict_step([replace(one, switch_ms=0.0, reduce_ms=0.0)], 4).end_ms for one in groups]
    found = predict_step(groups, 4, 0.125, overlapped([False] * 3))
    # On paper: transfers in the order s0 s1 r0 s2 r1 r2, each behind the run that it needs.
    end_0 = border_ms + run_ms[0]
    end_s1 = 2 * border_ms
    end_1 = max(end_0, end_s1) + run_ms[1]
    end_r0 = max(end_s1, end_0) + border_ms
    end_s2 = end_r0 + border_ms
    end_2 = max(end_1, end_s2) + run_ms[2]
    end_r2 = max(max(end_s2, end_1) + border_ms, end_2) + border_ms
    assert found.end_ms == pytest.approx(end_r2 + 0.125)
    waits = [sum(found.group_ms(g)[kind] for g in range(3)) for kind in ("switch", "reduce")]
    assert sum(waits) == pytest.approx(end_r2 - sum(run_ms))
    if border_ms < min(run_ms):
        assert waits == pytest.approx([border_ms, border_ms])
    for spans in lanes_of(found):
        for before, after in itertools.pairwise(spans):
            assert before.start_ms <= before.end_ms <= after.start_ms + 1e-9


def test_windows_of_groups_do_not_overlap_where_gradients_leave_late():
    groups = [replace(one, switch_ms=1.0, reduce_ms=500.0) for one in step_groups()]
    found = predict_step(groups, 4, 0.125, overlapped([False] * 3))
    windows = [found.group_window(number) for number in range(3)]
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(windows))
    assert all(begin < end for begin, end in windows)


def test_groups_begin_with_their_weights_and_end_with_their_gradients():
    """The actions of stages and the micro-batches of the others, each in its place, only closer together."""
    groups = [replace(one, switch_ms=1.0, reduce_ms=1.0) for one in step_groups()]
    paces = {one.group.strategy: Pace() for one in groups} | {"pp2.dp2": pace_of(schedule("1f1b", 2, 2))}
    whole, found = (predict_step(groups, 4, 0.125, overlapped([False] * 3), flowing) for flowing in (None, paces))
    first, last = (groups[number].group for number in (0, 2))
    took = {number: whole.group_ms(number)["run"] for number in (0, 2)}
    won = min(1.0, took[0] / 3 / first.slots) + min(1.0, took[2] * 2 / 3 / last.slots)
    assert won * 7 / 8 - 1e-9 <= whole.end_ms - found.end_ms < 1.2 * won  # between groups a bit more is hidden
    assert [(s.lane, s.kind, s.micro_batch, s.stage) for s in found.spans if s.stage >= 0] == [
        (s.lane, s.kind, s.micro_batch, s.stage) for s in whole.spans if s.stage >= 0
    ]
    for spans in lanes_of(found):
        assert all(before.end_ms <= after.start_ms + 1e-9 for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("which", ["predicted", "measured"])
def test_spans_of_a_lane_never_overlap(which):
    for spans in lanes_of(predicted() if which == "predicted" else shown_step().measured):
        assert spans
        for before, after in itertools.pairwise(spans):
            assert before.start_ms <= before.end_ms <= after.start_ms + 1e-9
        assert [s.group for s in spans] == [*sorted(s.group for s in spans[:-1]), -1]


@pytest.mark.parametrize("strategy", ["dp2.tp2+sp", "dp4+zero2", "cp4"])
def test_calls_add_up_to_the_cost_of_a_group(strategy):
    cost = group_cost(program(strategy), CLUSTER)
    total = sum((node.seconds for node in node_costs(program(strategy), CLUSTER)), Polynomial())
    assert (float(total.c0), float(total.c1), float(total.c2)) == (
        cost.fixed_s,
        cost.per_token_s,
        cost.per_square_s,
    )
    lengths = (100, 30)
    rows = inside(strategy).parts[0, "body"].rows
    assert sum(row.ms.at(lengths) for row in rows) == pytest.approx(1e3 * cost.seconds(lengths))
    assert inside(strategy).ms(0, "body", lengths) == pytest.approx(1e3 * cost.seconds(lengths))


def test_calls_of_a_pipeline_add_up_to_its_cost_but_for_messages():
    pipeline = program("pp2.dp2")
    cost = group_cost(pipeline, CLUSTER)
    lengths = (4096,)
    found = inside("pp2.dp2")
    busy = [
        sum(found.ms(s.index, part, lengths) for part in ("forward", "backward"))
        + sum(found.send_ms(s.index, what, lengths) for what in ("activation", "gradient"))
        for s in pipeline.stages
    ]
    assert max(busy) == pytest.approx(1e3 * cost.seconds(lengths))


def test_micro_batches_take_what_the_planner_predicts():
    timeline = predicted()
    cost = group_cost(program("dp2.tp2+sp"), CLUSTER)
    long, short = (next(i for i, lane in enumerate(timeline.lanes) if lane.replicas[0] == r) for r in (0, 1))
    for lane, expected in ((long, [(100, 20), (64,)]), (short, [(90,)])):
        mine = [s for s in timeline.spans if s.lane == lane and s.group == 0 and s.kind == "micro_batch"]
        assert [s.end_ms - s.start_ms for s in mine] == pytest.approx([1e3 * cost.seconds(n) for n in expected])
    times = timeline.group_ms(0)
    assert times["switch"] == 0.5
    assert times["reduce"] == 0.25
    start, end = timeline.group_window(0)
    assert end - start == pytest.approx(
        0.75 + 1e3 * (cost.seconds((100, 20)) + cost.seconds((64,))) + inside("dp2.tp2+sp").once_ms("epilogue")
    )


def test_pipeline_spans_are_those_of_the_schedule():
    timeline, found = predicted(), inside("pp2.dp2")
    replica = timeline.groups[1].micro_batches[0]

    def ms(action):
        return found.ms(action.stage, ACTION_PARTS[action.part], replica[action.micro_batch])

    def transfer_ms(transfer):
        return found.send_ms(transfer.stage, transfer.what, replica[transfer.micro_batch])

    costs = Costs(forward_ms=ms, backward_ms=ms, transfer_ms=transfer_ms)
    expected = simulate(plan_pipeline(program("pp2.dp2"), len(replica)), costs)
    begin = min(s.start_ms for s in timeline.spans if s.group == 1 and s.kind == "F")
    for position, rank in ((0, 0), (1, 2)):
        lane = next(i for i, one in enumerate(timeline.lanes) if rank in one.ranks)
        mine = [s for s in timeline.spans if (s.lane, s.group) == (lane, 1) and s.kind in ACTION_PARTS]
        assert [(s.kind, s.micro_batch, s.stage) for s in mine] == [
            (s.action.part, s.action.micro_batch, s.action.stage) for s in expected.spans[position]
        ]
        assert [s.start_ms - begin for s in mine] == pytest.approx([s.start_ms for s in expected.spans[position]])
        assert [s.end_ms - begin for s in mine] == pytest.approx([s.end_ms for s in expected.spans[position]])


def test_halves_of_a_backward():
    found = Inside(program("pp2.tp2+zb_h1"), CLUSTER)
    assert {name for _, name in found.parts} == {"prologue", "forward", "input_part", "weight_part", "epilogue"}


def test_lock_step_waits_for_the_slowest_replica():
    timeline = predicted()
    starts = {}
    for span in timeline.spans:
        if span.group == 2 and span.kind == "micro_batch":
            starts.setdefault(span.micro_batch, []).append(span)
    first, second = starts[0], starts[1]
    assert {s.start_ms for s in first} == {first[0].start_ms}
    assert len(first) == 3  # the fourth replica has nothing to do
    assert {s.start_ms for s in second} == {max(s.end_ms for s in first)}


def test_teams_in_step_wait_for_each_other():
    """Each position takes as long as the slowest replica of any team; ranks without a micro-batch have no span."""
    one = planned("cp2+zero3 | dp2+zero3", [[300], [40]], [[100], [120]], [], switch_ms=0.0)
    step = predict_step([one], 4, optimizer_ms=0.0)
    begins = {
        number: {span.start_ms for span in step.spans if span.kind == "micro_batch" and span.micro_batch == number}
        for number in (0, 1)
    }
    (first,), (second,) = begins.values()
    teams = one.inside.teams
    assert second - first == pytest.approx(max(teams[0].ms(0, "body", (300,)), teams[1].ms(0, "body", (100,))))
    ends = max(teams[0].ms(0, "body", (40,)), teams[1].ms(0, "body", (120,)))
    assert max(span.end_ms for span in step.spans if span.kind == "micro_batch") == pytest.approx(second + ends)
    assert [lane.replicas for lane in step.lanes] == [(0,), (1,), (2,)]


def test_groups_of_a_wave_run_at_the_same_time():
    """Two tasks on two ranks each, then one on all: a wave is as long as its slowest group, all ranks move."""
    first, second = (at_offset("dp2", offset, rows) for offset, rows in ((0, [[100], [100]]), (2, [[50], [50]])))
    last = planned("dp4+zero2", [[64]], [[64]], [[64]], [[64]])
    step = predict_step([first, second, last], 4, waves=(2, 1))
    assert [(lane.ranks, lane.replicas) for lane in step.lanes] == [((0, 1), (0, -1, 0)), ((2, 3), (-1, 0, 2))]
    spans = {n: [s for s in step.spans if s.group == n and s.kind == "micro_batch"] for n in range(3)}
    (long,), (short,), (after,) = ({(s.start_ms, s.end_ms) for s in spans[n]} for n in range(3))
    assert [[s.lane for s in spans[n]] for n in range(2)] == [[0], [1]]
    assert long[0] == pytest.approx(short[0])
    assert long[0] >= 2 * 0.5  # weights of both tasks come before
    assert after[0] >= long[1] + 2 * 0.25 + 0.5
    assert step.group_ms(1)["run"] == pytest.approx(short[1] - short[0], rel=0.5)
    assert step.group_ms(1)["switch"] == pytest.approx(0.5)
    whole = predict_step([first, second, last], 4)  # one after the other
    assert step.end_ms < whole.end_ms


def test_of_a_wave_a_group_waits_for_its_own_ranks():
    """The third one begins when the second one has ended, on the ranks of both; the first one goes on beside it."""
    long, short = at_offset("dp2", 0, [[400], [400]]), at_offset("dp2", 2, [[50], [50]])
    step = predict_step([long, short, short], 4, waves=(3,))
    (first,), (second,), (third,) = (
        {(s.start_ms, s.end_ms) for s in step.spans if s.group == n and s.kind == "micro_batch"} for n in range(3)
    )
    assert second[0] == pytest.approx(first[0])
    assert second[1] <= third[0] < first[1]
    assert [lane.replicas for lane in step.lanes] == [(0, -1, -1), (-1, 0, 0)]


def at_offset(strategy, offset, replicas):
    whole = replace(Strategy.parse(strategy), offset=offset)
    program = lower(llama(layers=2).graph, whole, for_store=True)
    group = StepGroup("≤ 512", str(whole), tuple((tuple(lengths),) for lengths in replicas))
    return Planned(group, Inside(program, CLUSTER), 0.5, 0.25)


def test_equal_ranks_share_a_lane():
    section = timeline_section(views("dp2.tp2+sp", "pp2.dp2"))
    lanes = section["steps"][0]["timelines"][0]["lanes"]
    assert [lane["name"] for lane in lanes] == ["ranks 0-1", "ranks 2-3"]
    assert str(Lane((0, 1, 4, 7), ())) == "ranks 0-1,4,7"
    assert str(Lane(tuple(range(0, 64, 2)), ())) == "ranks 0.. (32)"


def test_section_of_views():
    section = timeline_section(views())
    (step,) = section["steps"]
    assert [group["strategy"] for group in step["groups"]] == ["dp2.tp2+sp", "pp2.dp2", "dp4+zero2"]
    assert step["groups"][0]["replicas"] == [[[256, 256 * 256, 1]] * 6] * 2  # its two rows are fixed in the graph
    (timeline,) = step["timelines"]
    assert timeline["source"] == "predicted"
    assert timeline["groups"][0]["switch"] > 0 < timeline["groups"][0]["reduce"]
    assert timeline["optimizer"] > 0
    assert len(section["inside"]["pp2.dp2"]["stages"]) == 2
    assert set(section["inside"]["pp2.dp2"]["stages"][0]) == {"forward", "backward"}
    assert "TFLOP/s" in section["assumed"][0]
    assert json.loads(json.dumps(section, allow_nan=False)) == section
    assert timeline_section([]) is None


def test_strategies_are_compared_at_equal_tokens():
    """Micro-batches are added to those that have fewer replicas, or ranks."""
    section = timeline_section(views("dp4", "dp2.tp2+sp", "pp2.tp2", micro_batches=2))
    (step,) = section["steps"]
    assert [group["tokens"] for group in step["groups"]] == [4 * 2 * 2 * 256] * 3  # of two rows each
    assert [len(group["replicas"][0]) for group in step["groups"]] == [2, 4, 8]
    for group, times in zip(step["groups"], step["timelines"][0]["groups"], strict=True):
        begin, end = times["window"]
        assert times["tokens_per_s"] == pytest.approx(1e3 * group["tokens"] / (end - begin))
    apart = timeline_section(views("dp4", "tp2", micro_batches=1))["steps"]
    assert [group["tokens"] for step in apart for group in step["groups"]] == [2048, 2048]


def test_strategies_on_other_numbers_of_ranks_get_steps_of_their_own():
    section = timeline_section(views("dp2.tp2+sp", "tp2"))
    assert [step["title"] for step in section["steps"]] == ["A step under dp2.tp2+sp", "A step under tp2"]


def test_measured_beside_predicted():
    section = timeline_section(views(), [shown_step()])
    (step,) = section["steps"]
    predicted_json, measured = step["timelines"]
    assert (predicted_json["source"], measured["source"]) == ("predicted", "measured")
    assert [lane["name"] for lane in measured["lanes"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for one, two in zip(predicted_json["groups"], measured["groups"], strict=True):
        assert two["run"] == pytest.approx(2 * one["run"])


def test_more_lanes_than_are_shown(monkeypatch):
    monkeypatch.setattr("fxpar.viz.timeline.MOST_LANES", 3)
    section = timeline_section(views(), [shown_step()])
    measured = section["steps"][0]["timelines"][1]
    assert (len(measured["lanes"]), measured["hidden_lanes"]) == (3, 1)
    assert {span[0] for span in measured["spans"]} == {0, 1, 2}


def test_a_group_without_switch_has_no_such_span():
    assert not [s for s in predicted().spans if s.group == 1 and s.kind == "switch"]
    assert planned("dp2.tp2+sp", [[8]], [[8]]).group.tokens == 16


@pytest.mark.parametrize(
    ("fqn", "depth", "block"),
    [
        ("layers.3.attention.q_proj", 2, "layers.3.attention"),
        ("model.layers.3.mlp.up", 1, "model.layers.3"),
        ("model.embed.table.x", 2, "model.embed"),
        ("", 2, ""),
    ],
)
def test_blocks(fqn, depth, block):
    assert block_of(fqn, depth) == block
