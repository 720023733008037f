"""Options of the command line that several commands have, each written once: type, default and text for the user.

Annotations are read as values, so they are not postponed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

SUFFIX = ".fxpar"  # of graph files
_MODEL_HELP = (
    "hf:TYPE, hf:TYPE@SIZE or hf:./FOLDER (transformers), pkg.module:function, file.py:function, or llama, gpt, vit, "
    "mlp (built in). Or FILE.fxpar, a graph that `fxpar dump -o` wrote."
)

Cluster = Annotated[
    str, typer.Option(metavar="FILE", help="Devices and links, as `fxpar profile` writes them, TOML or JSON.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the result as JSON; - is stdout.", show_default=False)
]


@dataclass(frozen=True)
class GraphSource:
    """What MODEL and its options say: which graph a command reads. `model` may be a graph file; `cache` False captures
    and lowers anew.
    """

    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters in the graph.")] = "float32"
    tokens: Annotated[
        str | None, typer.Option(metavar="N,...", help="Lengths of the micro-batches, such as 64,37,96.")
    ] = None
    options: Annotated[
        tuple[str, ...], typer.Option("--set", metavar="KEY=VALUE", help="Set an option of the model; repeatable.")
    ] = ()
    overrides: Annotated[
        tuple[str, ...],
        typer.Option(
            "--override",
            metavar="GLOB=PLACE",
            help="Place parameters by FQN, such as '*.o_proj.weight=R@tp'; repeatable.",
        ),
    ] = ()
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks that the strategy must multiply to.")] = None
    precision: Annotated[
        str | None, typer.Option(help="What the graph computes in, such as bf16.", show_default=False)
    ] = None
    storage: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype in which parameters are stored.", show_default=False)
    ] = None
    cache: Annotated[bool, typer.Option("--no-cache", help="Capture and lower again, whatever the cache holds.")] = (
        field(default=True, metadata={"negated": True})
    )

    @property
    def is_file(self) -> bool:
        return self.model.endswith(SUFFIX)


@dataclass(frozen=True)
class Offered:
    """Beside a GraphSource in the words of a command: options that it offers besides MODEL and `--dtype`, default of
    the latter, and texts of options that mean something more to it.
    """

    options: str = "tokens options overrides world precision storage cache"
    dtype: str = "float32"
    says: Mapping[str, str] = field(default_factory=dict)
