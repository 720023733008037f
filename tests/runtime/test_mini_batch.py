"""The order in which overlapped groups run, from predictions alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from fxpar.runtime.mini_batch import fastest_order, schedule_of
from fxpar.schedule.mini_batch import GroupAction


@dataclass
class Predicted:
    """Seconds by strategy, and the names that stay in memory."""

    seconds: dict[str, float]
    resident: tuple[str, ...] = ("a", "b", "c", "d", "e")

    def predicted_s(self, name: str, visited: Any = ()) -> float:
        return self.seconds[name]

    @property
    def schedule(self) -> Any:
        return SimpleNamespace(resident=self.resident)


def test_the_cheapest_first_switch_and_last_reduction_are_exposed():
    switching: Any = Predicted({"a": 3.0, "b": 1.0, "c": 2.0})
    gradients: Any = Predicted({"a": 1.0, "b": 2.0, "c": 3.0})
    long = dict.fromkeys("abc", 100.0)
    assert fastest_order(("a", "b", "c"), long, switching, gradients) == ("b", "c", "a")
    assert fastest_order(("b", "c", "a"), long, switching, gradients) == ("b", "c", "a")


def test_equal_orders_leave_what_was():
    even: Any = Predicted(dict.fromkeys("abc", 1.0))
    assert fastest_order(("c", "a", "b"), dict.fromkeys("abc", 9.0), even, even) == ("c", "a", "b")


def test_many_strategies_keep_their_order():
    switching: Any = Predicted({"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0})
    assert fastest_order(tuple("abcde"), dict.fromkeys("abcde", 9.0), switching, switching) == tuple("abcde")


@pytest.mark.parametrize(
    ("resident", "early"),
    [(("a", "b", "c"), [True, True]), (("a", "b"), [True, False]), (("b", "c"), [False, False]), ((), [False, False])],
)
def test_only_what_stays_in_memory_is_filled_early(resident, early):
    """`early[i]`: the weights of group i + 1 come before the gradients of group i leave."""
    transfer = schedule_of(("a", "b", "c"), resident, overlap=True).transfer
    found = [transfer.index(GroupAction("switch", g + 1)) < transfer.index(GroupAction("reduce", g)) for g in (0, 1)]
    assert found == early


def test_one_group_has_nothing_to_overlap_with():
    assert schedule_of(("a",), ("a",), overlap=True).transfer == ()
