"""The words of `fxpar simulate`; as `fxpar.cli.commands` has those of others.

Annotations are read as values, so they are not postponed here.
"""

import re
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from fxpar.cli.commands import CAPACITY, capacity_bytes
from fxpar.cli.names import EXAMPLE_NAMES
from fxpar.cli.options import (
    Cluster,
    DeviceMemory,
    GraphSource,
    Json,
    Lengths,
    Offered,
    Overlap,
    Strategies,
    Tokenizer,
    TokensPerStep,
    complete_strategies,
    split_strategies,
)
from fxpar.errors import UnknownModelError, nearest
from fxpar.ir.module_rules import split_outside

TABLES = ("hotspa-fig8", "hotspa-table3", "hspmd-pair", "hspmd")  # of papers, each a function of `fxpar.cli.simulate`
_ASSIGNMENT = re.compile(r"\w+=")
_OF_LENGTHS = ("lengths", "tokenizer", "tokens_per_step", "samples", "seed")
_OF_MODEL = ("cluster", *_OF_LENGTHS, "memory", "given", "strategies", "overlap")
_SET_HELP = "KEY=VALUE, an option of the model; or as -s. Repeatable."


@dataclass(frozen=True)
class SimulateRequest:
    """Predict what a set of strategies takes that you name, as `fxpar plan` does for those that it finds.

    Nothing runs and no weight is allocated. Instead of a model, MODEL may be a published table to reproduce:
    hotspa-fig8 (bytes and times of switches), hotspa-table3 (gains of length groups), hspmd-pair (a set of HotSPa's
    against one strategy on H20), hspmd (HSPMD's strategies side by side against a set of HotSPa's).
    """

    source: Annotated[GraphSource, Offered("options world precision cache", says={"options": _SET_HELP})]
    given: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="[STRATEGY]...",
            help="Strategies of the set, as for -s; STRATEGY:LIMIT gives the longest sequence, in tokens.",
            show_default=False,
            autocompletion=complete_strategies,
        ),
    ] = ()
    strategies: Strategies = ()
    cluster: Cluster = None
    lengths: Lengths = None
    tokenizer: Tokenizer = None
    tokens_per_step: TokensPerStep = None
    memory: DeviceMemory = None
    overlap: Overlap = False
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Mini-batches that the set is priced with.")] = 8
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed by which mini-batches are drawn from the lengths.")
    ] = 0
    json: Json = None

    def __post_init__(self) -> None:
        if self.table is not None:
            given = [
                one.name for one in fields(self) if one.name in _OF_MODEL and getattr(self, one.name) != one.default
            ]
            of_graph = {"set": self.source.options, "world": self.source.world, "precision": self.source.precision}
            for name in (*given, *(name for name, value in of_graph.items() if value)):
                raise typer.BadParameter(f"it is not for {self.table}, which has its own", param_hint=_option(name))
            return
        if re.fullmatch(r"[\w-]+", self.source.model) and nearest(self.source.model, TABLES):
            raise UnknownModelError.of(self.source.model, EXAMPLE_NAMES, TABLES)
        if self.memory is not None and not CAPACITY.fullmatch(self.memory):
            raise typer.BadParameter(f"{self.memory!r} is not a size such as 80GB or 500MB", param_hint="--memory")
        for name in ("lengths", "tokens_per_step"):
            if getattr(self, name) is None:
                raise typer.BadParameter("it is missing", param_hint=_option(name))
        if not self.named:
            raise typer.BadParameter(
                "name the strategies of the set, such as -s dp4:512 -s cp4", param_hint="--strategy"
            )

    @property
    def table(self) -> str | None:
        """The published table that MODEL names."""
        return self.source.model if self.source.model in TABLES else None

    @property
    def named(self) -> list[str]:
        """The strategies of the set, with their limits."""
        by_set = (one for one in self.source.options if not _ASSIGNMENT.match(one))
        return split_strategies((*by_set, *self.strategies, *self.given))

    @property
    def model_options(self) -> tuple[str, ...]:
        """What `--set` says of the model."""
        return tuple(one for one in self.source.options if _ASSIGNMENT.match(one))

    @property
    def strategy_texts(self) -> list[str]:
        """Without limits."""
        return [split_outside(text, ":")[0] for text in self.named]

    @property
    def memory_bytes(self) -> int | None:
        """What a device holds, as `--memory` says it."""
        return capacity_bytes(self.memory)


def _option(name: str) -> str:
    named = {"given": "STRATEGY", "strategies": "--strategy"}
    return named.get(name, "--" + name.replace("_", "-"))
