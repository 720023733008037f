"""Text for people: aligned columns, lines of a width, sizes in bytes. Nothing here imports torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence


def columns(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows of text as lines with aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    align: list[Callable[[str, int], str]] = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [f"  {'  '.join(align[i](c, widths[i]) for i, c in enumerate(row))}".rstrip() for row in cells]


def human_bytes(count: float) -> str:
    """`1.5 MB` for 1 500 000; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def told_apart(one: int, other: int) -> tuple[str, str]:
    """Two different counts of bytes as texts that differ: rounded, or where that makes them equal, exact."""
    texts = human_bytes(one), human_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")


def folded(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most `width` characters, the first behind `first`, the others behind `rest`. Lines end between words;
    a word that is longer than a line stays whole.
    """
    words = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, max(width, 20), initial_indent=first, subsequent_indent=rest, **words) or [first]
