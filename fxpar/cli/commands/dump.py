"""The words of `fxpar dump`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fxpar.cli.options import (
    SUFFIX,
    Debug,
    Dtype,
    ModelOrGraph,
    NoCache,
    Override,
    PrecisionText,
    Set,
    Stage,
    Tokens,
    World,
)

EXAMPLES = (
    "fxpar dump llama --strategy dp2.tp2+sp",
    "fxpar dump hf:llama@8b -s dp4.tp8+sp --brief",
    "fxpar dump llama -s tp2 -o llama.fxpar",
)


class Format(StrEnum):
    text = "text"
    json = "json"
    dot = "dot"
    graph = "graph"


def dump_command(
    model: ModelOrGraph,
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", help="Strategy, such as dp2.tp4+sp or pp4.tp2.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="[logical|annotated|exec|N]",
            help="Default: exec with a strategy, logical without. N: this pipeline stage alone.",
            show_default=False,
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="PASS", help="The graph after this pass: a name or step of `fxpar passes`."),
    ] = None,
    fqn: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only nodes of these modules, such as 'layers.0.*'.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="As this rank runs it: its process groups, pieces and bytes.")
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the pipeline's schedule instead of its graphs.")
    ] = False,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches of the schedule (default: one per pp rank).", show_default=False),
    ] = None,
    format_: Annotated[
        Format | None,
        typer.Option("--format", help="Form of the output; graph, a file to load again, if FILE ends in .fxpar."),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is stdout.")] = "-",
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Short for --format json --output FILE.", show_default=False)
    ] = None,
    fold: Annotated[bool, typer.Option("--fold/--full", help="Print equal layers once, or all of them.")] = True,
    brief: Annotated[bool, typer.Option("--brief", help="Parameters and collectives only, no nodes.")] = False,
    dtype: Dtype = "float32",
    storage: Annotated[
        str | None, typer.Option(help="Dtype in which ranks keep the parameters, if another.", show_default=False)
    ] = None,
    tokens: Tokens = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    precision: PrecisionText = None,
    no_cache: NoCache = False,
    debug: Debug = False,
) -> None:
    """Print or save the graph of a model at one stage, or its pipeline's schedule. Weights are never allocated."""
    from fxpar.cli.dump import DumpRequest, run_dump
    from fxpar.cli.source import GraphSource

    level, pipeline_stage = _level(stage)
    named = strategy is not None or model.endswith(SUFFIX)  # a graph file may hold what a strategy made
    if level not in (None, Stage.logical) and not named:
        raise typer.BadParameter(f"stage {stage} needs a strategy", param_hint="--strategy")
    if schedule and (stage is not None or not named):
        raise typer.BadParameter("it needs a strategy, and takes no stage", param_hint="--schedule")
    if micro_batches is not None and not schedule:
        raise typer.BadParameter("it is for --schedule", param_hint="--micro-batches")
    if after is not None and (strategy is None or (stage is not None and pipeline_stage is None)):
        raise typer.BadParameter("it needs a strategy, and no stage but that of a pipeline", param_hint="--after")
    target = output if json is None else json
    form = Format.json if json is not None else format_
    if form is None:
        form = Format.graph if target.endswith(".fxpar") else Format.text
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
    request = DumpRequest(
        source=source,
        strategy=None if level is Stage.logical else strategy,
        stage=level.value if level else None,
        pipeline_stage=pipeline_stage,
        after=after,
        fqn=fqn,
        rank=rank,
        schedule=schedule,
        micro_batches=micro_batches,
        form=form.value,
        output=target,
        fold=fold,
        brief=brief,
    )
    run_dump(request)


def _level(stage: str | None) -> tuple[Stage | None, int | None]:
    """What `--stage` says: how far the graph has come, and the pipeline stage."""
    if stage is None:
        return None, None
    if stage in [level.value for level in Stage]:
        return Stage(stage), None
    if stage.isascii() and stage.isdigit():
        return Stage.exec, int(stage)
    known = ", ".join(repr(level.value) for level in Stage)
    raise typer.BadParameter(f"{stage!r} is not one of {known}, and no number of a stage", param_hint="--stage")
