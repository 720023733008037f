"""The words of `fxpar memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Debug, Json, ModelOrGraph, NoCache, Override, Set, World

EXAMPLES = (
    "fxpar memory hf:llama@8b -s tp8+sp+remat --tokens 8192",
    "fxpar memory llama -s dp4.tp2 --cluster c.toml",
)


def memory_command(
    model: ModelOrGraph,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Strategy, such as 'dp2.tp4+sp+remat'.")],
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of one replica's micro-batch.", show_default=False),
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Tokens of its longest document, if it has several.", show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Micro-batches of a mini-batch; from 2 on gradients add up. Default: 2; with pp one per pp rank.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Cluster, .toml or .json: its nodes, and what a device holds.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters in the graph; masters are fp32.")] = "float32",
    json: Json = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Predict what a strategy takes on the fullest rank, and in each pipeline stage. Nothing runs or is allocated."""
    from fxpar.cli.memory import MemoryRequest, run_memory
    from fxpar.cli.source import GraphSource

    source = GraphSource(model, dtype, None, tuple(set_), tuple(override), world, cache=not no_cache)
    if tokens is not None and longest is not None and longest > tokens:
        raise typer.BadParameter(
            f"a document of {longest} tokens is longer than its row of {tokens}", param_hint="--longest"
        )
    run_memory(MemoryRequest(source, strategy, tokens, longest, micro_batches, cluster, json))
