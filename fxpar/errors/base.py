"""The base of all errors, and the words that several of them use."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LONG = re.compile(r"\S{200,}")


def shortened(message: str) -> str:
    """The message with words of 200 characters and more cut in the middle: a long name hides what is said of it."""

    def cut(word: re.Match[str]) -> str:
        text = word[0]
        return f"{text[:80]}... ({len(text) - 100:,} characters left out) ...{text[-20:]}"

    return _LONG.sub(cut, message)


class FxparError(Exception):
    """Base of all errors raised by fxpar for a condition that the user can act on."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(one) if isinstance(one, str) else one for one in args))

    def name_task(self, name: str) -> None:
        """Put the name of a task in front of the message, unless that has it."""
        if f"task {name!r}" not in str(self):
            self.args = (f"task {name!r}: {self}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)  # `__init__` takes other arguments than the message

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("fxpar.errors."):
            cls.__module__ = "fxpar.errors"  # where it is imported from, and what a traceback says


def _made_again(cls: type[FxparError], args: tuple[Any, ...], state: dict[str, Any]) -> FxparError:
    """An error that another process has sent."""
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(state)
    return error


class FxparWarning(UserWarning):
    """Something runs correctly but not as a user may expect; the message names the node and the reason."""


def warn(message: str) -> None:
    """Issue an FxparWarning that points at the first caller outside of fxpar."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fxpar":
        level, frame = level + 1, frame.f_back
    warnings.warn(shortened(message), FxparWarning, stacklevel=level)


@contextmanager
def muted_warnings() -> Iterator[None]:
    """No FxparWarning comes out of the block: another rank, or an earlier call, has said it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxparWarning)
        yield


@contextmanager
def naming_task(name: str) -> Iterator[None]:
    """What is raised in the block says of which task it is; an empty name is that of a single loss."""
    try:
        yield
    except FxparError as error:
        if name:
            error.name_task(name)
        raise
    except Exception as error:
        if name:
            error.add_note(f"in task {name!r}")
        raise


def one_line(text: object, most: int | None = 40) -> str:
    """What a file or its reader says, in a message: without what a terminal would take for orders."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[:most])


def a_type(value: object) -> str:
    """`an ndarray`, `a dict`: the type of a value, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """`nearest` for a glob over names with dots: the closest name, or a glob of the same kind as `pattern`."""
    ends = {f"*.{'.'.join(name.split('.')[-2:])}" for name in names if "." in name}
    return nearest(pattern, [*(sorted(ends) if "*" in pattern else ()), *names])


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word closest to `word`, or an empty string (also for what is no word)."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5) if isinstance(word, str) else ()
    return f"; did you mean {close[0]!r}?" if close else ""
