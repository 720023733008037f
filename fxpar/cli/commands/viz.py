"""The words of `fxpar viz`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fxpar.cli.options import Debug, Dtype, ModelOrGraph, NoCache, Override, PrecisionText, Set, World

EXAMPLES = (
    "fxpar viz llama -s dp2.tp2+sp,pp2.tp2 -o llama.html",
    "fxpar viz llama -s tp2 -o g.json --format model-explorer",
)


class ViewFormat(StrEnum):
    html = "html"
    json = "json"
    model_explorer = "model-explorer"


def viz_command(
    model: ModelOrGraph,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is stdout.")],
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", "-s", metavar="S,...", help="Strategies, such as dp2.tp4+sp,pp2.tp4.", show_default=False
        ),
    ] = None,
    format_: Annotated[
        ViewFormat,
        typer.Option("--format", help="A page, its data, or graphs for Model Explorer with overlays beside them."),
    ] = ViewFormat.html,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What times are predicted for; by default usual GPUs, eight to a node."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a row of a replica's micro-batch.", show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a mini-batch.", show_default=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the predicted step for Perfetto.", show_default=False)
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Open the page, or Model Explorer, when it is written.")
    ] = False,
    dtype: Dtype = "float32",
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    precision: PrecisionText = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Draw a model under strategies: one page that opens offline, with graph, mesh, timeline and memory."""
    from fxpar.cli.source import GraphSource
    from fxpar.cli.viz import VizRequest, run_viz

    source = GraphSource(
        model, dtype, None, tuple(set_), tuple(override), world, precision=precision, cache=not no_cache
    )
    texts = tuple(strategy.split(",")) if strategy else ()
    run_viz(VizRequest(source, texts, output, format_.value, cluster, tokens, micro_batches, trace, open_))
