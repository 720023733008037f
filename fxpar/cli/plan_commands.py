"""The words of `fxpar plan`; as `fxpar.cli.commands` has those of others.

Annotations are read as values, so they are not postponed here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from fxpar.cli.commands import CAPACITY, capacity_bytes
from fxpar.cli.options import (
    Cluster,
    DeviceMemory,
    GraphSource,
    Json,
    Lengths,
    Offered,
    Overlap,
    Tokenizer,
    TokensPerStep,
    check_ending,
)
from fxpar.cost.cluster import shipped

_OF_MODEL = ("cluster", "lengths", "tokenizer", "tokens_per_step", "max_tokens_per_step", "output", "verify")
_OF_GALVATRON = ("profiles", "devices", "batch", "seq_len", "uniform", "micro_batches", "layers", "hidden")


@dataclass(frozen=True)
class PlanRequest:
    """Choose the strategies that train a model fastest on a cluster, for sequences of given lengths.

    Nothing runs and no weight is allocated: strategies are lowered and priced. The plan is a file for `fxpar train`.
    With `--cost galvatron` there is no model but Galvatron's profile of one, and each layer gets its strategy.
    """

    source: Annotated[GraphSource, Offered("options world precision cache", required=False)]
    cluster: Cluster = None
    lengths: Lengths = None
    tokenizer: Tokenizer = None
    tokens_per_step: TokensPerStep = None
    max_tokens_per_step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=2**40,
            help="Largest mini-batch to try, if --tokens-per-step is not given.",
            show_default=False,
        ),
    ] = None
    max_strategies: Annotated[int, typer.Option(metavar="K", min=1, max=6, help="Strategies at most.")] = 3
    memory: DeviceMemory = None
    best: Annotated[int, typer.Option(min=1, max=16, help="Different plans to show, best first.")] = 3
    overlap: Overlap = False
    rules: Annotated[bool, typer.Option("--rules", help="Search rules per module too; takes 2 to 3 times as long.")] = (
        False
    )
    teams: Annotated[bool, typer.Option("--teams", help="Search strategies side by side too.")] = False
    rounds: Annotated[bool, typer.Option("--rounds", help="Search teams for rounds too.")] = False
    rings: Annotated[
        bool, typer.Option("--rings", help="Search rings too, where there are fewer key-value heads than cp needs.")
    ] = False
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Mini-batches that plans are priced with: 8, or as few as have 4,096 sequences, at least 2.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed by which mini-batches are drawn from the lengths.")
    ] = 0
    verify: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=16, help="Run the N best plans on local ranks, and measure.", show_default=False
        ),
    ] = None
    cost: Annotated[
        Literal["fxpar", "galvatron"], typer.Option(help="Whose cost model: fxpar's, or Galvatron's on its profiles.")
    ] = "fxpar"
    profiles: Annotated[
        str | None, typer.Option(metavar="DIR", help="Galvatron: its profiles of a model.", show_default=False)
    ] = None
    devices: Annotated[
        int | None, typer.Option(min=1, max=2**16, help="Galvatron: number of devices.", show_default=False)
    ] = None
    batch: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Galvatron: sequences of a step.", show_default=False)
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(min=1, max=2**24, help="Galvatron: tokens of a sequence.", show_default=False)
    ] = None
    uniform: Annotated[bool, typer.Option("--uniform", help="Galvatron: one strategy for all layers.")] = False
    micro_batches: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Galvatron: fix their number.", show_default=False)
    ] = None
    layers: Annotated[
        int, typer.Option(min=0, max=2**16, help="Galvatron: layers of the model; 0: as its name says.")
    ] = 0
    hidden: Annotated[int, typer.Option(min=0, max=2**24, help="Galvatron: its hidden size; 0: as its name says.")] = 0
    imported: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Show a plan of Galvatron's as strategies; -o writes it.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the plan.", show_default=False)
    ] = None
    json: Json = None

    def __post_init__(self) -> None:
        if self.imported is not None:
            self._check_import()
            return
        if self.memory is not None and not CAPACITY.fullmatch(self.memory):
            raise typer.BadParameter(f"{self.memory!r} is not a size such as 80GB or 500MB", param_hint="--memory")
        check_ending(
            self.output or "", (".toml",), "a plan is TOML: name it .toml (--json writes what is printed as JSON)"
        )
        galvatron = self.cost == "galvatron"
        for name in _OF_MODEL if galvatron else _OF_GALVATRON:
            if getattr(self, name) not in (None, False, 0):
                of_model = "it is for a MODEL; --cost galvatron has --profiles, --devices, --batch, --seq-len, --memory"
                why = of_model if galvatron else "it is for --cost galvatron"
                raise typer.BadParameter(why, param_hint=_option(name))
        if galvatron and self.source.model:
            raise typer.BadParameter("the profile is the model of --cost galvatron", param_hint="MODEL")
        if not galvatron and not self.source.model:
            raise typer.BadParameter("name a model, such as hf:llama@8b", param_hint="MODEL")
        if self.tokens_per_step is not None and self.max_tokens_per_step is not None:
            why = "it is for a search of the size, and --tokens-per-step says it; leave one of them out"
            raise typer.BadParameter(why, param_hint="--max-tokens-per-step")
        needed = ("profiles", "devices", "batch", "seq_len", "memory") if galvatron else ("lengths",)
        for name in needed:
            if getattr(self, name) is None:
                raise typer.BadParameter("it is missing", param_hint=_option(name))
        if not galvatron and self.cluster is None and self.source.world is None:
            raise typer.BadParameter("name a cluster file, or --world N for usual GPUs", param_hint="--cluster")
        if self.cluster in shipped() and self.source.world is None:
            why = f"{self.cluster} is a kind of node: say on how many ranks"
            raise typer.BadParameter(why, param_hint="--world")

    def _check_import(self) -> None:
        """What is written is for a model and for sequences of a length; without either it is only shown."""
        given = {"MODEL": self.source.model or None, "--seq-len": self.seq_len, "--output": self.output}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            why = "--import writes a plan with MODEL, --seq-len N and -o FILE; to see the plan only, give none of them"
            raise typer.BadParameter(f"it is missing: {why}", param_hint=missing[0])
        if self.source.world is not None and self.devices not in (None, self.source.world):
            why = f"{self.source.world} ranks are not --devices {self.devices}: say one of them"
            raise typer.BadParameter(why, param_hint="--world")

    @property
    def ranks(self) -> int | None:
        """For how many a plan of Galvatron's shall be, if it is said."""
        return self.source.world if self.devices is None else self.devices

    @property
    def strategy_texts(self) -> list[str]:
        """None: they are what is looked for."""
        return []

    @property
    def memory_bytes(self) -> int | None:
        """What a device holds, as `--memory` says it."""
        return capacity_bytes(self.memory)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
