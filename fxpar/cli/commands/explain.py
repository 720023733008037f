"""The words of `fxpar explain`."""

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
    "fxpar explain hf:llama@8b -s dp4.tp8+sp",
    "fxpar explain llama -s tp2+sp 'layers.*.q_proj.weight'",
    "fxpar explain llama -s dp2.tp2+zero1 all_reduce_2",
)


def explain_command(
    model: ModelOrGraph,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODE|FQN]",
            help="A parameter or module (globs too), a node such as mm_3, a collective such as all_reduce_2. "
            "Without: the strategy as a whole.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", metavar="S", help="Strategy, such as dp2.tp4+sp.", show_default=False),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="This pipeline stage alone.", show_default=False)
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Also say what passes add for a parameter.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Modules to list in the summary.")] = 12,
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
    """Say why a value lies as it does: the alternatives, what each would cost, and who asked for which reshard."""
    from fxpar.cli.explain import ExplainRequest, run_explain
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
    run_explain(ExplainRequest(source, strategy, subject, stage, passes, top, json))
