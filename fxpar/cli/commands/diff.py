"""The words of `fxpar diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import (
    Debug,
    Dtype,
    Json,
    ModelOrGraph,
    NoCache,
    Override,
    PrecisionText,
    Set,
    Tokens,
    World,
)

EXAMPLES = (
    "fxpar diff llama -s tp2 -s tp2+sp",
    "fxpar diff llama -s dp2+zero3 --after casts --text",
    "fxpar diff old.fxpar new.fxpar --fqn 'layers.0' --text",
)


def diff_command(
    model: ModelOrGraph,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="A second graph file or MODEL.", show_default=False)
    ] = None,
    strategy: Annotated[
        list[str], typer.Option("--strategy", "-s", metavar="S", help="Strategy, such as dp2.tp4+sp; give it twice.")
    ] = [],  # noqa: B006
    strategies: Annotated[
        str | None, typer.Option(metavar="S1,S2", help="Short for -s S1 -s S2.", show_default=False)
    ] = None,
    passes: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="P1 P2", help="After these two passes (name or step).", show_default=False),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="PASS", help="From before this pass; without --after: what it does.", show_default=False),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="PASS", help="To after this pass; without --before: what it does.", show_default=False),
    ] = None,
    fqn: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only these modules, such as 'layers.0'.", show_default=False)
    ] = None,
    text: Annotated[bool, typer.Option("--text", "--nodes", help="Show the nodes that differ.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="The tables alone, without where nodes differ.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the graphs differ.")] = False,
    dtype: Dtype = "float32",
    storage: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype in which parameters are stored.", show_default=False)
    ] = None,
    tokens: Tokens = None,
    precision: PrecisionText = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    json: Json = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Compare two strategies of a model, two graph files, or a graph before and after a pass."""
    if text and brief:
        raise typer.BadParameter("it is the opposite of --text", param_hint="--brief")
    if passes is not None and (before is not None or after is not None):
        raise typer.BadParameter("it goes without --before and --after", param_hint="--passes")
    from fxpar.cli.diff import DiffRequest, run_diff
    from fxpar.cli.source import GraphSource

    source = GraphSource(
        model=model,
        dtype=dtype,
        tokens=tokens,
        options=tuple(set_),
        overrides=tuple(override),
        world=world,
        precision=precision,
        storage=storage,
        cache=not no_cache,
    )
    request = DiffRequest(
        source=source,
        other=other,
        strategies=(*strategy, *(strategies.split(",") if strategies else ())),
        passes=passes,
        before=before,
        after=after,
        fqn=fqn,
        text=text,
        brief=brief,
        json=json,
    )
    if run_diff(request) and exit_code:
        raise typer.Exit(1)
