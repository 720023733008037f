"""`fxpar plan` without `--tokens-per-step`: the sizes of mini-batches that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fxpar.cli.console import human_seconds, print_table
from fxpar.search.batch_size import WITHIN, RatedSize

BAR = 24  # columns of the best rate


def sizes_json(rated: Sequence[RatedSize]) -> dict[str, Any]:
    """What `--json` writes of them, the largest first."""
    return {
        "batch_sizes": [
            {
                "tokens_per_step": one.tokens_per_step,
                "tokens_per_s": one.tokens_per_s,
                "predicted_s": one.found.plans[0].predicted_s,
                "strategies": list(one.found.plans[0].strategies),
            }
            for one in rated
        ]
    }


def show_sizes(console: Console, rated: Sequence[RatedSize], taken: RatedSize) -> None:
    """The rates, and which size was taken and why."""
    best = max(one.tokens_per_s for one in rated)
    rows = [
        (
            f"{one.tokens_per_step:,}",
            human_seconds(one.found.plans[0].predicted_s),
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / best:.1%}",
            "#" * round(BAR * one.tokens_per_s / best),
        )
        for one in reversed(rated)
    ]
    console.print()
    print_table(console, ("tokens per step", "seconds", "tokens per s", "", ""), rows, right=(0, 1, 2, 3))
    console.print(
        f"{taken.tokens_per_step:,} tokens per step: of the sizes tried the smallest within {WITHIN:.0%} of the best "
        "rate (--tokens-per-step N takes another one)",
        markup=False,
    )
