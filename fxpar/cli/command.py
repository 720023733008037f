"""One command, made of its words: its options in the form that typer reads, and the call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer
import typer.main
from typer.core import TyperCommand

from fxpar.cli.console import click_error, reporting, working
from fxpar.cli.options import Debug, GraphSource, Offered
from fxpar.cli.values import ReadsWords


class Command(ReadsWords, TyperCommand):
    """A command whose mistakes know which it is, also those that typer's parser tells nothing of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click_error() as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise


def build_command(name: str, summary: str, words: type, examples: Sequence[str]) -> TyperCommand:
    """The command `name`: a parameter for each option of `words`, and `--debug`. It calls `run_NAME` of
    `fxpar.cli.NAME` with the words; False means exit status 1.
    """
    options = list(_options(words))
    if "debug" not in {one.name for one in options}:
        options.append(_Word("debug", Debug, False))
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    function = reporting(_function(name, words, options))
    alone.command(name=name, cls=Command, short_help=summary, epilog=_examples(examples))(function)
    command: Any = typer.main.get_command(alone)
    command.kinds = {one.name: get_args(one.hint) for one in options}
    return command


@dataclass(frozen=True)
class _Word:
    """An option or argument: its name as a parameter, how it is annotated; `negated` where its flag means False."""

    name: str
    hint: Any
    default: Any
    negated: bool = False


def _examples(lines: Sequence[str]) -> str:
    """What stands below the options of a command; `\\b` keeps the lines as they are."""
    return "\b\n" + "\n".join(["Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)])


def _options(words: Any) -> Iterator[_Word]:
    """All that the words have; options of a graph stand where the graph does."""
    for one in fields(words):
        _, said = get_args(one.type)
        if not isinstance(said, Offered):
            yield _Word(one.name, one.type, one.default, "negated" in one.metadata)
            continue
        for found in _options(GraphSource):
            if found.name in ("model", "dtype", *said.options.split()):
                kind, option = get_args(found.hint)
                if found.name in said.says:
                    option = copy(option)
                    option.help = said.says[found.name]
                default = said.dtype if found.name == "dtype" else found.default
                default = "" if found.name == "model" and not said.required else default
                yield replace(found, hint=Annotated[kind, option], default=default)


def _parameter(one: _Word) -> inspect.Parameter:
    """A word in the form that typer reads."""
    kind, option = get_args(one.hint)
    hint, default = one.hint, not one.default if one.negated else one.default
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:  # repeatable
        hint, default = Annotated[list[str], option], []
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _function(name: str, words: type, options: Sequence[_Word]) -> Callable[..., None]:
    """What typer makes the command of."""

    def command(**given: Any) -> None:
        from fxpar.cli.early import check_early

        values: dict[str, Any] = {}
        for one in options:
            value = not given[one.name] if one.negated else given[one.name]
            values[one.name] = tuple(value) if isinstance(value, list) else value
        own = {key: values.pop(key) for key in words.__dataclass_fields__ if key in values}  # type: ignore[attr-defined]
        values.pop("debug", None)  # `reporting` has seen it
        request = words(source=GraphSource(**values), **own) if values else words(**own)
        check_early(request)
        if _runner(name)(request) is False:
            raise typer.Exit(1)

    command.__signature__ = inspect.Signature(list(map(_parameter, options)))  # type: ignore[attr-defined]
    command.__doc__ = words.__doc__
    return command


def _runner(name: str) -> Callable[[Any], object]:
    """`run_NAME`. What it imports takes seconds, so whoever waits at a terminal sees that at once."""
    with working("starting") if "RANK" not in os.environ else nullcontext():
        return getattr(import_module(f"fxpar.cli.{name}"), f"run_{name}")
