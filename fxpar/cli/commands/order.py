"""The words of `fxpar order`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Cluster, Debug, GradientMode, Json, ModelOrGraph, NoCache, Objective, Override, Set

EXAMPLES = ("fxpar order llama -s dp4,dp2.tp2,tp4 --cluster c.toml",)


def order_command(
    model: ModelOrGraph,
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", metavar="S,...", help="Strategies of the graphs of a mini-batch.")
    ],
    cluster: Cluster,
    first: Annotated[str | None, typer.Option(metavar="S", help="Fix the first graph (the home layout).")] = None,
    planner: Annotated[str, typer.Option(metavar="P", help="Planner of each switch, as for `switch`.")] = "relay",
    gradients: Annotated[
        GradientMode,
        typer.Option(help="Accumulated gradients go from graph to graph, straight home, or are not counted."),
    ] = GradientMode.chain,
    by: Annotated[Objective, typer.Option(help="Least bytes between nodes, or least seconds.")] = Objective.bytes,
    keep_gb: Annotated[
        float, typer.Option(min=0, help="Memory per device (1e9 bytes) for copies of earlier graphs as sources.")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and gradients on the wire.")] = "bf16",
    json: Json = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Find the order in which the graphs of a mini-batch switch cheapest. Weights are never allocated."""
    from fxpar.cli.order import OrderRequest, run_order
    from fxpar.cli.source import GraphSource

    request = OrderRequest(
        model=GraphSource(model, dtype, options=tuple(set_), overrides=tuple(override), cache=not no_cache),
        strategies=tuple(strategies.split(",")),
        cluster=cluster,
        planner=planner,
        first=first,
        gradients=gradients.value,
        by=by.value,
        keep_gb=keep_gb,
        json=json,
    )
    run_order(request)
