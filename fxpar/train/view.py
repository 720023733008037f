"""What a run prints: a live view on a terminal, one line per step elsewhere, and the tables at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fxpar.cli.console import table_lines
from fxpar.ir.columns import human_bytes
from fxpar.train.records import GroupRecord, GroupTotal, StepRecord, Totals


class StepView(Protocol):
    """Takes each step; `note` says something beside them."""

    def __enter__(self) -> StepView: ...

    def __exit__(self, *error: Any) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None: ...


def open_view(console: Console, steps: int, done: int, title: str) -> StepView:
    """The view that suits the console; `done` steps were done by an earlier run."""
    return LiveView(console, steps, done, title) if console.is_terminal else PlainView(console, steps)


def step_line(record: StepRecord, steps: int) -> str:
    """One step in one line."""
    parts = [
        f"step {record.step:>{len(str(steps))}}/{steps}",
        f"loss {record.loss:.4f}{metrics_text(record.tasks)}" + (" skipped" if record.skipped else ""),
        f"{record.tokens_per_s:,.0f} {'tok' if counts_tokens(record.groups) else 'valid'}/s",
        f"lr {record.lr:.2e}",
    ]
    if record.grad_norm is not None:
        parts.append(f"norm {record.grad_norm:.2f}")
    if record.validation_loss is not None:
        parts.append(f"validation {record.validation_loss:.4f}{metrics_text(record.validation_metrics)}")
    if record.experts:
        parts.append(experts_text(record.experts))
    parts.append(f"{record.wall_s:.2f} s")
    return "  ".join(parts) + "  " + " | ".join(group_text(group) for group in record.groups)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """` (accuracy 0.4312)`; nothing without metrics."""
    return f" ({', '.join(f'{name} {value:.4g}' for name, value in metrics.items())})" if metrics else ""


def experts_text(modules: Mapping[str, Mapping[str, float]]) -> str:
    """`experts 1.31x ranks 1.07x dropped 2.5%`: the largest of all modules."""
    most: dict[str, float] = {}
    for figures in modules.values():
        most |= {name: max(value, most.get(name, 0.0)) for name, value in figures.items()}
    return " ".join(
        f"{name} {value:.1%}" if name == "dropped" else f"{name} {value:.2f}x" for name, value in most.items()
    )


def counts_tokens(groups: Iterable[GroupRecord | GroupTotal]) -> bool:
    """Whether all lengths are numbers of tokens: what is valid is then too. Tasks may count rows."""
    return all(group.unit == "tokens" for group in groups)


def size_text(group: GroupRecord | GroupTotal) -> str:
    """`5,120`, or `24 rows` of what is no text."""
    return f"{group.tokens:,}" + f" {group.unit}" * (group.unit != "tokens")


def group_text(group: GroupRecord) -> str:
    """`<=256 dp4: 40 seq 5,120 tok 0.41 s, switch 3 ms 1.2 MB`."""
    what = f"{group.sequences} seq {group.tokens:,} tok"
    if group.unit != "tokens":
        what = f"{group.sequences} batches" + f" {group.tokens:,} {group.unit}" * (group.unit != "batches")
    text = f"<={group.limit} {group.strategy}: {what} {group.wall_s:.2f} s"
    if group.switch_bytes:
        text += f", switch {group.switch_s * 1e3:.0f} ms {human_bytes(group.switch_bytes)}"
    return text


class PlainView:
    """One line per step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def step(self, record: StepRecord) -> None:
        self._print(step_line(record, self._steps))

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()  # a pipe's reader follows the run


class LiveView:
    """A bar, the figures of the last step, and a table of its groups, redrawn in place."""

    def __init__(self, console: Console, steps: int, done: int, title: str) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task(title, total=steps, completed=done)
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step)
        shown = group_table(record, self._live.console.width)
        self._live.update(Group(self._progress, figures(record), shown))

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False)


def figures(record: StepRecord) -> Table:
    """Loss, speed, learning rate and norm of one step."""
    table = Table.grid(padding=(0, 3))
    cells = [
        f"loss [bold]{record.loss:.4f}[/bold]" + (" [red]skipped[/red]" if record.skipped else ""),
        f"{record.tokens_per_s:,.0f} valid{' tokens' * counts_tokens(record.groups)}/s",
        f"learning rate {record.lr:.2e}",
    ]
    if record.grad_norm is not None:
        cells.append(f"gradient norm {record.grad_norm:.2f}")
    table.add_row(*cells)
    return table


