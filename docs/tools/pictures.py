"""The pictures of the pages on how fxpar works: `python docs/tools/pictures.py` writes docs/assets/*.svg.

Text stands in filled boxes, arrows and labels are of a middle grey, and there is no background: readable on light and
on dark pages. tests/docs/test_tools.py compares the files with what this script makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
INK, GREY = "#1b1f24", "#7d8590"
BLUE, GREEN, AMBER, ROSE, PLAIN = "#a9c8f5", "#a8dcb5", "#f3d08a", "#f2b3b8", "#d5d9e0"
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Box:
    """A filled rectangle with a title and further lines; sizes in pixels."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()
    fill: str = PLAIN

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def svg(self) -> str:
        middle, count = self.x + self.width / 2, len(self.lines)
        top = self.y + self.height / 2 + 5 - 8.5 * count
        text = [_text(middle, top, self.title, 14, INK, weight=600)]
        text += [_text(middle, top + 18 + 16 * i, line, 12, INK) for i, line in enumerate(self.lines)]
        size = f"width='{self.width:g}' height='{self.height:g}'"
        frame = f"<rect x='{self.x:g}' y='{self.y:g}' {size} rx='7' fill='{self.fill}'/>"
        return "\n".join([frame, *text])


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str = "middle", weight: int = 400) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' fill='{color}'>"
        f"{escape(text)}</text>"
    )


def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """Grey text outside of boxes."""
    return _text(x, y, text, 12, GREY, anchor)


