"""Output: one console, plain text where nobody looks, errors as one message."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from fxpar.ir.columns import columns, folded, human_bytes
from fxpar.train.interrupt import INTERRUPTED

F = TypeVar("F", bound=Callable[..., Any])


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # to `reporting`; rich would exit with 1


def stdout_console() -> Console:
    """A console for stdout; on a terminal with colours, elsewhere unwrapped plain text. NO_COLOR is respected."""
    return _Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())


_BEGUN = time.monotonic()  # the elapsed time that a user sees is that of the command


class Work:
    """What is being done, and for how long the command runs; drawn anew with each frame of the spinner."""

    def __init__(self, text: str) -> None:
        self.text = text

    def update(self, text: str) -> None:
        self.text = text

    def __rich__(self) -> RenderableType:
        return Text(f"{self.text}, {time.monotonic() - _BEGUN:.0f} s", overflow="ellipsis", no_wrap=True)


def show_notes(notes: Iterable[str]) -> None:
    """What a user should know beside an answer, on stderr."""
    console = stderr_console()
    for note in notes:
        console.print(f"note: {note}", markup=False)


@contextmanager
def working(text: str = "") -> Iterator[Work]:
    """A spinner on stderr if that is a terminal, and nothing of it is left afterwards."""
    work = Work(text)
    with stderr_console().status(work):
        yield work


def reporting(command: F) -> F:
    """Turn an error of a command into one message on stderr and exit status 1; `debug` shows the traceback. Ctrl-C ends
    a command with status 130.

    An error that is not fxpar's own (a bug of fxpar, or of the user's model) is named with its class.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()  # a reader that is gone shows here, not when the interpreter ends
            return result
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            stderr_console().print("interrupted", style="red")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `fxpar dump ... | head` has seen enough; what is still buffered goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if isinstance(error, click_error()):
                raise  # typer prints the usage and exits with 2
            if kwargs.get("debug"):
                traceback.print_exception(error)
            else:
                stderr_console().print(f"error: {describe(error)}", markup=False, style="red")
            raise typer.Exit(1) from None

    return run  # type: ignore[return-value]


def describe(error: Exception) -> str:
    """The message of an FxparError; of any other error its class and notes too, and where to see more."""
    from fxpar.errors import FxparError
    from fxpar.errors.base import shortened

    if isinstance(error, FxparError):
        return str(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {shortened(str(error))}{notes}. Add --debug to see where it comes from"


def click_error() -> type[Exception]:
    """The base of typer's errors of usage, wherever this version of typer has it."""
    return next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns without lines."""
    return "\n".join(line[2:] for line in columns([header, *rows], right))


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """The same as lines. Where they are longer than `width`, each row is its first cell, and below it the others, each
    behind its title.
    """
    lines = plain_table(header, rows, right).splitlines()
    if width is None or max(map(len, lines)) <= width:
        return lines
    found = []
    for first, *cells in rows:
        found.append(first)
        for title, cell in zip(header[1:], cells, strict=True):
            found += folded(f"{title} {cell}".strip(), width, "  ", "    ") if cell else []
    return found


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> None:
    """`table_lines` as wide as the terminal, or without a limit where there is none."""
    width = console.width if console.is_terminal else None
    for line in table_lines(header, rows, right, width):
        console.print(line, markup=False, soft_wrap=True)


def human_seconds(seconds: float) -> str:
    """`3.2 ms` for 0.0032, `41 µs` for 0.000041."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 99.95 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


__all__ = [
    "INTERRUPTED",
    "Work",
    "click_error",
    "describe",
    "human_bytes",
    "human_seconds",
    "plain_table",
    "print_table",
    "reporting",
    "stderr_console",
    "stdout_console",
    "table_lines",
    "working",
]
