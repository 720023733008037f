"""Rows of text as aligned columns. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def columns(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of text as lines with aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    align: list[Callable[[str, int], str]] = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [f"  {'  '.join(align[i](c, widths[i]) for i, c in enumerate(row))}".rstrip() for row in cells]
