"""The table of what a rank holds."""

from __future__ import annotations

from fxpar.store.memory import MemoryReport


def report(arena_bytes: int) -> MemoryReport:
    return MemoryReport(0, 0, 0, arena_bytes, 0, 0, {"dp2": (1_000_000, False), "cp2": (1_000_000, False)})


def test_strategies_that_take_turns_save_a_copy():
    assert report(1_000_000).shared_bytes == 1_000_000
    assert "1.0 MB saved by sharing" in report(1_000_000).table()


def test_no_size_is_0_that_is_none():
    table = MemoryReport(4_400, 0, 0, 1_200_000, 0, 0, {"dp2": (960, False)}).table()
    for size in ("4.4 kB", "1.2 MB", "960 B", "0 B"):
        assert size in table
    assert "0.0" not in table


def test_an_arena_padded_beyond_its_layouts_saves_nothing():
    assert report(2_000_064).shared_bytes == 0
    assert "-0.0" not in report(2_000_064).table()
