"""The program: its commands in the order of the help, and the options of the program itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fxpar.cli.commands import check, diff, dump, explain, memory, order, passes, profile, switch, train, viz
from fxpar.cli.console import reporting

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Capture a model once, lower it to per-rank graphs of any parallel strategy, check it, see it, train with it.",
)

# Name, what the list of commands says (one line of 80 columns), the command, its examples.
COMMANDS: tuple[tuple[str, str, Callable[..., Any], Sequence[str]], ...] = (
    ("train", "Train a language model that switches strategies by length.", train.train_command, train.EXAMPLES),
    ("check", "Check strategies: loss and gradients against one device.", check.check_command, check.EXAMPLES),
    ("dump", "Print or save the graph of a model, or a pipeline schedule.", dump.dump_command, dump.EXAMPLES),
    ("diff", "Compare two strategies, two graph files, or passes.", diff.diff_command, diff.EXAMPLES),
    (
        "explain",
        "Say why a value lies as it does, and what else would cost.",
        explain.explain_command,
        explain.EXAMPLES,
    ),
    ("viz", "Draw a page with graph, mesh, timeline and memory.", viz.viz_command, viz.EXAMPLES),
    ("memory", "Predict the memory of a rank and of each pipeline stage.", memory.memory_command, memory.EXAMPLES),
    ("switch", "Plan how weights move from one strategy to another.", switch.switch_command, switch.EXAMPLES),
    ("order", "Find the order of strategies that switches cheapest.", order.order_command, order.EXAMPLES),
    ("profile", "Measure devices, memory and links for a cluster file.", profile.profile_command, profile.EXAMPLES),
    ("passes", "List passes, describe one, or run one on a graph file.", passes.passes_command, passes.EXAMPLES),
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


for _name, _summary, _command, _lines in COMMANDS:
    app.command(name=_name, short_help=_summary, epilog=_examples(_lines))(reporting(_command))