# Title, cell, and whether it is left out of a terminal that is too narrow for all: greatest numbers first.
_GROUP_COLUMNS: tuple[tuple[str, Callable[[GroupRecord], str], int], ...] = (
    ("up to", lambda g: f"{g.limit:,}", 0),
    ("strategy", lambda g: g.strategy, 0),
    ("sequences", lambda g: str(g.sequences), 3),
    ("tokens", size_text, 0),
    ("longest", lambda g: f"{g.longest:,}", 5),
    ("micro-batches", lambda g: str(g.micro_batches), 4),
    ("time", lambda g: f"{g.wall_s:.2f} s", 0),
    ("switch", lambda g: f"{g.switch_s * 1e3:.0f} ms", 1),
    ("moved", lambda g: human_bytes(g.switch_bytes), 2),
)


def group_table(record: StepRecord, width: int) -> Table:
    """One line per group of one step; as many columns as there is room for."""
    titles = _titles((title for title, _, _ in _GROUP_COLUMNS), record.groups)
    shown = [
        (title, [cell(group) for group in record.groups], rank)
        for title, (_, cell, rank) in zip(titles, _GROUP_COLUMNS, strict=True)
    ]

    def columns() -> int:
        return sum(max(map(len, [title, *cells])) + 2 for title, cells, _ in shown)

    while columns() > width and any(rank for *_, rank in shown):
        shown.remove(max(shown, key=lambda column: column[2]))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title, _, _ in shown:
        table.add_column(title, justify="left" if title == "strategy" else "right", overflow="fold")
    for row in zip(*(cells for _, cells, _ in shown), strict=True):
        table.add_row(*row)
    return table


_TOTAL_TITLES = ("up to", "strategy", "seqs", "tokens", "of all", "time", "of all", "switch", "moved", "reduce")
_OF_TASKS = {"seqs": "items", "sequences": "items", "tokens": "size"}  # titles where some groups count no tokens


def summary_lines(totals: Totals, width: int | None = None) -> Iterator[str]:
    """Tokens and time by length group, shares of the time, first and last loss; the table fits a `width`."""
    rows = [_total_row(group, totals) for group in totals.groups]
    titles = _titles(_TOTAL_TITLES, totals.groups)
    yield from table_lines(titles, rows, [i for i in range(len(_TOTAL_TITLES)) if i != 1], width)
    yield "(switch, moved, reduce: mean of the steps in which the group ran)"
    skipped = f", {totals.skipped} skipped" if totals.skipped else ""
    yield f"steps    {totals.steps}{skipped}, {totals.wall_s:.1f} s, {totals.wall_s / totals.steps:.2f} s each"
    yield "time     " + ", ".join(f"{name} {share:.1%}" for name, share in totals.shares().items())
    if not counts_tokens(totals.groups):
        yield f"valid    {totals.valid_tokens:,} labels and rows, {totals.tokens_per_s:,.0f} per second"
    else:
        yield (
            f"tokens   {totals.tokens:,} in {totals.sequences:,} sequences, {totals.valid_tokens:,} with a label; "
            f"{totals.tokens_per_s:,.0f} of them per second"
        )
    held_out = ""
    if totals.validation_loss is not None:
        what = "documents" if counts_tokens(totals.groups) else "items"
        held_out = f"; on held-out {what} {totals.validation_loss:.4f}{metrics_text(totals.validation_metrics)}"
    yield f"loss     {totals.first_loss:.4f} -> {totals.last_loss:.4f}{held_out}"


def _titles(titles: Iterable[str], groups: Iterable[GroupRecord | GroupTotal]) -> list[str]:
    """Those of tasks, unless all groups count tokens."""
    return list(titles) if counts_tokens(groups) else [_OF_TASKS.get(title, title) for title in titles]


def _total_row(group: GroupTotal, totals: Totals) -> tuple[str, ...]:
    alike = sum(other.tokens for other in totals.groups if other.unit == group.unit)  # rows are no tokens
    return (
        f"{group.limit:,}",
        group.strategy,
        f"{group.sequences:,}",
        size_text(group),
        percent(group.tokens, alike),
        f"{group.wall_s:.1f} s",
        percent(group.wall_s, totals.wall_s),
        f"{group.switch_s / group.steps * 1e3:.0f} ms",
        human_bytes(group.switch_bytes / group.steps),
        f"{group.reduce_s / group.steps * 1e3:.0f} ms",
    )


def percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"