def arrow(*points: tuple[float, float]) -> str:
    """A line through the points with a head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{GREY}' stroke-width='1.8' marker-end='url(#head)'/>"


def picture(width: int, height: int, title: str, parts: Sequence[Box | str]) -> str:
    """The whole document."""
    head = (
        f"<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0L10 5L0 10z' fill='{GREY}'/></marker></defs>"
    )
    body = "\n".join(part.svg() if isinstance(part, Box) else part for part in parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>\n"
        f"<title>{escape(title)}</title>\n{head}\n{body}\n</svg>\n"
    )


def pipeline() -> str:
    """From a module to programs."""
    module = Box(10, 70, 150, 70, "your nn.Module", ("+ loss + one batch",), PLAIN)
    logical = Box(240, 70, 160, 70, "LogicalGraph", ("one device, global", "shapes, length T"), BLUE)
    parts: list[Box | str] = [module, logical, arrow((160, 105), (238, 105)), label(199, 96, "capture")]
    parts.append(label(199, 124, "once"))
    strategies = ("dp4", "dp2.tp2+sp", "cp4")
    for i, name in enumerate(strategies):
        y = 10 + 75 * i
        placed = Box(480, y, 150, 56, name, ("a placement per value",), AMBER)
        program = Box(710, y, 150, 56, "ExecGraph", ("what a rank runs",), GREEN)
        parts += [placed, program, arrow((400, 105), (440, 105), (440, y + 28), (478, y + 28))]
        parts.append(arrow((630, y + 28), (708, y + 28)))
    parts += [label(440, 240, "annotate"), label(669, 240, "lower")]
    parts += [arrow((860, 38), (905, 38), (905, 100), (928, 100)), arrow((860, 113), (928, 113))]
    parts += [arrow((860, 188), (905, 188), (905, 126), (928, 126))]
    parts.append(Box(930, 78, 130, 70, "WeightStore", ("one storage", "behind all of them"), ROSE))
    return picture(1070, 255, "One module is captured once and lowered once per strategy", parts)


def placements() -> str:
    """One product under tp2: where the sum stays spread, and the collective that resolves it."""
    parts: list[Box | str] = []
    columns = (
        (10, "captured", ("x [T, D]", "w [D, F]", "h = x w [T, F]", "v [F, D]", "y = h v [T, D]"), (PLAIN,) * 5),
        (
            250,
            "annotated",
            ("x [T, D]", "w [D, F@tp]", "h [T, F@tp]", "v [F@tp, D]", "y [T, D] P(tp)"),
            (PLAIN, BLUE, BLUE, BLUE, AMBER),
        ),
        (
            490,
            "on rank 0 of tp",
            ("x: all", "w: left half", "h: left half", "v: upper half", "y: its term of the sum"),
            (PLAIN, BLUE, BLUE, BLUE, AMBER),
        ),
    )
    for x, title, rows, fills in columns:
        parts.append(label(x + 100, 18, title))
        parts += [
            Box(x, 28 + 38 * i, 200, 32, row, (), fill) for i, (row, fill) in enumerate(zip(rows, fills, strict=True))
        ]
    parts += [arrow((212, 120), (248, 120)), arrow((452, 120), (488, 120))]
    parts += [
        Box(740, 104, 200, 70, "all_reduce(y) @tp", ("or reduce_scatter, where", "tokens are split next: +sp"), GREEN)
    ]
    parts += [arrow((692, 196), (716, 196), (716, 140), (738, 140)), label(840, 92, "what the next op needs")]
    return picture(950, 225, "Placements decide which collectives are needed", parts)


def storage() -> str:
    """Home, layouts and views of one weight on one rank."""
    parts: list[Box | str] = [
        Box(10, 60, 180, 76, "home", ("fp32, rows split over", "all 4 ranks: a DTensor"), ROSE),
        label(100, 160, "what the optimizer sees"),
        Box(330, 20, 300, 150, "", (), BLUE),
        _text(345, 42, "dp4: the whole weight, bf16", 13, INK, "start", 600),
        Box(345, 100, 140, 56, "tp2", ("rows 0 to 31: a view",), GREEN),
        Box(495, 100, 120, 56, "cp4", ("the same bytes",), GREEN),
        label(480, 190, "layouts on one rank: one storage"),
        Box(780, 20, 180, 60, "gradients, fp32", ("accumulated per group",), AMBER),
        Box(780, 110, 180, 60, ".grad", ("at home, summed once",), ROSE),
        arrow((190, 85), (328, 85)),
        label(259, 76, "gather, cast"),
        arrow((630, 50), (778, 50)),
        label(704, 42, "backward"),
        arrow((870, 80), (870, 108)),
        label(884, 99, "reduce", "start"),
    ]
    return picture(970, 205, "One storage behind all layouts of a weight", parts)


def step() -> str:
    """One mini-batch on a line of time."""
    parts: list[Box | str] = [label(10, 22, "one mini-batch, between zero_grad and optimizer.step", "start")]
    x = 10.0
    for title, lines, width, fill in (
        ("plan", ("group,", "pack"), 70, PLAIN),
        ("switch", ("to dp4",), 74, ROSE),
        ("dp4", ("short: 3 micro-batches",), 168, BLUE),
        ("reduce", ("home",), 66, AMBER),
        ("switch", ("nothing moves",), 92, ROSE),
        ("dp2.tp2+sp", ("middle: 2",), 118, BLUE),
        ("reduce", ("home",), 66, AMBER),
        ("switch", ("to cp4",), 74, ROSE),
        ("cp4", ("long: 1",), 104, BLUE),
        ("reduce", ("home",), 66, AMBER),
    ):
        parts.append(Box(x, 36, width, 60, title, lines, fill))
        x += width + 5
    parts += [arrow((10, 116), (x - 5, 116)), label(x / 2, 134, "time")]
    parts.append(Box(x + 10, 36, 116, 60, "optimizer", ("at home, yours",), GREEN))
    return picture(int(x + 136), 145, "What happens inside one step", parts)


def switch() -> str:
    """Boxes of a weight on ranks before and after, and who sends."""
    parts: list[Box | str] = [
        label(110, 18, "from tp4: quarter of the rows each"),
        label(640, 18, "to dp2.tp2: a half each"),
    ]
    for rank in range(4):
        y = 30 + 44 * rank
        parts.append(Box(10, y, 200, 36, f"rank {rank}: rows {16 * rank} to {16 * rank + 15}", (), BLUE))
        low = 32 * (rank % 2)
        parts.append(Box(540, y, 200, 36, f"rank {rank}: rows {low} to {low + 31}", (), GREEN))
    for source, target in ((1, 0), (0, 2), (2, 3), (3, 1), (1, 2), (2, 1)):
        parts.append(arrow((212, 48 + 44 * source), (538, 48 + 44 * target)))
    parts.append(label(375, 222, "each rank keeps what it has; it receives only the rows that it lacks"))
    return picture(750, 235, "A switch sends what a rank lacks", parts)


PICTURES = {
    "pipeline.svg": pipeline,
    "placements.svg": placements,
    "storage.svg": storage,
    "step.svg": step,
    "switch.svg": switch,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
