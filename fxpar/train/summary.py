"""The tables at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

from fxpar.cli.console import plain_table
from fxpar.train.records import GroupTotal, Totals
from fxpar.train.view import megabytes

_TITLES = ("up to", "strategy", "seqs", "tokens", "of all", "time", "of all", "switch", "moved", "reduce")


def summary_lines(totals: Totals) -> Iterator[str]:
    """Tokens and time by length group, shares of the time, first and last loss."""
    rows = [_row(group, totals) for group in totals.groups]
    yield from plain_table(_TITLES, rows, right=[i for i in range(len(_TITLES)) if i != 1]).splitlines()
    yield "(switch, moved, reduce: mean of the steps in which the group ran)"
    skipped = f", {totals.skipped} skipped" if totals.skipped else ""
    yield f"steps    {totals.steps}{skipped}, {totals.wall_s:.1f} s, {totals.wall_s / totals.steps:.2f} s each"
    yield "time     " + ", ".join(f"{name} {share:.1%}" for name, share in totals.shares().items())
    yield (
        f"tokens   {totals.tokens:,} in {totals.sequences:,} sequences, {totals.valid_tokens:,} with a label; "
        f"{totals.tokens_per_s:,.0f} of them per second"
    )
    held_out = "" if totals.validation_loss is None else f"; on held-out documents {totals.validation_loss:.4f}"
    yield f"loss     {totals.first_loss:.4f} -> {totals.last_loss:.4f}{held_out}"


def _row(group: GroupTotal, totals: Totals) -> tuple[str, ...]:
    return (
        f"{group.limit:,}",
        group.strategy,
        f"{group.sequences:,}",
        f"{group.tokens:,}",
        percent(group.tokens, totals.tokens),
        f"{group.wall_s:.1f} s",
        percent(group.wall_s, totals.wall_s),
        f"{group.switch_s / group.steps * 1e3:.0f} ms",
        megabytes(group.switch_bytes / group.steps),
        f"{group.reduce_s / group.steps * 1e3:.0f} ms",
    )


def percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
