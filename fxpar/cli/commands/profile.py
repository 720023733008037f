"""The words of `fxpar profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from fxpar.cli.options import Debug, DeviceKind

EXAMPLES = (
    "fxpar profile -o cluster.json",
    "fxpar profile -o cluster.json --ranks 4",
    "torchrun --nproc-per-node 8 -m fxpar profile",
)


def profile_command(
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.json", help="The cluster file to write; - is stdout.")
    ] = "cluster.json",
    ranks: Annotated[int, typer.Option(min=1, help="Local ranks that measure together, and the links between.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.001, max=60, help="About as long for each measurement.")] = 0.2,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank on a CPU, as run.threads of `train`.")] = 1,
    device: Annotated[DeviceKind, typer.Option(help="What to measure; auto: GPUs if there are enough.")] = (
        DeviceKind.auto
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    debug: Debug = False,
) -> None:
    """Measure devices, memory and links of this machine, and describe them in a cluster file.

    Starts its own local ranks, or is one of torchrun's. Nothing else should run meanwhile.
    """
    from fxpar.cli.profile import ProfileRequest, run_profile

    run_profile(ProfileRequest(output, ranks, seconds, threads, device.value, force))
