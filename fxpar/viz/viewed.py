"""`Viewed`: one strategy of the page, and what every tab reads off it: sizes, bytes on the wire, predicted times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.cost.polynomial import Sequences, sequences_of
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import LogicalGraph, run_dims, run_sizes
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.memory import steady_micro_batches


@dataclass(frozen=True)
class Viewed:
    """A model under one strategy.

    `graph`: lowered by itself (casts and gathers in the prologue, reductions in the epilogue). `stored`: lowered for a
    weight store, as a run has it and memory is predicted from. `sizes`: dynamic dims of a micro-batch by name, those of
    the example where missing. `cluster` and `tflops` (of a device, instead of the cluster's) are None where the user
    named none.
    """

    strategy: str
    graph: TrainGraph
    logical: LogicalGraph | None = None
    stored: TrainGraph | None = None
    cluster: ClusterSpec | None = None
    sizes: Mapping[str, int] | None = None
    micro_batches: int | None = None
    tflops: float | None = None

    @property
    def links(self) -> ClusterSpec:
        """The cluster that times are predicted for: nodes of eight usual GPUs where the user named none."""
        return (self.cluster or usual_cluster(self.graph.strategy.world)).sustaining(self.tflops)

    @property
    def stages(self) -> tuple[Program, ...]:
        """The program of each pipeline stage; without pp of the whole model."""
        return self.graph.placed

    def whole_sizes(self) -> dict[str, int]:
        """The dynamic dims by name, rounded up as the runtime pads them. Raises DimNameError."""
        return run_sizes(self.graph, self.sizes)

    def dims(self) -> dict[sympy.Symbol, int]:
        """The same by symbol, for `TensorMeta.numel` and `Communication.wire_bytes`."""
        return run_dims(self.graph, self.sizes)

    @property
    def sequences(self) -> Sequences:
        """Of a replica's micro-batch, which times are predicted for."""
        return sequences_of(self.graph, self.whole_sizes())

    @property
    def runs(self) -> int:
        """Micro-batches of a mini-batch: as told, else those of `fxpar memory`."""
        return self.micro_batches or steady_micro_batches(self.graph.strategy)
