"""The table of what a rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.errors import MemoryBudgetError
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.store import home_layout, specs_of
from fxpar.store.memory import MemoryReport, choose_resident, memory_report
from tests.captured import llama


def report(arena_bytes: int) -> MemoryReport:
    return MemoryReport(0, 0, 0, arena_bytes, 0, 0, {"dp2": (1_000_000, False), "cp2": (1_000_000, False)})


def test_strategies_that_take_turns_save_a_copy():
    assert report(1_000_000).shared_bytes == 1_000_000
    assert "1.0 MB more if no bytes were shared" in report(1_000_000).table()


def test_no_size_is_0_that_is_none():
    table = MemoryReport(4_400, 0, 0, 1_200_000, 0, 0, {"dp2": (960, False)}).table()
    for size in ("4.4 kB", "1.2 MB", "960 B", "0 B"):
        assert size in table
    assert "0.0" not in table


def test_an_arena_padded_beyond_its_layouts_saves_nothing():
    assert report(2_000_064).shared_bytes == 0
    assert "-0.0" not in report(2_000_064).table()


def of_set(kept: tuple[str, ...], overlap: bool) -> MemoryReport:
    """Two strategies with weights of 10 bytes and accumulators of 3 each: in an arena, or resident."""
    return MemoryReport(0, 0, 10 * len(kept), 10 if len(kept) < 2 else 0, 6 if overlap else 3, 0, {})


@pytest.mark.parametrize(
    ("budget", "may", "expected"),
    [
        (None, True, (("dp2", "cp2"), True)),
        (26, True, (("dp2", "cp2"), True)),
        (25, False, (("dp2", "cp2"), False)),
        (25, True, ((), True)),  # both stay only if groups do not overlap
        (16, True, ((), True)),
        (15, True, ((), False)),
        (13, False, ((), False)),
    ],
)
def test_groups_overlap_where_there_is_room(budget, may, expected):
    programs = {"dp2": None, "cp2": None}
    assert choose_resident(programs, of_set, lambda kept: float(len(kept)), budget, may) == expected


def test_a_budget_that_is_missed_by_little_is_told_to_the_byte():
    """Rounded, both would be 7.3 MB."""

    def report(kept: tuple[str, ...], overlap: bool) -> MemoryReport:
        return MemoryReport(7_300_001, 0, 0, 0, 0, 0, {})

    with pytest.raises(
        MemoryBudgetError, match=r"at least 7,300,001 bytes per rank, but the budget is 7,300,000 bytes\."
    ):
        choose_resident({"dp2": None}, report, lambda kept: 0.0, 7_300_000)


def test_what_fits_in_no_way_says_the_least():
    with pytest.raises(MemoryBudgetError, match="13 B"):
        choose_resident({"dp2": None, "cp2": None}, of_set, lambda kept: 0.0, 12, True)


def test_gradients_of_tasks_that_share_a_rank_are_held_together():
    """Rank 1 runs two of three on parts of four ranks; a task on all ranks is alone."""
    logical = llama(layers=1).graph
    strategies = {"a": ("dp2", 0), "b": ("dp2", 1), "c": ("dp1", 3), "all": ("dp4", 0)}
    programs = {
        name: lower(logical, replace(Strategy.parse(text), offset=offset), for_store=True)
        for name, (text, offset) in strategies.items()
    }
    home = home_layout(specs_of(programs.values()), 4)
    one, two, joined = (
        memory_report(programs, home, [rank], joined=way).gradient_bytes
        for rank, way in ((1, False), (3, True), (1, True))
    )
    assert (two, joined) == (one, 2 * one)


def test_accumulators_that_groups_pass_on_are_held_once():
    """Beside what leaves meanwhile; not where weights take turns, and not where sums travel from graph to graph."""
    logical = llama(layers=1).graph
    programs = {text: lower(logical, text, for_store=True) for text in ("dp2", "dp2+remat")}
    home = home_layout(specs_of(programs.values()), 2)
    one = memory_report(programs, home, [0]).gradient_bytes
    for options, times in (({}, 1), ({"resident": ()}, 2), ({"chained": True}, 2)):
        assert memory_report(programs, home, [0], overlap=True, **options).gradient_bytes == times * one
