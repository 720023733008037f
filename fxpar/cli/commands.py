"""The words of each command that takes a MODEL: a dataclass whose fields are its options, its docstring the help.

Nothing here imports torch. What a command does is in the module of its name; `fxpar.cli.app` puts both together.
Annotations are read as values, so they are not postponed here.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from fxpar.cli.names import SUFFIX
from fxpar.cli.options import (
    Cluster,
    Debug,
    GraphSource,
    Json,
    MicroBatches,
    Offered,
    OneStrategy,
    Strategies,
    Tflops,
    check_ending,
    complete_models,
    complete_passes,
    one_strategy,
    split_strategies,
)
from fxpar.ir.pass_names import SHARING

CAPACITY = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([mg]i?b)", re.IGNORECASE)
_CAPACITY_UNITS = {"mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
_STAGES = ("logical", "annotated", "exec")
_FORMS = {SUFFIX: "graph", ".json": "json", ".dot": "dot"}  # of a dump, by the ending of its file
_PICTURES = (".html", ".htm", ".pdf", ".png", ".svg")
_PAGES: dict[str, tuple[tuple[str, ...], str]] = {  # by format: endings of its file, and what to say of others
    "html": ((".html", ".htm"), "a page is HTML: name it .html (--format json writes its data)"),
    "json": ((".json",), "the data of a page is JSON: name it .json"),
    "model-explorer": ((".json",), "graphs for Model Explorer are JSON: name them .json"),
}


def capacity_bytes(text: str | None) -> int | None:
    """Bytes of "80GB": GB are 1e9, GiB 2**30. None if it says no size."""
    if text is None or (found := CAPACITY.fullmatch(text)) is None:
        return None
    return round(float(found[1]) * _CAPACITY_UNITS[found[2].lower()])


@dataclass(frozen=True)
class CheckRequest:
    """Run all ranks of each strategy in this process; compare loss and gradients with one device.

    Exits with 1 if a strategy disagrees or cannot run.
    """

    takes_rounds: ClassVar[bool] = True  # of `rounds(cp4)` all formations
    source: Annotated[
        GraphSource,
        Offered(
            "tokens options overrides world precision cache",
            says={
                "dtype": "Dtype of the parameters; float64 checks to 1e-10.",
                "cache": "As always here: weights and batches are needed, so the model is captured each time.",
            },
        ),
    ]
    strategies: Strategies = ()
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON; - is stdout.")] = None
    compile: Annotated[Literal["eager", "inductor"], typer.Option(help="How the graphs of the ranks run.")] = "eager"
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest relative error (default: by dtype).", show_default=False)
    ] = None
    packed: Annotated[
        bool, typer.Option("--force-packing", help="Pack documents into rows even if that is not proved safe.")
    ] = False
    padded: Annotated[bool, typer.Option("--force-padding", help="Pad rows even if the model sees the padding.")] = (
        False
    )
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and data.")] = 0
    debug: Debug = False

    def __post_init__(self) -> None:
        if not self.strategies and not self.source.is_file:
            raise typer.BadParameter("name the strategies to check, such as -s dp2,tp2+sp", param_hint="--strategy")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise typer.BadParameter("it must be a finite number >= 0", param_hint="--tolerance")

    @property
    def strategy_texts(self) -> list[str]:
        """Those that the words name, one by one."""
        return split_strategies(self.strategies)


@dataclass(frozen=True)
class DumpRequest:
    """Print or save the graph of a model at one stage, or its pipeline's schedule. Weights are never allocated."""

    source: Annotated[GraphSource, Offered(says={"storage": "Dtype in which parameters are stored, if different."})]
    strategies: OneStrategy = ()
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="[logical|annotated|exec|N]",
            help="Default: exec with a strategy, logical without. N: only this pipeline stage.",
            show_default=False,
        ),
    ] = None
    after: Annotated[
        str | None,
        typer.Option(
            metavar="PASS",
            autocompletion=complete_passes,
            help="The graph after this pass: a name or step of `fxpar passes`; the buffers after share_weights, which "
            "takes several strategies.",
        ),
    ] = None
    fqn: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only nodes of these modules, such as 'layers.0.*'.")
    ] = None
    rank: Annotated[
        int | None, typer.Option(min=0, help="As this rank runs it: its process groups, shards and bytes.")
    ] = None
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the pipeline's schedule instead of its graphs.")
    ] = False
    micro_batches: MicroBatches = None
    format: Annotated[
        Literal["text", "json", "dot", "graph"] | None,
        typer.Option(
            help="Output format; by default as FILE ends: .json, .dot, or .fxpar (graph, to load again); else text."
        ),
    ] = None
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is stdout.")] = "-"
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Short for --format json --output FILE.", show_default=False)
    ] = None
    fold: Annotated[bool, typer.Option("--fold/--full", help="Print identical layers once, or all layers.")] = True
    brief: Annotated[bool, typer.Option("--brief", help="Parameters and collectives only, no nodes.")] = False
    cluster: Cluster = None
    tflops: Tflops = None

    def __post_init__(self) -> None:
        if self.output.lower().endswith(_PICTURES):
            why = f"a dump is text, JSON, DOT or a graph, and {self.output!r} names a page or a picture: see fxpar viz"
            raise typer.BadParameter(why, param_hint="--output")
        named = self.strategy is not None or self.source.is_file  # a graph file may hold what a strategy made
        if self.stage is not None and self.level is None and self.pipeline_stage is None:
            known = ", ".join(map(repr, _STAGES))
            why = f"{self.stage!r} is not one of {known}, nor the number of a pipeline stage"
            raise typer.BadParameter(why, param_hint="--stage")
        if self.stage not in (None, "logical") and not named:
            raise typer.BadParameter(f"stage {self.stage} needs a strategy", param_hint="--strategy")
        if self.schedule and (self.stage is not None or not named):
            raise typer.BadParameter("it needs a strategy, and takes no --stage", param_hint="--schedule")
        if self.micro_batches is not None and not self.schedule:
            raise typer.BadParameter("it only works together with --schedule", param_hint="--micro-batches")
        if self.after is not None and (self.strategy is None or (self.stage is not None and self.level is not None)):
            raise typer.BadParameter("it needs a strategy, and a --stage can only be a number", param_hint="--after")
        for option, value in (("--cluster", self.cluster), ("--tflops", self.tflops)):
            if value is not None and (not named or self.level in ("logical", "annotated")):
                raise typer.BadParameter("times are those of a lowered graph; name a strategy", param_hint=option)

    @property
    def strategy(self) -> str | None:
        """The one that the words name, if any; the first where several share weights."""
        found = split_strategies(self.strategies)
        return found[0] if self.after == SHARING and found else one_strategy(self.strategies)

    @property
    def strategy_texts(self) -> list[str]:
        """Those that are looked at: the logical graph has none, and storage all."""
        if self.after == SHARING:
            return split_strategies(self.strategies)
        return [] if self.strategy is None or self.level == "logical" else [self.strategy]

    @property
    def level(self) -> str | None:
        """How far the graph has come; None if `--stage` does not say it."""
        return self.stage if self.stage in _STAGES else None

    @property
    def pipeline_stage(self) -> int | None:
        """The stage of a pipeline that `--stage` names; None for all of them."""
        return int(self.stage) if self.stage and self.stage.isascii() and self.stage.isdigit() else None

    @property
    def target(self) -> str:
        """The file to write, "-" for stdout."""
        return self.output if self.json is None else self.json

    @property
    def form(self) -> str:
        """text, json, dot or graph."""
        if self.json is not None:
            return "json"
        return self.format or _FORMS.get(os.path.splitext(self.output)[1].lower(), "text")


