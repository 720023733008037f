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
    """Seconds by strategy, the names that stay in memory, and those that add to each other's gradients."""

    seconds: dict[str, float]
    resident: tuple[str, ...] = ("a", "b", "c", "d", "e")
    alike: str = ""

    def predicted_s(self, name: str, visited: Any = ()) -> float:
        return self.seconds[name]

    def pass_on(self, name: str, following: str) -> bool:
        return name in self.alike and following in self.alike


class Ahead(Predicted):
    """A switch behind others takes as many times longer."""

    def predicted_s(self, name: str, visited: Any = ()) -> float:
        return self.seconds[name] * (1 + len(visited) * (name != "a"))


APART: Any = Predicted({})


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
    transfer = schedule_of(("a", "b", "c"), resident, True, APART).transfer
    found = [transfer.index(GroupAction("switch", g + 1)) < transfer.index(GroupAction("reduce", g)) for g in (0, 1)]
    assert found == early


def test_one_group_overlaps_with_its_own_weights_and_gradients():
    plan = schedule_of(("a",), ("a",), True, APART)
    switch, run, reduce = (GroupAction(kind, 0) for kind in ("switch", "run", "reduce"))
    assert plan.fed_by == {run: switch, reduce: run}
    assert schedule_of(("a",), ("a",), False, APART).fed_by == {}


def test_gradients_that_lie_alike_leave_once():
    switching: Any = Predicted({"a": 1.0, "b": 1.0, "c": 1.0})
    gradients: Any = Predicted({"a": 2.0, "b": 2.0, "c": 2.0}, alike="ac")
    short = dict.fromkeys("abc", RunTime(0.5, 1))
    assert Borders(switching, gradients, overlap=False).fastest(("a", "b", "c"), short) == ("a", "c", "b")
    assert Borders(switching, gradients, overlap=False).exposed_s(("a", "c", "b"), short) == 3 * 1.0 + 2 * 2.0
    behind: Any = Ahead({"a": 1.0, "b": 1.0, "c": 1.0}, alike="bc")
    assert Borders(behind, behind, overlap=False).fastest(("a", "b", "c"), short) == ("a", "b", "c")
    assert Borders(behind, behind, overlap=False).fastest(("a", "b", "c"), short, every=True) == ("b", "c", "a")
    assert Borders(switching, gradients, overlap=True).fastest(("a", "b", "c"), short) in (
        ("a", "c", "b"),
        ("b", "a", "c"),
        ("b", "c", "a"),
        ("c", "a", "b"),
    )


def test_who_passes_gradients_on():
    def reduced(names: str, resident: str, overlap: bool, alike: str) -> list[int]:
        plan = schedule_of(tuple(names), tuple(resident), overlap, Predicted({}, alike=alike))
        return [action.group for action in plan.actions if action.kind == "reduce"]

    for overlap in (False, True):
        assert reduced("abc", "abc", overlap, "ab") == [1, 2]
        assert reduced("abc", "abc", overlap, "abc") == [2]
        assert reduced("abc", "abc", overlap, "ac") == [0, 1, 2]  # not side by side
        assert reduced("aab", "ab", overlap, "a") == [1, 2]  # two groups of one strategy
    # The weights of the next group are written over what the gradients may be views of, while they leave beside it.
    assert reduced("abc", "ac", True, "ab") == [0, 1, 2]
    assert reduced("abc", "ac", False, "ab") == [1, 2]


def test_groups_of_one_strategy_count_together():
    runs = [RunTime(1.0, 2), RunTime(4.0, 1), RunTime(2.5, 3)]
    assert by_strategy(["a", "b", "a"], runs) == {"a": RunTime(3.5, 5), "b": RunTime(4.0, 1)}
