"""The words of `fxpar switch`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Cluster, Debug, Json, ModelOrGraph, NoCache, Override, Set

EXAMPLES = ("fxpar switch llama --from pp2 --to tp2 --cluster c.toml",)


def switch_command(
    model: ModelOrGraph,
    source: Annotated[str, typer.Option("--from", metavar="S1", help="Strategy before, such as pp2.tp16.")],
    target: Annotated[str, typer.Option("--to", metavar="S2", help="Strategy after, such as dp8.tp4.")],
    cluster: Cluster,
    planner: Annotated[
        str,
        typer.Option(
            metavar="P", help="first_come, round_robin, hotspa, relay, auto (the fastest of them), or an installed one."
        ),
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Dtype of the weights on the wire.")] = "bf16",
    json: Json = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Plan the switch of a model's weights between two strategies. Weights are never allocated."""
    from fxpar.cli.source import GraphSource
    from fxpar.cli.switch import SwitchRequest, run_switch

    read = GraphSource(model, dtype, options=tuple(set_), overrides=tuple(override), cache=not no_cache)
    run_switch(SwitchRequest(read, source, target, cluster, planner, json))
