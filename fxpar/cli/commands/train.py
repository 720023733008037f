"""The words of `fxpar train`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Debug

EXAMPLES = (
    "fxpar train --demo",
    "fxpar train run.toml --steps 10 --compare static",
)


def train_command(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG.toml", help="What to train; see docs/train.md.", show_default=False)
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="A small Llama on the source of Python's library.")] = False,
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the file; repeatable."),
    ] = [],  # noqa: B006
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.", show_default=False)] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks, as a check.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint.")] = False,
    compare: Annotated[
        str | None,
        typer.Option(metavar="static|S", help="Train again under one strategy (static: the longest's), and compare."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the run's summary as JSON; - is stdout.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a language model; each mini-batch switches between strategies by sequence length.

    Starts its own local ranks, or is one of torchrun's. Exits with 130 after Ctrl-C.
    """
    from fxpar.cli.train import TrainRequest, run_train

    run_train(TrainRequest(config, demo, tuple(set_), steps, ranks, resume, compare, debug, json))
