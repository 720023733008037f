"""The words of the commands that plan switches; as `fxpar.cli.commands` has the others.

Annotations are read as values, so they are not postponed here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from fxpar.cli.options import Cluster, GraphSource, Json, Offered, Strategies, complete_strategies, split_strategies


@dataclass(frozen=True)
class SwitchRequest:
    """Plan how a model's weights move between two strategies. Weights are never allocated."""

    source: Annotated[
        GraphSource,
        Offered("options overrides world cache", dtype="bf16", says={"dtype": "Dtype of the weights on the wire."}),
    ]
    before: Annotated[
        str,
        typer.Option(
            "--from", metavar="S1", autocompletion=complete_strategies, help="Strategy before, such as pp2.tp16."
        ),
    ]
    after: Annotated[
        str,
        typer.Option("--to", metavar="S2", autocompletion=complete_strategies, help="Strategy after, such as dp8.tp4."),
    ]
    cluster: Cluster = None
    planner: Annotated[
        str,
        typer.Option(
            metavar="P", help="first_come, round_robin, hotspa, relay, auto (the fastest of them), or an installed one."
        ),
    ] = "auto"
    json: Json = None

    @property
    def strategy_texts(self) -> list[str]:
        """Before and after."""
        return [self.before, self.after]


@dataclass(frozen=True)
class OrderRequest:
    """Find the cheapest order in which to run the strategies of a mini-batch. Weights are never allocated."""

    source: Annotated[
        GraphSource,
        Offered(
            "options overrides world cache", dtype="bf16", says={"dtype": "Dtype of weights and gradients on the wire."}
        ),
    ]
    strategies: Strategies = ()
    cluster: Cluster = None
    first: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="The strategy that runs first.",
            show_default=False,
            autocompletion=complete_strategies,
        ),
    ] = None
    planner: Annotated[str, typer.Option(metavar="P", help="Planner of each switch, as for `switch`.")] = "auto"
    gradients: Annotated[
        Literal["home", "chain", "none"],
        typer.Option(
            help="home: weights come from the optimizer's layout and gradients go there, as in training. chain: "
            "HotSPa's flow, the first strategy is that layout and gradients go from one to the next. none: without."
        ),
    ] = "home"
    by: Annotated[
        Literal["bytes", "seconds"], typer.Option(help="Least seconds, as in training, or bytes between nodes.")
    ] = "seconds"
    keep_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            help="Memory per device (1e9 B) for copies of earlier strategies as sources. Default: all stay, as in "
            "training; of HotSPa's flow none.",
            show_default=False,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=2**40, metavar="N", help="Of a mini-batch, for figures per token.", show_default=False),
    ] = None
    json: Json = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise typer.BadParameter("name the strategies to order, such as -s dp4,tp4", param_hint="--strategy")

    @property
    def strategy_texts(self) -> list[str]:
        """Those that the words name, one by one."""
        return split_strategies(self.strategies)
