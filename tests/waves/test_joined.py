"""Tasks that wait for their own ranks alone: against all orders on all ranks, and the waves they come from."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings

from fxpar.waves.joined import joined
from fxpar.waves.runs import Option, plan_runs
from tests.repeat import examples
from tests.waves.test_runs import DEVICES, tasks


def end_ms(order, devices=DEVICES):
    """Of (first rank, option) in this order, each as soon as its ranks are free."""
    free = [0.0] * devices
    for first, one in order:
        end = max(free[first : first + one.width]) + one.ms
        free[first : first + one.width] = [end] * one.width
    return max(free)


def least_ms(options):
    best = float("inf")
    for names in permutations(options):
        for chosen in product(*(options[name] for name in names)):
            moved = sum(one.moved_ms for one in chosen)
            for firsts in product(*(range(DEVICES - one.width + 1) for one in chosen)):
                best = min(best, moved + end_ms(zip(firsts, chosen, strict=True)))
    return best


@given(tasks)
@settings(max_examples=examples(15), deadline=None)
def test_no_order_is_shorter_by_much_and_no_waves_are(options):
    waves = plan_runs(options, DEVICES, 1.0)
    found = joined(waves, options)
    assert sorted(run.task for run in found.runs) == sorted(options)
    order = [(run.ranks[0], run.option) for run in found.runs]
    assert found.ms == pytest.approx(found.moved_ms + end_ms(order))
    assert least_ms(options) * (1 - 1e-9) <= found.ms <= waves.ms
    assert found.ms <= 1.15 * least_ms(options)


def test_a_task_begins_as_soon_as_its_own_ranks_are_free():
    """In waves one of the short tasks would wait for the long one: 9 + 4."""
    options = {"a": [Option(2, 9.0, "dp2")], "b": [Option(2, 4.0, "dp2")], "c": [Option(2, 6.0, "dp2")]}
    waves = plan_runs(options, 4, 19.0)
    found = joined(waves, options)
    assert (waves.ms, found.ms) == (13.0, 10.0)
    assert len(found.waves) == 1
    assert sorted(found.levels) == [0, 0, 1]


def test_tasks_on_all_ranks_are_waves_of_their_own():
    options = {"all": [Option(4, 1.0, "dp4")], "a": [Option(2, 9.0, "dp2")]}
    options |= {"b": [Option(2, 4.0, "dp2")], "c": [Option(2, 6.0, "dp2")]}
    found = joined(plan_runs(options, 4, 20.0), options)
    assert found.ms == 11.0
    assert sorted(len(wave) for wave in found.waves) == [1, 3]
