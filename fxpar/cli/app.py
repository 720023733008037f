"""The program: its commands in the order of the help, each made of its words, and the options of the program itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import MISSING, Field, fields
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin

import typer

from fxpar.cli import (
    commands,
    plan_commands,
    rounds_commands,
    run_commands,
    simulate_commands,
    switch_commands,
    tasks_commands,
)
from fxpar.cli.console import reporting, working
from fxpar.cli.options import Debug, GraphSource, Offered
from fxpar.cli.usage import Command, Program

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # Help takes the whole width of the terminal, not 80 columns of it.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 10_000},
    help="Capture a model once, lower it to per-rank graphs for any strategy, then check, inspect and train it.",
)

# Name (`check` is `fxpar.cli.check.run_check`), what the list of commands says (one line of 80 columns), its words, its
# examples.
COMMANDS: tuple[tuple[str, str, type, Sequence[str]], ...] = (
    (
        "train",
        "Train a language model, switching strategies by length.",
        run_commands.TrainRequest,
        ("fxpar train --demo", "fxpar train run.toml --steps 10 --compare static"),
    ),
    (
        "plan",
        "Choose strategies for a model, a cluster and lengths.",
        plan_commands.PlanRequest,
        (
            "fxpar plan llama --world 4 --lengths github:1024 \\\n      --tokens-per-step 65536 -o plan.toml",
            "fxpar train run.toml --plan plan.toml",
        ),
    ),
    (
        "simulate",
        "Predict what a set of strategies takes that you name.",
        simulate_commands.SimulateRequest,
        (
            "fxpar simulate llama -s dp4:512 -s cp4 \\\n      --lengths github:1024 --tokens-per-step 65536",
            "fxpar simulate hotspa-table3 --json table3.json",
        ),
    ),
    (
        "rounds",
        "Plan batches as rounds of teams side by side.",
        rounds_commands.RoundsRequest,
        ("fxpar rounds --lengths github:196608 --devices 64 \\\n      --batch 256 --batches 0:4",),
    ),
    (
        "tasks",
        "Plan several tasks that train together, in waves.",
        tasks_commands.TasksRequest,
        ("fxpar tasks plan tasks.json --devices 8", "fxpar tasks plan --case clip-4 --devices 16"),
    ),
    (
        "export",
        "Export a checkpoint's weights as safetensors.",
        run_commands.ExportRequest,
        ("fxpar export runs/chat llama-chat --dtype bf16",),
    ),
    (
        "check",
        "Check loss and gradients of strategies on one device.",
        commands.CheckRequest,
        ("fxpar check hf:qwen3 -s dp2,tp2+sp --dtype float64",),
    ),
    (
        "dump",
        "Print or save the graph of a model, or a pipeline schedule.",
        commands.DumpRequest,
        (
            "fxpar dump llama --strategy dp2.tp2+sp",
            "fxpar dump hf:llama@8b -s dp4.tp8+sp --brief",
            "fxpar dump llama -s tp2 -o llama.fxpar",
        ),
    ),
    (
        "diff",
        "Compare two strategies, two graph files, or passes.",
        commands.DiffRequest,
        (
            "fxpar diff llama -s tp2 -s tp2+sp",
            "fxpar diff llama -s dp2+zero3 --after casts --text",
            "fxpar diff old.fxpar new.fxpar --fqn 'layers.0' --text",
        ),
    ),
    (
        "explain",
        "Explain why a tensor is sharded the way it is.",
        commands.ExplainRequest,
        (
            "fxpar explain hf:llama@8b -s dp4.tp8+sp",
            "fxpar explain llama -s tp2+sp 'layers.*.q_proj.weight'",
            "fxpar explain llama -s dp2.tp2+zero1 all_reduce_2",
        ),
    ),
    (
        "viz",
        "Draw the graph, mesh, timeline and memory on a page.",
        commands.VizRequest,
        (
            "fxpar viz llama -s dp2.tp2+sp,pp2.tp2 -o llama.html",
            "fxpar viz llama -s tp2 -o g.json --format model-explorer",
        ),
    ),
    (
        "memory",
        "Predict memory per rank and per pipeline stage.",
        commands.MemoryRequest,
        ("fxpar memory hf:llama@8b -s tp8+sp+remat --tokens 8192", "fxpar memory llama -s dp4.tp2 --cluster c.toml"),
    ),
    (
        "switch",
        "Plan how weights move between two strategies.",
        switch_commands.SwitchRequest,
        ("fxpar switch llama --from pp2 --to tp2 --cluster c.toml",),
    ),
    (
        "order",
        "Find the cheapest order in which to switch strategies.",
        switch_commands.OrderRequest,
        ("fxpar order llama -s dp4,dp2.tp2,tp4 --cluster c.toml",),
    ),
    (
        "profile",
        "Measure devices, memory and links; write a cluster file.",
        run_commands.ProfileRequest,
        (
            "fxpar profile -o cluster.json",
            "fxpar profile -o cluster.json --ranks 4",
            "torchrun --nproc-per-node 8 -m fxpar profile",
        ),
    ),
    (
        "passes",
        "List passes, describe one, or run one on a graph file.",
        run_commands.PassesRequest,
        ("fxpar passes", "fxpar passes casts", "fxpar passes cleanup --on g.fxpar -o out.fxpar"),
    ),
)


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


def _examples(lines: Sequence[str]) -> str:
    """What stands below the options of a command; `\\b` keeps the lines as they are."""
    return "\b\n" + "\n".join(["Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)])


def _options(words: Any) -> Iterator[tuple[Field[Any], Any, Any]]:
    """(field, its annotation, its default) of all options; those of a graph stand where the graph does."""
    for one in fields(words):
        _, said = get_args(one.type)
        if not isinstance(said, Offered):
            yield one, one.type, one.default
            continue
        for found, hint, default in _options(GraphSource):
            if found.name in ("model", "dtype", *said.options.split()):
                kind, option = get_args(hint)
                if found.name in said.says:
                    option = copy(option)
                    option.help = said.says[found.name]
                default = said.dtype if found.name == "dtype" else default
                default = "" if found.name == "model" and not said.required else default
                yield found, Annotated[kind, option], default


def _parameter(one: Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    """An option in the form that typer reads."""
    kind, option = get_args(hint)
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:  # repeatable
        hint, default = Annotated[list[str], option], []
    if "negated" in one.metadata:
        default = not default
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def command_of(name: str, words: type) -> Callable[..., None]:
    """The function that typer makes a command of: a parameter for each option of `words`, and `--debug`.

    It calls `run_NAME` of `fxpar.cli.NAME` with the words; False means exit status 1.
    """
    found = list(_options(words))
    options = {one.name: one for one, _, _ in found}
    parameters = [_parameter(*each) for each in found]
    if "debug" not in options:
        parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, annotation=Debug, default=False))

    def command(**given: Any) -> None:
        from fxpar.cli.early import check_early

        values: dict[str, Any] = {}
        for key, one in options.items():
            value = not given[key] if "negated" in one.metadata else given[key]
            values[key] = tuple(value) if isinstance(value, list) else value
        own = {key: values.pop(key) for key in words.__dataclass_fields__ if key in values}  # type: ignore[attr-defined]
        request = words(source=GraphSource(**values), **own) if values else words(**own)
        check_early(request)
        if _runner(name)(request) is False:
            raise typer.Exit(1)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = words.__doc__
    return command


def _runner(name: str) -> Callable[[Any], object]:
    """`run_NAME`. What it imports takes seconds, so whoever waits at a terminal sees that at once."""
    with working("starting") if "RANK" not in os.environ else nullcontext():
        return getattr(import_module(f"fxpar.cli.{name}"), f"run_{name}")


for _name, _summary, _words, _lines in COMMANDS:
    app.command(name=_name, cls=Command, short_help=_summary, epilog=_examples(_lines))(
        reporting(command_of(_name, _words))
    )
