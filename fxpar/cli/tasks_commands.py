"""The words of `fxpar tasks`; as `fxpar.cli.commands` has those of others.

Annotations are read as values, so they are not postponed here.
"""

from dataclasses import dataclass
from typing import Annotated

import typer

from fxpar.cli.commands import CAPACITY, capacity_bytes
from fxpar.cli.names import EXAMPLE_NAMES
from fxpar.cli.options import DeviceMemory, Json, check_ending
from fxpar.ir.strategy_text import MOST_RANKS

ACTIONS = ("plan",)


@dataclass(frozen=True)
class TasksRequest:
    """Plan several tasks that train together: which layers of which encoder run when, and on which devices.

    That is Spindle's problem. ACTION is plan. Nothing runs: FILE is the configuration of a run with tasks
    (TOML), which are captured and priced, or says what a layer takes on how many devices (JSON).
    """

    action: Annotated[str, typer.Argument(metavar="ACTION", help="plan.")]
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Number of devices; a TOML file may say it instead.", show_default=False
        ),
    ] = None
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", help="A run's configuration (TOML), or MetaOps (JSON).", show_default=False),
    ] = ""
    case: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of FILE: clip-4, clip-7, clip-10, ofasys-7 or qwen-val of Spindle's evaluation.",
            show_default=False,
        ),
    ] = None
    devices_per_node: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Devices of a node.")] = 8
    memory: DeviceMemory = None
    json: Json = None
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A page that draws the plan; or, of a run's FILE, that run as planned: FILE.toml.",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise typer.BadParameter(f"{self.action!r} is none of {', '.join(ACTIONS)}", param_hint="ACTION")
        if bool(self.file) == (self.case is not None):
            raise typer.BadParameter("name a file or a --case, one of the two", param_hint="FILE")
        check_ending(
            self.output or "", (".html", ".htm", ".toml"), "it is a page or the run as planned: name it .html or .toml"
        )
        if _names_model(self.file):
            example = f"{self.file}:function" if self.file.endswith(".py") else self.file
            why = f"{self.file!r} names a model, and its tasks are missing: write a TOML file with"
            raise typer.BadParameter(
                f"{why} [model] name = {example!r} and [task.NAME] for each (docs/tasks.md)", param_hint="FILE"
            )
        if self.memory is not None and not CAPACITY.fullmatch(self.memory):
            raise typer.BadParameter(f"{self.memory!r} is not a size such as 80GB or 500MB", param_hint="--memory")
        if self.devices is None and not self.is_model:
            raise typer.BadParameter("say how many devices there are", param_hint="--devices")

    @property
    def memory_bytes(self) -> int | None:
        """What a device holds, as `--memory` says it."""
        return capacity_bytes(self.memory)

    @property
    def is_model(self) -> bool:
        """Whether FILE names a model."""
        return self.file.endswith(".toml")

    @property
    def writes_run(self) -> bool:
        """Whether the run as planned is asked for, not a page."""
        return self.output is not None and self.output.endswith(".toml")


def _names_model(file: str) -> bool:
    """Whether it is what MODEL is for other commands, and no file of tasks."""
    return file.startswith("hf:") or file in EXAMPLE_NAMES or file.partition(":")[0].endswith(".py")
