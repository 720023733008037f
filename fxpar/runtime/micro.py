"""`MicroRun`: one micro-batch of a replica, as a bound program takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.exec_graph import Program


@dataclass(frozen=True)
class MicroRun:
    """`load()` gives the replica's batch, whole and padded; it is called when the micro-batch starts.

    An idle one adds exact zeros and leaves the buffers alone: its replica has nothing left to do but must take part in
    what the others do.
    """

    load: Callable[[], Mapping[str, Tensor]]
    scale: float
    seed: int = 0
    idle: bool = False


def replica_of(program: Program, rank: int) -> int:
    """The data-parallel replica of a rank."""
    first, part = next((f, p) for f, p in program.placed if f <= rank < f + p.strategy.world)
    return part.strategy.mesh.coordinate(rank - first).get("dp", 0)


def local_batch(
    program: Program, batch: Mapping[str, Tensor], rank: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """The pieces of a replica's (padded) batch that `rank` of the program's mesh works on."""
    found = {}
    for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
        if info.kind == "batch":
            piece = stored.dist.take(batch[info.fqn], rank)
            found[info.fqn] = piece if device is None else piece.to(device, non_blocking=True)
    return found
