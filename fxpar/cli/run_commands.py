"""The words of the commands that take no MODEL; as `fxpar.cli.commands` has the others.

Annotations are read as values, so they are not postponed here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from fxpar.cli.options import Debug, Json, complete_passes, complete_strategies


@dataclass(frozen=True)
class TrainRequest:
    """Train a language model; each mini-batch switches between strategies by sequence length.

    Starts its own local ranks, or is one of torchrun's. Exits with 130 after Ctrl-C.
    """

    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG.toml", help="What to train; see docs/train.md.", show_default=False)
    ] = None
    demo: Annotated[bool, typer.Option("--demo", help="A small Llama, on Python's own source code.")] = False
    assignments: Annotated[
        tuple[str, ...],
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the file; repeatable."),
    ] = ()
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.", show_default=False)] = None
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks, as a check.", show_default=False),
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Strategies of a plan that `fxpar plan` wrote.", show_default=False),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the latest checkpoint.")] = False
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="static|S",
            help="Train again under one strategy and compare; static: the one of the longest.",
            autocompletion=complete_strategies,
        ),
    ] = None
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a summary of the run as JSON; - is stdout.", show_default=False),
    ] = None
    debug: Debug = False


@dataclass(frozen=True)
class ProfileRequest:
    """Measure devices, memory and links of this machine, and describe them in a cluster file.

    Starts its own local ranks, or is one of torchrun's. Nothing else should be running at the same time.
    """

    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.json", help="The cluster file to write; - is stdout.")
    ] = "cluster.json"
    ranks: Annotated[int, typer.Option(min=1, help="Local ranks to measure with, and their links.")] = 1
    seconds: Annotated[float, typer.Option(min=0.001, max=60, help="Approximate time per measurement.")] = 0.2
    threads: Annotated[int, typer.Option(min=1, max=4096, help="CPU threads per rank, like run.threads.")] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure; auto: GPUs if there is one per rank.")
    ] = "auto"
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False


@dataclass(frozen=True)
class ExportRequest:
    """Write the weights of a checkpoint as safetensors, for transformers and others. One process, without the model."""

    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or the folder of a run (its latest checkpoint).")
    ]
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write; it must be empty or not exist.")]
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights, such as bf16; by default as trained.")] = None


@dataclass(frozen=True)
class PassesRequest:
    """List the passes, describe one, or run one on a dumped graph and show what it changes."""

    name: Annotated[
        str | None,
        typer.Argument(
            help="Show the full description of this pass.", show_default=False, autocompletion=complete_passes
        ),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Run the pass on the graph of `fxpar dump --after PASS -o FILE.fxpar`."),
    ] = None
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the new graph.", show_default=False)
    ] = None
    options: Annotated[
        tuple[str, ...], typer.Option("--set", metavar="FIELD=VALUE", help="Set an option of the pass; repeatable.")
    ] = ()
    text: Annotated[bool, typer.Option("--text", help="Show the nodes that changed.")] = False
    json: Json = None

    def __post_init__(self) -> None:
        if self.on is not None and self.name is None:
            raise typer.BadParameter("name the pass to run", param_hint="--on")
        for word, given in (("--output", self.output), ("--set", self.options), ("--text", self.text)):
            if given and self.on is None:
                raise typer.BadParameter("it only works when a pass runs; name a graph file with --on", param_hint=word)
