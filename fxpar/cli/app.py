"""The program: its commands in the order of the help, each made of its words, and the options of the program itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fxpar.cli.usage import Program
from fxpar.cli.values import ReadsWords

# Name (`check` is `fxpar.cli.check.run_check`), what the list of commands says (one line of 80 columns), its words, its
# examples.
COMMANDS: tuple[tuple[str, str, str, Sequence[str]], ...] = (
    (
        "train",
        "Train a language model, switching strategies by length.",
        "run_commands:TrainRequest",
        ("fxpar train --demo", "fxpar train run.toml --steps 10 --compare static"),
    ),
    (
        "plan",
        "Choose strategies for a model, a cluster and lengths.",
        "plan_commands:PlanRequest",
        (
            "fxpar plan llama --world 4 --lengths github:1024 \\\n      --tokens-per-step 65536 -o plan.toml",
            "fxpar train run.toml --plan plan.toml",
        ),
    ),
    (
        "simulate",
        "Predict what a set of strategies takes that you name.",
        "simulate_commands:SimulateRequest",
        (
            "fxpar simulate llama -s dp4:512 -s cp4 \\\n      --lengths github:1024 --tokens-per-step 65536",
            "fxpar simulate hotspa-table3 --json table3.json",
        ),
    ),
    (
        "rounds",
        "Plan batches as rounds of teams side by side.",
        "rounds_commands:RoundsRequest",
        ("fxpar rounds --lengths github:196608 --devices 64 \\\n      --batch 256 --batches 0:4",),
    ),
    (
        "tasks",
        "Plan several tasks that train together, in waves.",
        "tasks_commands:TasksRequest",
        ("fxpar tasks plan tasks.json --devices 8", "fxpar tasks plan --case clip-4 --devices 16"),
    ),
    (
        "export",
        "Export a checkpoint's weights as safetensors.",
        "run_commands:ExportRequest",
        ("fxpar export runs/chat llama-chat --dtype bf16",),
    ),
    (
        "check",
        "Check loss and gradients of strategies on one device.",
        "commands:CheckRequest",
        ("fxpar check hf:qwen3 -s dp2,tp2+sp --dtype float64",),
    ),
    (
        "dump",
        "Print or save the graph of a model, or a pipeline schedule.",
        "commands:DumpRequest",
        (
            "fxpar dump llama --strategy dp2.tp2+sp",
            "fxpar dump hf:llama@8b -s dp4.tp8+sp --brief",
            "fxpar dump llama -s tp2 -o llama.fxpar",
        ),
    ),
    (
        "diff",
        "Compare two strategies, two graph files, or passes.",
        "commands:DiffRequest",
        (
            "fxpar diff llama -s tp2 -s tp2+sp",
            "fxpar diff llama -s dp2+zero3 --after casts --text",
            "fxpar diff old.fxpar new.fxpar --fqn 'layers.0' --text",
        ),
    ),
    (
        "explain",
        "Explain why a tensor is sharded the way it is.",
        "commands:ExplainRequest",
        (
            "fxpar explain hf:llama@8b -s dp4.tp8+sp",
            "fxpar explain llama -s tp2+sp 'layers.*.q_proj.weight'",
            "fxpar explain llama -s dp2.tp2+zero1 all_reduce_2",
        ),
    ),
    (
        "viz",
        "Draw the graph, mesh, timeline and memory on a page.",
        "commands:VizRequest",
        (
            "fxpar viz llama -s dp2.tp2+sp,pp2.tp2 -o llama.html",
            "fxpar viz llama -s tp2 -o g.json --format model-explorer",
        ),
    ),
    (
        "memory",
        "Predict memory per rank and per pipeline stage.",
        "commands:MemoryRequest",
        ("fxpar memory hf:llama@8b -s tp8+sp+remat --tokens 8192", "fxpar memory llama -s dp4.tp2 --cluster c.toml"),
    ),
    (
        "switch",
        "Plan how weights move between two strategies.",
        "switch_commands:SwitchRequest",
        ("fxpar switch llama --from pp2 --to tp2 --cluster c.toml",),
    ),
    (
        "order",
        "Find the cheapest order in which to switch strategies.",
        "switch_commands:OrderRequest",
        ("fxpar order llama -s dp4,dp2.tp2,tp4 --cluster c.toml",),
    ),
    (
        "profile",
        "Measure devices, memory and links; write a cluster file.",
        "run_commands:ProfileRequest",
        (
            "fxpar profile -o cluster.json",
            "fxpar profile -o cluster.json --ranks 4",
            "torchrun --nproc-per-node 8 -m fxpar profile",
        ),
    ),
    (
        "passes",
        "List passes, describe one, or run one on a graph file.",
        "run_commands:PassesRequest",
        ("fxpar passes", "fxpar passes casts", "fxpar passes cleanup --on g.fxpar -o out.fxpar"),
    ),
)


@functools.cache
def command_named(name: str) -> TyperCommand:
    """One of the commands, with its options, which alone are read for it. Raises KeyError."""
    from fxpar.cli.command import build_command

    _, summary, words, examples = {one[0]: one for one in COMMANDS}[name]
    place, _, cls = words.partition(":")
    return build_command(name, summary, getattr(import_module(f"fxpar.cli.{place}"), cls), examples)


class Fxpar(ReadsWords, Program):
    """Lists its commands by their summaries; the one that is called is made then."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, summary, *_ in COMMANDS:
            self.add_command(TyperCommand(name, short_help=summary, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else command_named(name), rest


app = typer.Typer(
    cls=Fxpar,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # Help takes the whole width of the terminal, not 80 columns of it.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 10_000},
    help="Capture a model once, lower it to per-rank graphs for any strategy, then check, inspect and train it.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from fxpar.version import __version__

        typer.echo(f"fxpar {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Nothing to do: options are those of the commands."""
