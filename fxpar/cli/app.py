"""The commands and their options; each body lives in a file of its own and is imported when it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fxpar.cli.console import reporting

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Capture a model once, lower it to per-rank graphs of any parallel strategy, see and check them.",
)

MODEL_HELP = (
    "hf:TYPE or hf:TYPE@SIZE (transformers), pkg.module:function, file.py:function, or llama, gpt, vit, mlp (built in)."
)


class Stage(StrEnum):
    logical = "logical"
    annotated = "annotated"
    exec = "exec"


class Format(StrEnum):
    text = "text"
    json = "json"


class Backend(StrEnum):
    eager = "eager"
    inductor = "inductor"


class Gradients(StrEnum):
    chain = "chain"
    home = "home"
    none = "none"


class Objective(StrEnum):
    bytes = "bytes"
    seconds = "seconds"


Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set an option of the model; repeatable.")]
Override = Annotated[
    list[str],
    typer.Option(metavar="GLOB=PLACE", help="Place parameters by FQN, such as '*.o_proj.weight=R@tp'; repeatable."),
]
World = Annotated[int | None, typer.Option(min=1, help="Number of ranks that the strategy must multiply to.")]
Tokens = Annotated[str | None, typer.Option(metavar="N,...", help="Lengths of the micro-batches, such as 64,37,96.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Cluster = Annotated[
    str, typer.Option(metavar="FILE", help="TOML or JSON: nodes, devices_per_node, intra_gb_per_s, inter_gb_per_s, ...")
]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
PrecisionText = Annotated[
    str | None,
    typer.Option("--precision", help="What the graph computes in, such as bf16.", show_default=False),
]


def _version(wanted: bool) -> None:
    if wanted:
        from fxpar import __version__

        typer.echo(f"fxpar {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Nothing to do: options are those of the commands."""


@app.command(name="check")
@reporting
def check_command(
    model: Model,
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", metavar="S,...", help="Strategies, such as dp2,tp2+sp,dp2.pp2+zb_h1.")
    ],
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters; float64 checks to 1e-10.")] = "float32",
    tokens: Tokens = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON; - is stdout.")] = None,
    set_: Set = [],  # noqa: B006 - typer copies it
    override: Override = [],  # noqa: B006
    world: World = None,
    compile_: Annotated[Backend, typer.Option("--compile", help="How the graphs of the ranks run.")] = Backend.eager,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error (default: by dtype).", show_default=False)
    ] = None,
    precision: PrecisionText = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Run all ranks of each strategy in this process; compare loss and gradients with one device.

    Exits with 1 if a strategy misses or cannot be run.
    """
    from fxpar.cli.check import CheckRequest, run_check

    request = CheckRequest(
        model=model,
        strategies=tuple(strategies.split(",")),
        dtype=dtype,
        tokens=tokens,
        json=json,
        options=tuple(set_),
        overrides=tuple(override),
        world=world,
        compile=compile_.value,
        tolerance=tolerance,
        seed=seed,
        debug=debug,
        precision=precision,
    )
    if not run_check(request):
        raise typer.Exit(1)


@app.command(name="dump")
@reporting
def dump_command(
    model: Model,
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
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the pipeline's schedule instead of its graphs.")
    ] = False,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches of the schedule (default: one per pp rank).", show_default=False),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="Form of the output.")] = Format.text,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is stdout.")] = "-",
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Short for --format json --output FILE.", show_default=False)
    ] = None,
    fold: Annotated[bool, typer.Option("--fold/--full", help="Print equal layers once, or all of them.")] = True,
    brief: Annotated[bool, typer.Option("--brief", help="Parameters and collectives only, no nodes.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters in the graph.")] = "float32",
    storage: Annotated[
        str | None, typer.Option(help="Dtype in which ranks keep the parameters, if another.", show_default=False)
    ] = None,
    tokens: Tokens = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    precision: PrecisionText = None,
    debug: Debug = False,
) -> None:
    """Print the graph of a model at one stage, or its pipeline's schedule. Weights are never allocated."""
    from fxpar.cli.dump import DumpRequest, run_dump

    level, pipeline_stage = _level(stage, strategy)
    if level is not Stage.logical and strategy is None:
        raise typer.BadParameter(f"stage {stage} needs a strategy", param_hint="--strategy")
    if schedule and (stage is not None or strategy is None):
        raise typer.BadParameter("it needs a strategy, and takes no stage", param_hint="--schedule")
    if micro_batches is not None and not schedule:
        raise typer.BadParameter("it is for --schedule", param_hint="--micro-batches")
    request = DumpRequest(
        model=model,
        strategy=None if level is Stage.logical else strategy,
        stage=level.value,
        pipeline_stage=pipeline_stage,
        schedule=schedule,
        micro_batches=micro_batches,
        as_json=json is not None or format_ is Format.json,
        output=output if json is None else json,
        fold=fold,
        brief=brief,
        dtype=dtype,
        storage=storage,
        tokens=tokens,
        options=tuple(set_),
        overrides=tuple(override),
        world=world,
        precision=precision,
    )
    run_dump(request)


