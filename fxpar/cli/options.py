"""Options of the command line that several commands have, each written once: type, default and text for the user.

Annotations are read as values, so they are not postponed here.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from fxpar.cli.names import SUFFIX
from fxpar.ir.module_rules import split_outside
from fxpar.ir.strategy_text import MOST_RANKS

_MODEL_HELP = (
    "hf:TYPE, hf:TYPE@SIZE or hf:./FOLDER (transformers), pkg.module:function, file.py:function, or llama, gpt, vit, "
    "mlp (built in). Or FILE.fxpar, a graph that `fxpar dump -o` wrote; for `viz` also a plan of `fxpar plan -o`."
)


def complete_models(incomplete: str) -> list[str]:
    """What the shell offers for MODEL; imported at TAB only."""
    from fxpar.cli import complete

    return complete.models(incomplete)


def complete_strategies(incomplete: str) -> list[str]:
    """What the shell offers for a strategy."""
    from fxpar.cli import complete

    return complete.strategies(incomplete)


def complete_passes(incomplete: str) -> list[str]:
    """What the shell offers for a name of a pass."""
    from fxpar.cli import complete

    return complete.passes(incomplete)


_MOST_MICRO_BATCHES = 4096  # each is simulated: more take minutes, and no mini-batch has them

_CLUSTER_HELP = (
    "Devices and links, as `fxpar profile` writes them, TOML or JSON, or a kind of node by name, such as h100. Where "
    "times need one: by default usual GPUs, eight to a node."
)
Cluster = Annotated[str | None, typer.Option(metavar="FILE", help=_CLUSTER_HELP, show_default=False)]
Tflops = Annotated[
    float | None,
    typer.Option(
        min=1e-6,
        max=1e6,
        metavar="N",
        help="What a device sustains of products and attention (1e12 operations per second); wins over the cluster's.",
        show_default=False,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST_MICRO_BATCHES,
        help="Micro-batches of a mini-batch; from 2 on gradients add up. Default: 2, with pp two per pp rank.",
        show_default=False,
    ),
]
_NAMES = ("--strategy", "-s", "--strategies")
Strategies = Annotated[
    tuple[str, ...],
    typer.Option(
        *_NAMES,
        metavar="S,...",
        autocompletion=complete_strategies,
        help="Strategies, such as dp2,tp2+sp,dp2.pp2+zb_h1; repeatable. Not for a file that holds a lowered graph.",
        show_default=False,
    ),
]
OneStrategy = Annotated[
    tuple[str, ...],
    typer.Option(
        *_NAMES,
        metavar="S",
        help="Strategy, such as dp2.tp4+sp or pp4.tp2.",
        show_default=False,
        autocompletion=complete_strategies,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the result as JSON; - is stdout.", show_default=False)
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME:N",
        help="Lengths in tokens: a file (.txt, .json, .npy, .npz), or commoncrawl:32768, github:N, wikipedia:N; or a "
        "corpus, FOLDER:N.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Of a corpus that --lengths names: its tokenizer.json.", show_default=False),
]
TokensPerStep = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=2**40, help="Tokens of a mini-batch.", show_default=False)
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="80GB", help="What a device holds; default: as the cluster says.", show_default=False),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Price switches and reductions as hidden behind the groups: so it is on CPU ranks, not on GPUs.",
    ),
]


def check_ending(path: str, endings: Sequence[str], what: str) -> None:
    """A file whose name says that it holds something else is opened by the wrong program, or by none. Raises
    typer.BadParameter unless the name of `path` ends in one of `endings`, or has no ending.
    """
    ending = os.path.splitext(path)[1]
    if ending and ending.lower() not in endings:
        raise typer.BadParameter(f"{what}, and {path!r} ends in {ending}", param_hint="--output")


def split_strategies(given: Sequence[str]) -> list[str]:
    """["dp2", "tp2", "cp2"] for ("dp2,tp2", "cp2"): repeated options, each a list."""
    return [text for one in given for text in split_outside(one, ",")]


def one_strategy(given: Sequence[str]) -> str | None:
    """The strategy of a command that takes one. Raises typer.BadParameter for several."""
    found = split_strategies(given)
    if len(found) > 1:
        why = f"this command takes one strategy, and there are {len(found)}: {', '.join(found)}"
        raise typer.BadParameter(why, param_hint="--strategy")
    return found[0] if found else None


@dataclass(frozen=True)
class GraphSource:
    """What MODEL and its options say: which graph a command reads. `model` may be a graph file; `cache` False captures
    and lowers anew.
    """

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False, autocompletion=complete_models)
    ]
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
            help="Set the placement of parameters by FQN, such as '*.o_proj.weight=R@tp'; repeatable.",
        ),
    ] = ()
    world: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Number of ranks that every strategy must have.")
    ] = None
    precision: Annotated[
        str | None, typer.Option(help="Precision of the computation, such as bf16.", show_default=False)
    ] = None
    storage: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype in which parameters are stored.", show_default=False)
    ] = None
    cache: Annotated[bool, typer.Option("--no-cache", help="Capture and lower again, ignoring the cache.")] = field(
        default=True, metadata={"negated": True}
    )

    @property
    def is_file(self) -> bool:
        return self.model.endswith(SUFFIX)

    @property
    def is_plan(self) -> bool:
        return self.model.endswith(".toml")


@dataclass(frozen=True)
class Offered:
    """Beside a GraphSource in the words of a command: options that it offers besides MODEL and `--dtype`, default of
    the latter, whether MODEL must be there, and texts of options that mean something more to it.
    """

    options: str = "tokens options overrides world precision storage cache"
    dtype: str = "float32"
    required: bool = True  # MODEL
    says: Mapping[str, str] = field(default_factory=dict)
