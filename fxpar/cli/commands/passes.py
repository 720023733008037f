"""The words of `fxpar passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Debug, Json

EXAMPLES = (
    "fxpar passes",
    "fxpar passes casts",
    "fxpar passes cleanup --on g.fxpar -o out.fxpar",
)


def passes_command(
    name: Annotated[
        str | None, typer.Argument(help="Show the whole description of this pass.", show_default=False)
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Run the pass on the graph of `fxpar dump --after PASS -o FILE.fxpar`."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the new graph.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Set an option of the pass; repeatable.")
    ] = [],  # noqa: B006
    text: Annotated[bool, typer.Option("--text", help="Show the nodes that changed.")] = False,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """List the passes, describe one, or run one on a dumped graph and show what it changes."""
    if on is None:
        for word, given in (("--output", output), ("--set", set_), ("--text", text)):
            if given:
                raise typer.BadParameter("it is for a pass that runs; name a graph file with --on", param_hint=word)
        from fxpar.cli.passes import run_passes

        run_passes(name, json)
        return
    if name is None:
        raise typer.BadParameter("name the pass that is to run", param_hint="--on")
    from fxpar.cli.run_pass import RunPassRequest, run_pass

    run_pass(RunPassRequest(name, on, output, tuple(set_), text, json))
