"""Schedules: valid, free of deadlocks, as idle as their formulas say; what is wrong is told."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import (
    MicroBatchCountError,
    ScheduleDeadlockError,
    ScheduleInvalidError,
    ScheduleMemoryError,
    ScheduleOptionError,
)
from fxpar.schedule import (
    KINDS,
    Action,
    Costs,
    Receive,
    Schedule,
    Send,
    Transfer,
    Wait,
    chart,
    schedule,
    simulate,
    with_transfers,
)


@st.composite
def schedules(draw) -> Schedule:
    kind = draw(st.sampled_from(sorted(KINDS)))
    stages = draw(st.integers(1, 6))
    if kind != "interleaved_1f1b":
        return schedule(kind, stages, draw(st.integers(1, 14)))
    return schedule(kind, stages, stages * draw(st.integers(1, 4)), virtual=draw(st.integers(1, 3)))


times = st.integers(1, 50)


def random_costs(draw_seed: int) -> Costs:
    """Another cost for every action and transfer, the same whenever asked."""
    return Costs(
        forward_ms=lambda a: 1 + hash((draw_seed, a.stage, a.micro_batch)) % 7,
        backward_ms=lambda a: 1 + hash((draw_seed, 1, a.stage, a.micro_batch)) % 11,
        input_ms=lambda a: 1 + hash((draw_seed, 2, a.stage, a.micro_batch)) % 5,
        weight_ms=lambda a: 1 + hash((draw_seed, 3, a.stage, a.micro_batch)) % 5,
        transfer_ms=lambda t: hash((draw_seed, 4, t.stage, t.micro_batch)) % 3,
    )


# ------------------------------------------------------------------------------------------------- properties
@given(schedules(), st.integers(0, 1000))
def test_runs_with_any_costs(plan, seed):
    """Every action runs once, after what it needs, one at a time per rank."""
    costs = random_costs(seed)
    timeline = simulate(plan, costs)
    ends = {span.action: span.end_ms for spans in timeline.spans for span in spans}
    assert len(ends) == sum(map(len, plan.actions))
    for spans in timeline.spans:
        for before, after in itertools.pairwise(spans):
            assert before.end_ms <= after.start_ms
        for span in spans:
            assert span.end_ms - span.start_ms == costs.of(span.action)
            assert all(ends[need] <= span.start_ms for need in plan.needs(span.action))
    assert timeline.makespan_ms == max(ends.values())
    assert 0.0 <= timeline.bubble_fraction < 1.0


@pytest.mark.parametrize(("early", "begins"), [(0.0, 5.0), (3.0, 2.0), (8.0, 0.0)])
def test_what_needs_nothing_of_the_stage_before_runs_in_front_of_the_wait(early, begins):
    """A tower of ten: what is left of it runs when the other one's features are there."""
    plan = schedule("zb_h1", 2, 1)
    costs = Costs(lambda a: (4.0, 10.0)[a.stage], 1.0, transfer_ms=1.0, early_ms=lambda a: a.stage * early)
    (one, other) = (spans[0] for spans in simulate(plan, costs).spans)
    assert (one.start_ms, one.end_ms) == (0.0, 4.0)
    assert (other.start_ms, other.end_ms) == (begins, begins + 10.0)


def idle_ms(plan: Schedule, forward_ms: float, backward_ms: float) -> float:
    """Of every rank, in closed form. With p ranks, f, b and w (half of b): gpipe and 1f1b (p-1)(f+b) (Narayanan et al.
    2021, 2.2.1); interleaved_1f1b the same with the costs of one of the stages of a rank (2.2.2); zb_h1 (p-1)(f+b-2w)
    (Qi et al. 2023, table 2) for f = b - w = w. With m < p micro-batches it has only m - 1 of the p - 1 weight parts to
    fill gaps with.
    """
    weight_ms = backward_ms / 2 if plan.kind == "zb_h1" else 0.0
    filled = (min(plan.ranks, plan.micro_batches) - 1) * weight_ms
    return (plan.ranks - 1) * (forward_ms + backward_ms - weight_ms) - filled


@given(schedules(), times, times)
def test_bubble_is_as_the_formula_says(plan, forward, backward):
    if plan.kind == "zb_h1":
        backward = 2 * forward  # the formula holds for three equal parts
    costs = Costs(float(forward), float(backward))
    timeline = simulate(plan, costs)
    idle, busy = idle_ms(plan, forward, backward), plan.micro_batches * plan.virtual * (forward + backward)
    assert timeline.makespan_ms == pytest.approx(idle + busy)
    assert timeline.bubble_fraction == pytest.approx(idle / (idle + busy))


