"""Words of the command line that several commands have, and choices among names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

SUFFIX = ".fxpar"  # of graph files
MODEL_HELP = (
    "hf:TYPE or hf:TYPE@SIZE (transformers), pkg.module:function, file.py:function, or llama, gpt, vit, mlp (built in)."
)
GRAPH_HELP = f"{MODEL_HELP} Or FILE.fxpar, a graph that `fxpar dump -o` wrote."


class Stage(StrEnum):
    logical = "logical"
    annotated = "annotated"
    exec = "exec"


class Backend(StrEnum):
    eager = "eager"
    inductor = "inductor"


class DeviceKind(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class GradientMode(StrEnum):
    chain = "chain"
    home = "home"
    none = "none"


class Objective(StrEnum):
    bytes = "bytes"
    seconds = "seconds"


Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
ModelOrGraph = Annotated[str, typer.Argument(metavar="MODEL", help=GRAPH_HELP, show_default=False)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set an option of the model; repeatable.")]
Override = Annotated[
    list[str],
    typer.Option(metavar="GLOB=PLACE", help="Place parameters by FQN, such as '*.o_proj.weight=R@tp'; repeatable."),
]
World = Annotated[int | None, typer.Option(min=1, help="Number of ranks that the strategy must multiply to.")]
Tokens = Annotated[str | None, typer.Option(metavar="N,...", help="Lengths of the micro-batches, such as 64,37,96.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Capture and lower again, whatever the cache holds.")]
Cluster = Annotated[
    str, typer.Option(metavar="FILE", help="Devices and links, as `fxpar profile` writes them, TOML or JSON.")
]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the parameters in the graph.")]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the result as JSON; - is stdout.", show_default=False)
]
PrecisionText = Annotated[
    str | None,
    typer.Option("--precision", help="What the graph computes in, such as bf16.", show_default=False),
]
