from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from fxpar.train.metrics import scalars
from fxpar.train.records import Totals
from fxpar.train.view import (
    LiveView,
    PlainView,
    experts_text,
    group_table,
    group_text,
    open_view,
    step_line,
    summary_lines,
)
from tests.train.test_metrics import steps


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, highlight=False, soft_wrap=not terminal)


def test_one_plain_line_per_step():
    records, out = steps(3), console(False)
    with open_view(out, 12, 0, "train") as view:
        assert isinstance(view, PlainView)
        for record in records:
            view.step(record)
        view.note("checkpoint [a]")
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"step  1/12  loss {records[0].loss:.4f}  ")
    assert "tok/s  lr 5.00e-02  norm " in lines[0]
    assert "<=64 cp4: " in lines[0]
    assert "switch 125 ms 2.0 MB" in lines[0]
    assert lines[3] == "checkpoint [a]"
    assert "\x1b" not in out.file.getvalue()


def test_a_small_switch_is_not_0():
    (record,) = steps(1)
    (group, *_) = record.groups
    assert "960 B" in group_text(replace(group, switch_bytes=960))


def test_what_is_no_text_has_its_own_unit():
    (record,) = steps(1)
    (group, *others) = record.groups
    rows = replace(group, unit="rows", sequences=2, tokens=16)
    assert f"{group.strategy}: 2 batches 16 rows 0.50 s" in group_text(rows)
    assert "2 batches 0.50 s" in group_text(replace(rows, unit="batches", tokens=2))
    mixed = replace(record, groups=(rows, *others), validation_loss=2.5)
    assert "valid/s" in step_line(mixed, 1)
    assert "16 rows" in "".join(group_table(mixed, 200).columns[3].cells)
    assert [column.header for column in group_table(mixed, 200).columns][2:4] == ["items", "size"]
    titles, row = [re.split("  +", line.strip()) for line in list(summary_lines(Totals.of([mixed])))[:2]]
    assert (titles[2:5], row[3:5]) == (["items", "size", "of all"], ["16 rows", "100%"])
    (line,) = (line for line in summary_lines(Totals.of([mixed])) if line.startswith("valid "))
    assert f"{mixed.valid_tokens} labels and rows" in line
    assert list(summary_lines(Totals.of([mixed])))[-1].endswith("; on held-out items 2.5000")


def test_line_of_a_skipped_step():
    (record,) = steps(1, bad_steps=(1,))
    assert "loss nan skipped" in step_line(record, 1)


def test_metrics_of_held_out_documents_stand_beside_their_loss():
    (record,) = steps(1)
    record = replace(record, validation_loss=2.5, validation_metrics={"accuracy": 0.43125, "hits": 12})
    assert "validation 2.5000 (accuracy 0.4313, hits 12)  " in step_line(record, 1)
    assert "on held-out documents 2.5000 (accuracy 0.4313, hits 12)" in list(summary_lines(Totals.of([record])))[-1]
    assert scalars(record)["metrics/validation_accuracy"] == 0.43125


def test_balance_of_experts():
    (record,) = steps(1)
    assert record.experts == {"moe": {"experts": 1.5, "ranks": 1.0}}
    assert "  experts 1.50x ranks 1.00x  " in step_line(record, 1)
    assert scalars(record)["experts_ranks/moe"] == 1.0
    assert (
        experts_text({"a": {"experts": 2.0}, "b": {"experts": 1.0, "dropped": 0.125}}) == "experts 2.00x dropped 12.5%"
    )


def test_live_view_shows_progress_and_groups():
    records, out = steps(4), console(True)
    with open_view(out, 4, 0, "train") as view:
        assert isinstance(view, LiveView)
        for record in records:
            view.step(record)
        view.note("saved")
    text = out.file.getvalue()
    for part in ("4/4", "cp4", "micro-batches", "125 ms", "2.0 MB", "valid tokens/s", "saved"):
        assert part in text, part


def test_summary():
    records = steps(4)
    text = "\n".join(summary_lines(Totals.of(records)))
    assert f"loss     {records[0].loss:.4f} -> {records[-1].loss:.4f}" in text
    assert "time     compute " in text
    assert "steps    4, " in text
    shares = Totals.of(records).shares()
    assert set(shares) == {"compute", "switch", "reduce", "optimizer", "other"}
    table = [line for line in text.splitlines() if " cp4 " in line]
    assert len(table) == 1
    assert "125 ms" in table[0]


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words():
    records = steps(2)
    for width in (60, 80, 120):
        out = Console(width=width, force_terminal=True, color_system=None)
        with out.capture() as caught:
            out.print(group_table(records[-1], width))
        lines = caught.get().splitlines()
        assert all(len(line) <= width for line in lines)
        assert "…" not in caught.get()
        assert ("longest" in lines[0]) == (width > 80)
        assert len(lines) == 1 + len(records[-1].groups)
    table = "\n".join(summary_lines(Totals.of(records), 60)).partition("(switch")[0].splitlines()
    assert max(map(len, table)) <= 60
    assert "  strategy cp4" in table
