"""`StepTime`: what a strategy is predicted to take, per micro-batch and per mini-batch, beside what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.cost.calls import handed_on_s, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.polynomial import Polynomial, sequences_of
from fxpar.ir.exec_graph import Program
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.ir.sent import ONCE, tokens_of


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one rank (of the slowest ranks of a pipeline, its bubble left out).

    `micro_batch_s`: a micro-batch of `tokens`, each row of it one document; `mini_batch_s`: what runs once (prologue,
    epilogue).
    """

    micro_batch_s: float
    mini_batch_s: float
    tokens: int

    @property
    def per_token_s(self) -> float:
        """Of a micro-batch."""
        return self.micro_batch_s / self.tokens

    def line(self) -> str:
        """`4.1 ms per micro-batch (67.2 µs per token), 0.1 ms once per mini-batch`."""
        each, token = self.micro_batch_s * 1e3, self.per_token_s * 1e6
        once = f"{self.mini_batch_s * 1e3:.3g} ms once per mini-batch"
        return f"{each:.3g} ms per micro-batch ({token:.3g} µs per token), {once}"

    def to_json(self) -> dict[str, float]:
        """The fields, and the seconds per token."""
        return {**vars(self), "per_token_s": self.per_token_s}


def step_time(program: Program, cluster: ClusterSpec, sizes: Mapping[str, int]) -> StepTime:
    """Of `program` on `cluster` with its dynamic dims at `sizes` by name.

    Raises ClusterError for a cluster with fewer devices than ranks.
    """
    cluster.require(program.strategy.world)
    sums: dict[tuple[Mesh, bool], Polynomial] = {}
    for index, stage in enumerate(program.placed):
        names = {name: part for name, part in stage.parts.items() if name not in ("input_part", "weight_part")}
        for cost in node_costs(stage, cluster, parts=names):
            key = stage.mesh, cost.part in ONCE
            sums[key] = sums.get(key, Polynomial()) + cost.exposed
        if isinstance(program, PipelineGraph):
            for kind in ("sent", "sent_grad"):
                key = stage.mesh, False
                sums[key] = sums.get(key, Polynomial()) + handed_on_s(program, index, kind, cluster)
    lengths = sequences_of(program, sizes).lengths
    slowest = {
        once: max((float(p.over(lengths)) for (_, o), p in sums.items() if o == once), default=0.0) for once in (0, 1)
    }
    return StepTime(slowest[0], slowest[1], tokens_of(program.inputs, {d.symbol: sizes[d.name] for d in program.dims}))


__all__ = ["StepTime", "step_time"]