@given(schedules())
def test_memory(plan):
    """1F1B keeps as many micro-batches as there are stages from here on; zb_h1 as many as 1F1B on its first rank."""
    ranks, micro_batches = plan.ranks, plan.micro_batches
    peak = simulate(plan).peak_saved_on_rank
    bounds = {
        "gpipe": lambda rank: micro_batches,
        "1f1b": lambda rank: min(ranks - rank, micro_batches),
        "zb_h1": lambda rank: min(ranks, micro_batches),
    }
    if plan.kind in bounds:
        assert peak == tuple(bounds[plan.kind](rank) for rank in range(ranks))
    elif plan.virtual > 1:
        most = [2 * (ranks - rank - 1) + (plan.virtual - 1) * ranks + 1 for rank in range(ranks)]
        assert peak == tuple(min(n, plan.virtual * micro_batches) for n in most)


def run_steps(plan: Schedule, ahead: int) -> int:
    """Ranks that block in waits, over channels that keep order and hand over what both sides have started: every rank
    comes to its end and finds the message that it waits for. Returns the number of messages.
    """
    steps = with_transfers(plan, ahead=ahead)
    assert [[s for s in rank if isinstance(s, Action)] for rank in steps] == [list(a) for a in plan.actions]
    sent: dict[tuple[int, int], list[Transfer]] = {}
    received: dict[tuple[int, int], list[Transfer]] = {}
    position = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(steps):
            while position[rank] < len(todo):
                step = todo[position[rank]]
                if isinstance(step, Send):
                    sent.setdefault((rank, plan.ranks_of(step.transfer.target)[0]), []).append(step.transfer)
                elif isinstance(step, Receive):
                    received.setdefault((plan.ranks_of(step.transfer.stage)[0], rank), []).append(step.transfer)
                elif isinstance(step, Wait):
                    channel = (plan.ranks_of(step.transfer.stage)[0], rank)
                    at = received[channel].index(step.transfer)
                    if len(sent.get(channel, [])) <= at:
                        break
                    assert sent[channel][at] == step.transfer
                position[rank] += 1
                moved = True
    assert position == [len(todo) for todo in steps]
    assert sent == received
    return sum(map(len, sent.values()))


@given(schedules(), st.integers(0, 3))
def test_transfers(plan, ahead):
    assert run_steps(plan, ahead) == (2 * (plan.stages - 1) * plan.micro_batches if plan.ranks > 1 else 0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_messages_needed_in_another_order(ahead):
    """Rank 1 takes the micro-batches the other way round: it posts the receive of what was sent first as well."""
    first = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    second = (Action("F", 1, 1), Action("F", 1, 0), Action("B", 1, 1), Action("B", 1, 0))
    plan = Schedule("by hand", 2, 2, (first, second))
    assert simulate(plan).peak_saved == (2, 2)
    assert run_steps(plan, ahead) == 4
    kinds = [str(step) for step in with_transfers(plan, ahead=ahead)[1]]
    assert kinds[:3] == ["receive activation 0 0->1", "receive activation 1 0->1", "wait activation 1 0->1"]


@given(st.integers(2, 4), st.integers(1, 4), st.sampled_from(["1f1b", "zb_h1"]), st.data())
def test_stages_that_share_ranks_run_in_one_order(stages, micro_batches, kind, data):
    """All ranks have their actions in the order of all, whatever ranks stages share; one micro-batch is kept."""
    ranks = data.draw(st.integers(1, 3))
    drawn = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(stages)]
    used = sorted(set().union(*drawn))
    places = tuple(tuple(sorted(used.index(rank) for rank in one)) for one in drawn)
    plan = schedule(kind, stages, micro_batches, places=places)
    order = [action for rank in plan.actions for action in rank]
    assert all(plan.actions[rank].count(action) == 1 for action in order for rank in plan.ranks_of(action.stage))
    timeline = simulate(plan)
    assert set(timeline.peak_saved) == {1}
    ends = {span.action: span.end_ms for done in timeline.spans for span in done}
    assert all(abs(span.end_ms - ends[span.action]) < 1e-9 for done in timeline.spans for span in done)
    every = [step for one in with_transfers(plan) for step in one]
    sent, received = ([str(s.transfer) for s in every if isinstance(s, what)] for what in (Send, Receive))
    assert set(sent) == set(received)
    assert len(set(sent)) == 2 * (stages - 1) * micro_batches


def test_ranks_of_a_stage_wait_for_each_other():
    """A stage may have collectives: its ranks run its actions in one order, or for ever."""
    first = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    with pytest.raises(ScheduleDeadlockError, match="rank 0 waits at F0@0"):
        simulate(Schedule("by hand", 2, 2, (first, (*first[2:], *first[:2])), places=((0, 1),)))
    with pytest.raises(ScheduleOptionError, match="'gpipe' runs no stages that share ranks"):
        schedule("gpipe", 2, 2, places=((0,), (0,)))


def test_receives_run_beside_computation():
    """A receive is posted one action early, so rank 1 of 1F1B waits for a value that is on its way."""
    first = with_transfers(schedule("1f1b", 2, 2))[1]
    assert [str(step) for step in first[:5]] == [
        "receive activation 0 0->1",
        "wait activation 0 0->1",
        "F0@1",
        "receive activation 1 0->1",
        "B0@1",
    ]


