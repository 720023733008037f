"""The words of `fxpar passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Debug

EXAMPLES = (
    "fxpar passes",
    "fxpar passes casts",
)


def passes_command(
    name: Annotated[
        str | None, typer.Argument(help="Show the whole description of this pass.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """List the passes, or describe one."""
    from fxpar.cli.passes import run_passes

    run_passes(name)