@dataclass(frozen=True)
class DiffRequest:
    """Compare two strategies of a model, two graph files, or a graph before and after a pass."""

    source: Annotated[GraphSource, Offered()]
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="A second graph file or MODEL.",
            show_default=False,
            autocompletion=complete_models,
        ),
    ] = None
    strategies: Strategies = ()
    passes: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="P1 P2",
            help="After these two passes (name or step).",
            show_default=False,
            autocompletion=complete_passes,
        ),
    ] = None
    before: Annotated[
        str | None,
        typer.Option(
            metavar="PASS",
            autocompletion=complete_passes,
            help="Compare from before this pass; alone: what the pass changes.",
            show_default=False,
        ),
    ] = None
    after: Annotated[
        str | None,
        typer.Option(
            metavar="PASS",
            autocompletion=complete_passes,
            help="Compare to after this pass; alone: what the pass changes.",
            show_default=False,
        ),
    ] = None
    fqn: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only these modules, such as 'layers.0'.", show_default=False)
    ] = None
    text: Annotated[bool, typer.Option("--text", "--nodes", help="Show the nodes that differ.")] = False
    brief: Annotated[bool, typer.Option("--brief", help="Only the tables, not where nodes differ.")] = False
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if the graphs differ.")] = False
    json: Json = None

    def __post_init__(self) -> None:
        if self.text and self.brief:
            raise typer.BadParameter("it contradicts --text", param_hint="--brief")
        if self.passes is not None and (self.before is not None or self.after is not None):
            raise typer.BadParameter("it cannot be combined with --before or --after", param_hint="--passes")

    @property
    def strategy_texts(self) -> list[str]:
        """Those that the words name, one by one."""
        return split_strategies(self.strategies)


