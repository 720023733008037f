"""The program: its commands in the order of the help, and the options of the program itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fxpar.cli.commands import check, diff, dump, explain, memory, order, passes, switch, train, viz
from fxpar.cli.console import reporting

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Capture a model once, lower it to per-rank graphs of any parallel strategy, check it, see it, train with it.",
)

COMMANDS: tuple[tuple[str, Callable[..., Any], Sequence[str]], ...] = (
    ("train", train.train_command, train.EXAMPLES),
    ("check", check.check_command, check.EXAMPLES),
    ("dump", dump.dump_command, dump.EXAMPLES),
    ("diff", diff.diff_command, diff.EXAMPLES),
    ("explain", explain.explain_command, explain.EXAMPLES),
    ("viz", viz.viz_command, viz.EXAMPLES),
    ("memory", memory.memory_command, memory.EXAMPLES),
    ("switch", switch.switch_command, switch.EXAMPLES),
    ("order", order.order_command, order.EXAMPLES),
    ("passes", passes.passes_command, passes.EXAMPLES),
)


def _version(wanted: bool) -> None:
    if wanted:
        from fxpar import __version__

        typer.echo(f"fxpar {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Nothing to do: options are those of the commands."""


def _examples(lines: Sequence[str]) -> str:
    """What stands below the options of a command; `\\b` keeps the lines as they are."""
    return "\b\n" + "\n".join(["Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)])


for _name, _command, _lines in COMMANDS:
    app.command(name=_name, epilog=_examples(_lines))(reporting(_command))
