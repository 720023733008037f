"""The tables at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fxpar.train.records import Totals
from fxpar.train.view import megabytes


def show_summary(console: Console, totals: Totals) -> None:
    """Tokens and time by length group, shares of the time, first and last loss."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    titles = ("up to", "strategy", "sequences", "tokens", "of all", "time", "of all", "switch", "moved", "reduce")
    for title in titles:
        table.add_column(title, justify="left" if title == "strategy" else "right")
    for group in totals.groups:
        table.add_row(
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
    console.print(table)
    console.print("(switch, moved, reduce: mean of the steps in which the group ran)", style="dim")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in totals.shares().items())
    skipped = f", {totals.skipped} skipped" if totals.skipped else ""
    console.print(f"steps    {totals.steps}{skipped}, {totals.wall_s:.1f} s, {totals.wall_s / totals.steps:.2f} s each")
    console.print(f"time     {shares}")
    console.print(
        f"tokens   {totals.tokens:,} in {totals.sequences:,} sequences, {totals.valid_tokens:,} with a label; "
        f"{totals.tokens_per_s:,.0f} of them per second"
    )
    console.print(f"loss     {totals.first_loss:.4f} -> {totals.last_loss:.4f}")


def percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