# ----------------------------------------------------------------------------------------------------- charts
def test_chart_of_1f1b():
    assert_expected_inline(
        chart(simulate(schedule("1f1b", 4, 5))),
        """\
rank 0  F0 F1 F2 F3 ..................B0=== F4 B1=== ...B2=== ...B3=== ...B4===
rank 1  ...F0 F1 F2 ............B0=== F3 B1=== F4 B2=== ...B3=== ...B4=== ......
rank 2  ......F0 F1 ......B0=== F2 B1=== F3 B2=== F4 B3=== ...B4=== ............
rank 3  .........F0 B0=== F1 B1=== F2 B2=== F3 B3=== F4 B4=== ..................
1f1b (4 ranks, 5 micro-batches): 24 ms, bubble 37.5%, most saved micro-batches by rank: 4, 3, 2, 1""",
    )


def test_chart_of_zero_bubble():
    assert_expected_inline(
        chart(simulate(schedule("zb_h1", 3, 4))),
        """\
rank 0  F0 F1 F2 ......I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1  ...F0 F1 ...I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2  ......F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
zb_h1 (3 ranks, 4 micro-batches): 14 ms, bubble 14.3%, most saved micro-batches by rank: 3, 3, 3""",
    )


def test_chart_of_interleaved():
    assert_expected_inline(
        chart(simulate(schedule("interleaved_1f1b", 2, 2, virtual=2))),
        """\
rank 0  F0a F1a F0b F1b ........B0b==== ....B1b==== B0a==== B1a====
rank 1  ....F0a F1a F0b B0b==== F1b B1b==== B0a==== B1a==== ........
interleaved_1f1b (2 ranks x 2 chunks, 2 micro-batches): 15 ms, bubble 20.0%, \
most saved micro-batches by rank, each of one stage: 4, 3""",
    )


@given(schedules(), st.integers(0, 99), st.integers(10, 300))
def test_chart_fits(plan, seed, columns):
    lines = chart(simulate(plan, random_costs(seed)), columns=columns).splitlines()
    assert len(lines) == plan.ranks + 1
    assert all(len(line) <= columns + len("rank 0  ") for line in lines[:-1])


# ---------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("1f2b", 2, 2), ScheduleOptionError, "did you mean '1f1b'"),
        (("1f1b", 0, 2), ScheduleOptionError, "stages is 0"),
        (("gpipe", 2, 0), ScheduleOptionError, "micro_batches is 0"),
        (("interleaved_1f1b", 4, 6), MicroBatchCountError, "into 8 micro-batches"),
        (("interleaved_1f1b", 4, 1), MicroBatchCountError, "into 4 micro-batches"),
    ],
)
def test_bad_options(arguments, error, words):
    with pytest.raises(error, match=words):
        schedule(*arguments)


def test_virtual_stages_are_for_interleaved():
    with pytest.raises(ScheduleOptionError, match="interleaved"):
        schedule("1f1b", 2, 4, virtual=2)


def changed(plan: Schedule, rank: int, actions: tuple[Action, ...]) -> Schedule:
    return replace(plan, actions=(*plan.actions[:rank], actions, *plan.actions[rank + 1 :]))


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (0, lambda a: a[1:], "F0@0 runs 0 times"),
        (0, lambda a: (*a, a[0]), "F0@0 runs 2 times"),
        (1, lambda a: a[:-1], "runs 0 times whole"),
        (1, lambda a: (*a, Action("W", 1, 0)), "1 times its weight part"),
        (1, lambda a: (*a, Action("F", 1, 9)), "no stage or micro-batch"),
        (1, lambda a: (*a, Action("F", 0, 0)), "its stage on 0"),
    ],
)
def test_incomplete_schedules(rank, change, words):
    plan = schedule("1f1b", 2, 3)
    with pytest.raises(ScheduleInvalidError, match=words):
        simulate(changed(plan, rank, change(plan.actions[rank])))


def test_deadlocks_are_found():
    plan = schedule("1f1b", 2, 2)
    backwards = tuple(sorted(plan.actions[0], key=lambda a: a.part))
    with pytest.raises(ScheduleDeadlockError, match="rank 0 waits at B0@0 for F0@0; rank 1 waits at F0@1 for F0@0"):
        simulate(changed(plan, 0, backwards))


def test_memory_limit():
    plan = schedule("gpipe", 2, 6)
    assert simulate(plan, limit=6).peak_saved == (6, 6)
    with pytest.raises(ScheduleMemoryError, match=r"up to 6 micro-batches on pipeline rank 0, the limit is 5"):
        simulate(plan, limit=5)
    with pytest.raises(ScheduleMemoryError, match="pipeline rank 1"):
        simulate(plan, limit=[6, 2])