def _level(stage: str | None, strategy: str | None) -> tuple[Stage, int | None]:
    """What `--stage` says: how far the graph has come, and the pipeline stage."""
    if stage is None:
        return (Stage.exec if strategy else Stage.logical), None
    if stage in [level.value for level in Stage]:
        return Stage(stage), None
    if stage.isascii() and stage.isdigit():
        return Stage.exec, int(stage)
    known = ", ".join(repr(level.value) for level in Stage)
    raise typer.BadParameter(f"{stage!r} is not one of {known}, and no number of a stage", param_hint="--stage")


@app.command(name="passes")
@reporting
def passes_command(
    name: Annotated[
        str | None, typer.Argument(help="Show the whole description of this pass.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """List the passes, or describe one."""
    from fxpar.cli.passes import run_passes

    run_passes(name)


@app.command(name="switch")
@reporting
def switch_command(
    model: Model,
    source: Annotated[str, typer.Option("--from", metavar="S1", help="Strategy before, such as pp2.tp16.")],
    target: Annotated[str, typer.Option("--to", metavar="S2", help="Strategy after, such as dp8.tp4.")],
    cluster: Cluster,
    planner: Annotated[
        str, typer.Option(metavar="P", help="first_come, round_robin, hotspa, relay, or auto: the fastest of them.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Dtype of the weights on the wire.")] = "bf16",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the plan's numbers; - is stdout.")] = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Plan the switch of a model's weights between two strategies. Weights are never allocated."""
    from fxpar.cli.switch import SwitchRequest, run_switch

    run_switch(SwitchRequest(model, source, target, cluster, planner, dtype, json, tuple(set_), tuple(override)))


@app.command(name="order")
@reporting
def order_command(
    model: Model,
    strategies: Annotated[
        str, typer.Option("--strategies", "-s", metavar="S,...", help="Strategies of the graphs of a mini-batch.")
    ],
    cluster: Cluster,
    first: Annotated[str | None, typer.Option(metavar="S", help="Fix the first graph (the home layout).")] = None,
    planner: Annotated[str, typer.Option(metavar="P", help="Planner of each switch, as for `switch`.")] = "relay",
    gradients: Annotated[
        Gradients, typer.Option(help="Accumulated gradients go from graph to graph, straight home, or are not counted.")
    ] = Gradients.chain,
    by: Annotated[Objective, typer.Option(help="Least bytes between nodes, or least seconds.")] = Objective.bytes,
    keep_gb: Annotated[
        float, typer.Option(min=0, help="Memory per device (1e9 bytes) for copies of earlier graphs as sources.")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and gradients on the wire.")] = "bf16",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write all numbers; - is stdout.")] = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Find the order in which the graphs of a mini-batch switch cheapest. Weights are never allocated."""
    from fxpar.cli.order import OrderRequest, run_order

    request = OrderRequest(
        model=model,
        strategies=tuple(strategies.split(",")),
        cluster=cluster,
        planner=planner,
        dtype=dtype,
        first=first,
        gradients=gradients.value,
        by=by.value,
        keep_gb=keep_gb,
        json=json,
        options=tuple(set_),
        overrides=tuple(override),
    )
    run_order(request)


@app.command(name="memory")
@reporting
def memory_command(
    model: Model,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="Strategy, such as 'dp2.tp4+sp+remat'.")],
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of one replica's micro-batch.", show_default=False)
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
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters in the graph; masters are fp32.")] = "float32",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the numbers as JSON; - is stdout.")] = None,
    set_: Set = [],  # noqa: B006
    override: Override = [],  # noqa: B006
    world: World = None,
    debug: Debug = False,
) -> None:
    """Predict what a strategy takes on the fullest rank, and in each pipeline stage. Nothing runs or is allocated."""
    from fxpar.cli.memory import MemoryRequest, run_memory

    options, overrides = tuple(set_), tuple(override)
    run_memory(MemoryRequest(model, strategy, tokens, longest, micro_batches, dtype, json, options, overrides, world))


@app.command(name="train")
@reporting
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
    debug: Debug = False,
) -> None:
    """Train a language model; each mini-batch switches between strategies by sequence length.

    Starts its own local ranks, or is one of torchrun's. Exits with 130 after Ctrl-C.
    """
    from fxpar.cli.train import TrainRequest, run_train

    run_train(TrainRequest(config, demo, tuple(set_), steps, ranks, resume, compare, debug))
