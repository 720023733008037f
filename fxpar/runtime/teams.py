"""Programs side by side: `BoundTeam`, this rank's one of several strategies; `BoundElsewhere`, one of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ir.pipeline_graph import TeamsGraph, TrainGraph
from fxpar.runtime.arrivals import Arrivals
from fxpar.runtime.bound import BoundGraph
from fxpar.runtime.micro import MicroRun, replica_of
from fxpar.runtime.pipeline import BoundPipeline
from fxpar.runtime.runner import Made, unheard
from fxpar.runtime.spans import NO_SPANS, Spans


class BoundTeam:
    """The program of a rank's team, called like any other. `replica` and `replicas` (those beside it) are as all teams'
    are counted. Nobody waits for another team: a group ends with the loss and metrics of the team, or of a replica of
    it. `tells` says whether this rank counts where all are added up, as `total` does over `ranks`, the process group of
    all teams.
    """

    pace = None  # teams get on in paces of their own: weights come before a group, gradients leave behind it

    def __init__(self, teams: TeamsGraph, bound: BoundGraph | BoundPipeline, ranks: Any) -> None:
        number = teams.team_of(bound.rank)
        self.program, self.rank = bound.program, bound.rank
        self.replica, self.replicas = replica_of(teams, bound.rank), teams.beside(number)
        self._bound, self._ranks = bound, ranks
        self.tells = bound.rank == teams.mesh_of(number).ranks[0] if bound.tells is None else bound.tells

    def prepare(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        arrivals: Arrivals | None = None,
        begun: Mapping[str, Tensor] | None = None,
    ) -> None:
        """See `TrainRunner.prepare`; nothing is begun."""
        self._bound.prepare(params, buffers, arrivals)

    def run_all(self, micro_batches: Sequence[MicroRun], spans: Spans = NO_SPANS, made: Made = unheard) -> None:
        """See `BoundGraph.run_all`. Gradients are handed on when the group ends, when all teams have theirs."""
        self._bound.run_all(micro_batches, spans)

    def finish(self) -> dict[str, Any]:
        """End a group: reduce within the team. Results as of `BoundGraph.finish`; loss and metrics are the team's."""
        return self._bound.finish()

    def run_forward(self, micro_batches: Sequence[MicroRun]) -> dict[str, Tensor]:
        """As `BoundPipeline.run_forward`, of the team or of a replica of it."""
        return self._bound.run_forward(micro_batches)

    def total(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over teams of what each has found; all ranks of all teams call it."""
        sums = torch.stack([value.double() * self.tells for value in mine.values()])
        dist.all_reduce(sums, group=self._ranks)
        return {name: one.to(value.dtype) for (name, value), one in zip(mine.items(), sums, strict=True)}


class BoundElsewhere:
    """A program that other ranks run. This one only takes part in its switches and reductions."""

    pace, tells = None, False

    def __init__(self, program: TrainGraph, rank: int) -> None:
        self.program, self.rank = program, rank
        self.replica, self.replicas = 0, range(program.strategy.replicas)

    def prepare(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        arrivals: Arrivals | None = None,
        begun: Mapping[str, Tensor] | None = None,
    ) -> None:
        """See `TrainRunner.prepare`."""

    def run_all(self, micro_batches: Sequence[MicroRun], spans: Spans = NO_SPANS, made: Made = unheard) -> None:
        """See `BoundGraph.run_all`."""
        made({})

    def finish(self) -> dict[str, Any]:
        """Results as of `BoundGraph.finish`: this rank has none."""
        sums = self.run_forward(())
        return {"loss": sums.pop("loss"), "metrics": sums, "grads": {}, "buffers": {}, "experts": {}}

    def run_forward(self, micro_batches: Sequence[MicroRun]) -> dict[str, Tensor]:
        """As `BoundPipeline.run_forward`: zeros."""
        names = [out.fqn for out in self.program.outputs if out.kind == "loss"]
        return dict(zip(names, torch.zeros(len(names)), strict=True))
