"""`chart(plan)`: a step of waves as text, a line per device or run of devices that do the same."""

from __future__ import annotations

from itertools import product

from fxpar.waves.plan import WavePlan

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def chart(plan: WavePlan, *, columns: int = 100) -> str:
    """Time to the right: `A=` is the forward of the MetaOp of letter A, `a-` a backward, `<` is receiving, `+` is
    adding up gradients with nothing beside it, `.` is idle. Below, the letters.
    """
    scale = columns / plan.ms
    names = {m: letter(m) for m in range(len(plan.graph.metaops))}
    cells = [["."] * columns for _ in range(plan.devices)]
    for run in plan.step.runs:
        piece = plan.pieces[run.piece]
        start, begin, end = (min(columns, round(ms * scale)) for ms in (run.start_ms, run.begin_ms, run.end_ms))
        name = names[piece.metaop].lower() if run.backward else names[piece.metaop]
        text = "<" * (begin - start) + name.ljust(end - begin, "-" if run.backward else "=")
        for device in piece.devices:
            cells[device][start:end] = list(text[: end - start])
    for one in plan.step.reductions:
        span = range(min(columns, round(one.start_ms * scale)), min(columns, round(one.end_ms * scale)))
        for device, place in product(one.devices, span):
            if cells[device][place] == ".":
                cells[device][place] = "+"
    lines: list[tuple[int, int, str]] = []
    for device, line in enumerate("".join(row) for row in cells):
        if lines and lines[-1][2] == line:
            lines[-1] = (lines[-1][0], device, line)
        else:
            lines.append((device, device, line))
    titles = [f"{first}-{last}" if last > first else str(first) for first, last, _ in lines]
    width = max(map(len, titles))
    drawn = [f"{title:>{width}}  {line}" for title, (_, _, line) in zip(titles, lines, strict=True)]
    legend = ", ".join(f"{names[m]} {one.name}" for m, one in enumerate(plan.graph.metaops))
    return "\n".join([*drawn, legend])


def letter(metaop: int) -> str:
    """A to Z, then A1 to Z1, and so on."""
    turn = metaop // len(_LETTERS)
    return _LETTERS[metaop % len(_LETTERS)] + (str(turn) if turn else "")
