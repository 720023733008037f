"""Which tasks run side by side in a run: against all ways to put them in waves."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.waves.runs import MOST_TASKS, Option, least_bytes, needed_bytes, plan_runs
from tests.repeat import examples

DEVICES = 4
sizes = st.integers(0, 9).map(float)
option = st.builds(
    Option,
    st.integers(1, DEVICES),
    st.integers(1, 30).map(float),
    st.just("dp1"),
    moved_ms=sizes,
    held_bytes=sizes,
    active_bytes=sizes,
)
tasks = st.lists(
    st.lists(option, min_size=1, max_size=3),
    min_size=1,
    max_size=3,
).map(lambda found: {f"task {i}": one for i, one in enumerate(found)})


def least_ms(options, room=float("inf")):
    """Each task in a wave of its number, under each of its options that have room; inf if none have."""
    names, best = list(options), float("inf")
    for waves in product(range(len(names)), repeat=len(names)):
        for chosen in product(*options.values()):
            if max(one.held_bytes for one in chosen) + max(one.active_bytes for one in chosen) > room:
                continue
            sides = [[one for wave, one in zip(waves, chosen, strict=True) if wave == w] for w in set(waves)]
            if all(sum(one.width for one in side) <= DEVICES for side in sides):
                moved = sum(one.moved_ms for one in chosen)
                best = min(best, moved + sum(max(one.ms for one in side) for side in sides))
    return best


@given(tasks)
@settings(max_examples=examples(40), deadline=None)
def test_no_other_waves_are_shorter(options):
    plan = plan_runs(options, DEVICES, 1.0)
    assert plan.ms == pytest.approx(least_ms(options))
    assert sorted(run.task for run in plan.runs) == sorted(options)
    for wave in plan.waves:
        ranks = [rank for run in wave for rank in run.ranks]
        assert ranks == list(range(len(ranks)))  # each on ranks of its own
        assert len(ranks) <= DEVICES
        assert all(run.option in options[run.task] and len(run.ranks) == run.option.width for run in wave)


@given(tasks, st.integers(0, 20).map(float))
@settings(max_examples=examples(40), deadline=None)
def test_no_other_waves_with_as_much_room_are_shorter(options, room):
    plan, least = plan_runs(options, DEVICES, 1.0, room), least_ms(options, room)
    if plan is None:
        assert least == float("inf")
        assert least_bytes(options)[0] > room
        return
    assert plan.ms == pytest.approx(least)
    assert needed_bytes(plan.runs) <= room
    needed, _, _ = least_bytes(options)
    assert plan_runs(options, DEVICES, 1.0, needed) is not None
    assert plan_runs(options, DEVICES, 1.0, needed - 1) is None


def test_more_ranks_than_units_are_counted_in_units():
    """Three tasks beside each other on 192 ranks, four to a unit."""
    options = {f"{i}": [Option(width, 128.0 / width + i, f"dp{width}") for width in (1, 2, 64, 128)] for i in range(3)}
    plan = plan_runs(options, 192, 0.0)
    assert [[len(run.ranks) for run in wave] for wave in plan.waves] == [[64, 64, 64]]
    assert [run.ranks[0] for run in plan.runs] == [0, 64, 128]


def test_the_next_wave_waits_for_a_task_before_it():
    """A run lets tasks that follow each other run together unless they share a rank."""
    options = {f"{i}": [Option(2, 4.0, "dp2"), Option(1, 7.0, "dp1")] for i in range(3)}
    plan = plan_runs(options, 3, 12.0)
    assert [len(wave) for wave in plan.waves] == [3]
    assert plan.ms == 7.0
    shares = [{rank for run in wave for rank in run.ranks} for wave in plan_runs(options, 2, 12.0).waves]
    assert all(0 in one for one in shares)


def test_many_tasks_run_beside_those_that_take_as_long():
    count = MOST_TASKS + 2
    plan = plan_runs({f"{i}": [Option(1, 1.0 + i // 4, "dp1")] for i in range(count)}, 4, 0.0)
    assert plan.ms == pytest.approx(sum(1.0 + i for i in range(count // 4)))
