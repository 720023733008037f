"""The order in which overlapped groups run, from predictions alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fxpar.batching import RunTime
from fxpar.batching.borders import Borders, by_strategy, schedule_of
from fxpar.schedule.mini_batch import GroupAction, Pace


@dataclass
class Predicted:
    """Seconds by strategy, and the names that stay in memory."""

    seconds: dict[str, float]
    resident: tuple[str, ...] = ("a", "b", "c", "d", "e")

    def predicted_s(self, name: str, visited: Any = ()) -> float:
        return self.seconds[name]


def test_the_cheapest_first_switch_and_last_reduction_are_exposed():
    switching: Any = Predicted({"a": 3.0, "b": 1.0, "c": 2.0})
    gradients: Any = Predicted({"a": 1.0, "b": 2.0, "c": 3.0})
    long, borders = dict.fromkeys("abc", RunTime(100.0, 1)), Borders(switching, gradients, overlap=True)
    assert borders.fastest(("a", "b", "c"), long) == ("b", "c", "a")
    assert borders.fastest(("b", "c", "a"), long) == ("b", "c", "a")
    assert borders.exposed_s(("b", "c", "a"), long) == 1.0 + 1.0
    assert borders.exposed_s(("a", "b", "c"), long) == 3.0 + 3.0


def test_what_runs_shortly_hides_little():
    """switch a 3, run a 1 beside switch b 4, run b 1 beside reduce a 2, then reduce b 2: 2 of 12 seconds are runs."""
    switching: Any = Predicted({"a": 3.0, "b": 4.0})
    even: Any = Predicted({"a": 2.0, "b": 2.0})
    runs = {"a": RunTime(1.0, 1), "b": RunTime(1.0, 1)}
    assert Borders(switching, even, overlap=True).exposed_s(("a", "b"), runs) == (3.0 + 4.0 + 2.0 + 2.0) - 2.0
    assert Borders(switching, even, overlap=False).exposed_s(("a", "b"), runs) == 3.0 + 4.0 + 2.0 + 2.0
    # What is filled in the arena waits until the gradients before it have left.
    switching.resident = ("a",)
    runs = {"a": RunTime(1.0, 1), "b": RunTime(9.0, 1)}
    assert Borders(switching, even, overlap=True).exposed_s(("a", "b"), runs) == 3.0 + 2.0 + 4.0 + 2.0


def test_what_flows_is_hidden_by_the_run_itself():
    """All but an eighth of the first switch and of the last reduction, if the first forward and the last backward are
    as long; with many micro-batches they are shorter.
    """
    switching: Any = Predicted({"a": 8.0})
    even: Any = Predicted({"a": 16.0})
    for flowing, count, exposed in (
        ({}, 1, 24.0),
        ({"a": Pace()}, 1, 1.0 + 2.0),
        ({"a": Pace()}, 6, 24.0 - (4.0 + 8.0) * 7 / 8),
        ({"a": Pace(idle=3.0)}, 3, 24.0 - (4.0 + 8.0) * 7 / 8),  # in stages
    ):
        borders = Borders(switching, even, overlap=True, flowing=flowing)
        assert borders.exposed_s(("a",), {"a": RunTime(72.0, count)}) == exposed


def test_blocking_borders_leave_the_order():
    switching: Any = Predicted({"a": 3.0, "b": 1.0})
    assert Borders(switching, switching, overlap=False).fastest(("a", "b"), dict.fromkeys("ab", RunTime(9.0, 1))) == (
        "a",
        "b",
    )


def test_equal_orders_leave_what_was():
    even: Any = Predicted(dict.fromkeys("abc", 1.0))
    assert Borders(even, even, overlap=True).fastest(("c", "a", "b"), dict.fromkeys("abc", RunTime(9.0, 1))) == (
        "c",
        "a",
        "b",
    )


def test_many_strategies_keep_their_order():
    switching: Any = Predicted({"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0})
    borders = Borders(switching, switching, overlap=True)
    assert borders.fastest(tuple("abcde"), dict.fromkeys("abcde", RunTime(9.0, 1))) == tuple("abcde")


@pytest.mark.parametrize(
    ("resident", "early"),
    [(("a", "b", "c"), [True, True]), (("a", "b"), [True, False]), (("b", "c"), [False, False]), ((), [False, False])],
)
def test_only_what_stays_in_memory_is_filled_early(resident, early):
    """`early[i]`: the weights of group i + 1 come before the gradients of group i leave."""
    transfer = schedule_of(("a", "b", "c"), resident, overlap=True).transfer
    found = [transfer.index(GroupAction("switch", g + 1)) < transfer.index(GroupAction("reduce", g)) for g in (0, 1)]
    assert found == early


def test_one_group_overlaps_with_its_own_weights_and_gradients():
    plan = schedule_of(("a",), ("a",), overlap=True)
    switch, run, reduce = (GroupAction(kind, 0) for kind in ("switch", "run", "reduce"))
    assert plan.fed_by == {run: switch, reduce: run}
    assert schedule_of(("a",), ("a",), overlap=False).fed_by == {}


def test_groups_of_one_strategy_count_together():
    runs = [RunTime(1.0, 2), RunTime(4.0, 1), RunTime(2.5, 3)]
    assert by_strategy(["a", "b", "a"], runs) == {"a": RunTime(3.5, 5), "b": RunTime(4.0, 1)}
