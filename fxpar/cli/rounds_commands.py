"""The words of `fxpar rounds`; as `fxpar.cli.commands` has those of others.

Annotations are read as values, so they are not postponed here.
"""

import re
from dataclasses import dataclass
from typing import Annotated

import typer

from fxpar.cli.commands import CAPACITY, capacity_bytes
from fxpar.cli.options import Cluster, GraphSource, Json, Lengths, Offered, Tokenizer, complete_strategies
from fxpar.cli.request import cluster_name
from fxpar.ir.strategy_text import MOST_RANKS

_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})")
_DEGREES = re.compile(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*")
_COST = "flexsp-7b"


@dataclass(frozen=True)
class RoundsRequest:
    """Plan batches as rounds of teams: long sequences on many devices, at the same time short ones on few.

    That is FlexSP's problem. Nothing runs: a cost says what a team takes, or MODEL is priced on a cluster. Batch i is
    the i-th run of --batch lengths.
    """

    source: Annotated[GraphSource, Offered("options precision cache", required=False)]
    devices: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Number of devices.")]
    lengths: Lengths = None
    tokenizer: Tokenizer = None
    devices_per_node: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Devices of a node; a team of no more stands on one. With MODEL as --cluster says.",
        ),
    ] = 8
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Without MODEL: flexsp-7b, the default, flexsp-13b, flexsp-30b, or a JSON file of constants.",
            show_default=False,
        ),
    ] = None
    cluster: Cluster = None
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            metavar="S",
            help="With MODEL: of the largest team, on all devices; smaller ones lose the outermost axes. Default: "
            "cpN+zero3, beyond the key-value heads with a ring.",
            show_default=False,
            autocompletion=complete_strategies,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=2**30, help="Leave out longer sequences.", show_default=False),
    ] = None
    batch: Annotated[int, typer.Option(metavar="N", min=1, max=2**20, help="Sequences of a batch.")] = 512
    batches: Annotated[str, typer.Option(metavar="FIRST:END", help="Batches to plan, END not included.")] = "0:1"
    min_degree: Annotated[int, typer.Option(metavar="N", min=1, help="Devices of a team, at least.")] = 1
    degrees: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Devices that a team may have; default: all powers of two, with MODEL all divisors of --devices.",
            show_default=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(metavar="30GiB", help="What a device holds; default: as the cost says.", show_default=False),
    ] = None
    json: Json = None

    def __post_init__(self) -> None:
        if self.lengths is None:
            raise typer.BadParameter("it is missing", param_hint="--lengths")
        if not _RANGE.fullmatch(self.batches):
            raise typer.BadParameter(f"{self.batches!r} is not FIRST:END, such as 0:10", param_hint="--batches")
        if self.degrees is not None and not _DEGREES.fullmatch(self.degrees):
            raise typer.BadParameter(f"{self.degrees!r} is not a list such as 1,2,4,8", param_hint="--degrees")
        if self.memory is not None and not CAPACITY.fullmatch(self.memory):
            raise typer.BadParameter(f"{self.memory!r} is not a size such as 30GiB or 500MB", param_hint="--memory")
        if self.source.model and self.cost is not None:
            why = "it is of no MODEL; name the devices that yours is priced on: --cluster h100 or FILE"
            raise typer.BadParameter(why, param_hint="--cost")
        if self.cluster is not None and not self.source.model:
            raise typer.BadParameter("a model is priced on it; name MODEL", param_hint="--cluster")
        if self.strategy is not None and not self.strategy.strip():
            raise typer.BadParameter("it is empty; name a strategy, or leave it out", param_hint="--strategy")
        if self.strategy is not None and not self.source.model:
            raise typer.BadParameter("it is of a model; name MODEL", param_hint="--strategy")

    @property
    def priced_by(self) -> str:
        """What says how long a team takes."""
        return cluster_name(self.cluster) if self.source.model else self.cost or _COST

    @property
    def strategy_texts(self) -> list[str]:
        """None: smaller teams have others."""
        return []

    @property
    def batch_range(self) -> range:
        """Numbers of the batches."""
        first, end = map(int, self.batches.split(":"))
        return range(first, end)

    @property
    def team_degrees(self) -> tuple[int, ...]:
        """Those of `--degrees`, or all powers of two, from `--min-degree` on; of a model, whose teams are priced as
        replicas on all devices, all divisors.
        """
        if self.degrees is not None:
            return tuple(sorted({degree for one in self.degrees.split(",") if (degree := int(one)) >= self.min_degree}))
        if self.source.model:
            some = range(self.min_degree, self.devices + 1)
            return tuple(degree for degree in some if self.devices % degree == 0)
        powers = (2**power for power in range(self.devices.bit_length()))
        return tuple(degree for degree in powers if degree >= self.min_degree)

    @property
    def memory_bytes(self) -> int | None:
        """What a device holds, as `--memory` says it."""
        return capacity_bytes(self.memory)

    @property
    def memory_gib(self) -> float | None:
        """The same in GiB."""
        return None if self.memory_bytes is None else self.memory_bytes / 2**30
