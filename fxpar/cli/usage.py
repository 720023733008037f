"""What is wrong with a command line, in the words of all other errors: one line that names the word and what to do,
and one that shows how the command is written. The exit status is 2.

Typer finds the mistakes; of what it raises only the names of classes and attributes are known here.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from fxpar.cli.console import click_error, stderr_console
from fxpar.errors import FxparError, nearest
from fxpar.errors.base import one_line, shortened

MISSING_VALUE = "it is missing"  # what a check says of an option or argument that must be there


class Program(TyperGroup):
    """The commands of fxpar, whose mistakes of usage are told by `usage_text`."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Do what the words say; ends with SystemExit, unless a caller asks for the result itself."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            status = super().main(*args, standalone_mode=False, **extra)
        except typer.Abort:
            status = 1
        except click_error() as error:
            status = getattr(error, "exit_code", 2)
            if _kinds(error) & {"NoArgsIsHelpError"}:
                error.show()  # type: ignore[attr-defined]
            else:
                stderr_console().print(f"error: {usage_text(error)}", markup=False, style="red")
                typer.echo(_how_to_write(error), err=True, nl=False)
        sys.exit(status if isinstance(status, int) else 0)


def usage_text(error: Exception) -> str:
    """What is wrong with a word, as one sentence."""
    kinds, text = _kinds(error), getattr(error, "message", str(error))
    if "NoSuchOption" in kinds:
        return _no_such_option(error)
    if "MissingParameter" in kinds or text == MISSING_VALUE:
        return _missing(error)
    if "BadParameter" in kinds:
        return _bad_value(error)
    if "BadOptionUsage" in kinds:
        return _bad_option(error)
    if match := re.match(r"No such command '(.*?)'", text):
        name, known = match[1], _commands(error)
        return f"there is no command {one_line(name)!r}{nearest(name, known) or '. Commands are ' + ', '.join(known)}"
    if match := re.match(r"Got unexpected extra argument\(?s?\)? \((.*)\)", text):
        return f"{_path(error)} takes no further word: {one_line(match[1])}{_if_strategies(error, match[1])}"
    return text.rstrip(".")


def _kinds(error: Exception) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _missing(error: Any) -> str:
    """With the first sentence of what the help says of it."""
    name = _name(error)
    about = next((one.help for one in _params(error) if name in one.opts or name == one.metavar), None) or ""
    about = re.split(r"(?<=[^.])\. |\.$", about)[0]
    return f"{name} is missing" + (f": {about}" if about else "")


def _no_such_option(error: Any) -> str:
    """With the option of this command that is nearest."""
    given, known = error.option_name, [name.lstrip("-") for name in _options(error)]
    hint = nearest(given.lstrip("-"), known).replace("'", "'--", 1) if given.startswith("--") else ""
    return f"{_path(error)} has no option {one_line(given)}{hint}"


def _bad_value(error: Any) -> str:
    """Of an option or argument: what the check of its value says."""
    return shortened(f"{_name(error)}: {error.message.rstrip('.')}")


def _bad_option(error: Any) -> str:
    """An option without the value that it needs, or with one that it has no use for."""
    if "not take" in error.message:
        return f"{error.option_name} takes no value"
    metavar = next((one.metavar for one in _params(error) if error.option_name in one.opts), None) or "VALUE"
    return f"{error.option_name} needs a value: {error.option_name} {metavar}"


def _name(error: Any) -> str:
    """Of the option or argument that the error is about, as the help has it."""
    hint, param = error.param_hint, error.param
    if hint is not None or param is None:
        return hint if isinstance(hint, str) else "a value" if hint is None else " / ".join(hint)
    long = [name for name in param.opts if name.startswith("--")]
    return long[0] if long else param.metavar or param.name.upper()


def _params(error: Any) -> list[Any]:
    return [] if error.ctx is None else error.ctx.command.params


def _options(error: Any) -> list[str]:
    """All that the command knows, `--help` included."""
    found = [name for one in _params(error) for name in (*one.opts, *one.secondary_opts) if name.startswith("--")]
    return [*found, "--help"]


def _commands(error: Any) -> list[str]:
    return list(getattr(error.ctx.command, "commands", ()))


def _path(error: Any) -> str:
    return "fxpar" if error.ctx is None else error.ctx.command_path


def _if_strategies(error: Any, words: str) -> str:
    """Where words are strategies: how those are given."""
    from fxpar.ir.strategy import Strategy

    with suppress(FxparError):
        for word in words.split():
            Strategy.parse(word)
        if "--strategy" in _options(error):
            return f". Strategies are given with -s {','.join(words.split())}"
    return ""


def _how_to_write(error: Any) -> str:
    """The usage of the command, and where its options are described."""
    if getattr(error, "ctx", None) is None:
        return ""
    return f"{error.ctx.get_usage()}\n{error.ctx.command_path} --help describes them\n"
