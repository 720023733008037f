"""What the log says, to the letter: people read it and scripts cut it."""

from __future__ import annotations

from dataclasses import replace

from fxpar.recipes.report import group_lines, step_line
from fxpar.runtime.report import GroupReport, StepReport

SHORT = GroupReport(
    limit=256,
    strategy="dp2",
    sequences=1200,
    tokens=98765,
    longest=255,
    micro_batches=12,
    wall_s=0.5014,
    switch_s=0.0126,
    switch_bytes=12_345_678,
    reduce_s=0.0301,
    reduce_bytes=4_000,
)
LONG = GroupReport(
    limit=2048,
    strategy="cp2+zero1",
    sequences=1,
    tokens=2047,
    longest=2047,
    micro_batches=1,
    wall_s=2.0,
    switch_s=0.0,
    switch_bytes=0,
    reduce_s=0.0,
    reduce_bytes=0,
)


def report(step: int, valid: int, *groups: GroupReport, skipped: bool = False) -> StepReport:
    sequences, tokens = sum(g.sequences for g in groups), sum(g.tokens for g in groups)
    return StepReport(
        step=step,
        loss=7.5,
        sequences=sequences,
        tokens=tokens,
        valid_tokens=valid,
        wall_s=2.5,
        plan_s=0.1,
        groups=groups,
        skipped=skipped,
    )


def test_step_line():
    line = step_line(7, [report(7, 90_000, SHORT, LONG)], seconds=2.5, ranks=2)
    assert line == "[fxpar] step 7: 90,000 valid tokens of 1,201 documents, valid_tps 18,000"


def test_step_line_sums_steps_since_the_last_and_says_which_were_left_out():
    reports = [report(1, 1000, SHORT), report(2, 500, LONG, skipped=True), report(3, 1500, SHORT, LONG)]
    line = step_line(3, reports, seconds=3.0, ranks=1)
    assert line == ("[fxpar] step 3: 3,000 valid tokens of 2,402 documents, valid_tps 1,000  left out: 1 mini-batches")


def test_step_line_of_no_time():
    assert step_line(1, [report(1, 0)], seconds=0.0, ranks=2) == (
        "[fxpar] step 1: 0 valid tokens of 0 documents, valid_tps 0"
    )


def test_a_line_per_group_in_the_order_of_running():
    assert list(group_lines(report(1, 1, LONG, SHORT))) == [
        "[fxpar]   <=2048 cp2+zero1: 1 documents, 2,047 tokens, longest 2047, 1 micro-batches, 2000 ms; switch "
        "0.00 MB in 0 ms, gradients 0.00 MB in 0 ms",
        "[fxpar]   <=256 dp2: 1200 documents, 98,765 tokens, longest 255, 12 micro-batches, 501 ms; switch "
        "12.35 MB in 13 ms, gradients 0.00 MB in 30 ms",
    ]


def test_groups_that_joined_another_are_named():
    merged = replace(report(1, 1000, SHORT), merged=((64, 256), (128, 256)))
    first, second, _ = group_lines(merged)
    assert first == "[fxpar]   <=64 joined <=256: too small to be worth a switch of its own"
    assert second.startswith("[fxpar]   <=128 joined <=256")


def test_riders_are_counted():
    line, _ = group_lines(replace(report(1, 1000, SHORT), rides=((64, 256, 3),)))
    assert line == "[fxpar]   3 sequences of <=64 ride in <=256 where the mini-batch is predicted to be faster so"