@dataclass(frozen=True)
class ExplainRequest:
    """Explain why a tensor is sharded the way it is: the alternatives, their cost, and which op needs which reshard."""

    source: Annotated[GraphSource, Offered()]
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODE|FQN]",
            help="A parameter or module (globs too), a node such as mm_3, a collective such as all_reduce_2. "
            "If left out: the strategy as a whole.",
            show_default=False,
        ),
    ] = None
    strategies: OneStrategy = ()
    stage: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only this pipeline stage.", show_default=False)
    ] = None
    passes: Annotated[bool, typer.Option("--passes", help="Also show what passes add for a parameter.")] = False
    top: Annotated[int, typer.Option(min=1, help="Modules to list in the summary.")] = 12
    cluster: Cluster = None
    json: Json = None

    def __post_init__(self) -> None:
        one_strategy(self.strategies)

    @property
    def strategy(self) -> str | None:
        """The one that the words name, if any."""
        return one_strategy(self.strategies)

    @property
    def strategy_texts(self) -> list[str]:
        """It, or none."""
        return [] if self.strategy is None else [self.strategy]


@dataclass(frozen=True)
class VizRequest:
    """Draw a model under strategies: one page that opens offline, with graph, mesh, timeline and memory."""

    takes_plans: ClassVar[bool] = True  # MODEL may be a plan, which says model and strategies

    source: Annotated[GraphSource, Offered("options overrides world precision cache")]
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - is stdout.", show_default=False)
    ] = ""
    strategies: Strategies = ()
    format: Annotated[
        Literal["html", "json", "model-explorer"],
        typer.Option(help="A page, its data, or graphs and overlays for Model Explorer."),
    ] = "html"
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Short for --format json --output FILE.", show_default=False)
    ] = None
    cluster: Cluster = None
    tflops: Tflops = None
    tokens: Annotated[
        int | None, typer.Option(min=1, max=2**30, help="Tokens per micro-batch of one replica.", show_default=False)
    ] = None
    micro_batches: MicroBatches = None
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the predicted step for Perfetto.", show_default=False)
    ] = None
    open: Annotated[bool, typer.Option("--open", help="Open the page, or Model Explorer, once it is written.")] = False
    trust_plan: Annotated[
        bool, typer.Option("--trust-plan", help="Run the Python function that a plan names as its model.")
    ] = False

    def __post_init__(self) -> None:
        if not self.target:
            raise typer.BadParameter("name the file to write, such as -o page.html", param_hint="--output / -o")
        check_ending(self.target, *_PAGES[self.form])

    @property
    def target(self) -> str:
        """The file to write, "-" for stdout."""
        return self.output if self.json is None else self.json

    @property
    def form(self) -> str:
        """html, json or model-explorer."""
        return self.format if self.json is None else "json"

    @property
    def strategy_texts(self) -> list[str]:
        """Those that the words name, one by one."""
        return split_strategies(self.strategies)


@dataclass(frozen=True)
class MemoryRequest:
    """Predict the memory of a strategy on the fullest rank and in each pipeline stage. Nothing is run or allocated."""

    takes_rounds: ClassVar[bool] = True  # of `rounds(cp4)` all formations
    source: Annotated[
        GraphSource,
        Offered(
            "options overrides world cache",
            says={"dtype": "Dtype of the parameters in the graph; masters are fp32."},
        ),
    ]
    strategies: Strategies = ()
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=2**30, help="Tokens per micro-batch of one replica.", show_default=False),
    ] = None
    longest: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of its longest document, if it has several.", show_default=False),
    ] = None
    micro_batches: MicroBatches = None
    cluster: Cluster = None
    capacity: Annotated[
        str | None,
        typer.Option(metavar="80GB", help="Memory of a device, to say whether it fits.", show_default=False),
    ] = None
    json: Json = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise typer.BadParameter("name a strategy, such as -s dp2.tp4+sp+remat", param_hint="--strategy")
        if self.capacity is not None and not CAPACITY.fullmatch(self.capacity):
            raise typer.BadParameter(f"{self.capacity!r} is not a size such as 80GB", param_hint="--capacity")
        if self.tokens is not None and self.longest is not None and self.longest > self.tokens:
            why = f"a document of {self.longest} tokens is longer than its row of {self.tokens}"
            raise typer.BadParameter(why, param_hint="--longest")

    @property
    def strategy_texts(self) -> list[str]:
        return split_strategies(self.strategies)

    @property
    def device_bytes(self) -> int | None:
        """What a device holds, as `--capacity` says it."""
        return capacity_bytes(self.capacity)
