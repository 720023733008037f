"""`strategies="auto"`: the best plan of a model for the ranks that are there, from shapes only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.graph import LogicalGraph
from fxpar.losses import LossFunction
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.precision import Precision, with_precision
from fxpar.profiling.record import memory_bytes
from fxpar.runtime.compiling import as_precision, capture_step
from fxpar.runtime.options import cluster_here
from fxpar.search.chosen import Rows, of_ranks, planned_for, problem_of, searched
from fxpar.search.known import Said
from fxpar.search.plan_file import Plan
from fxpar.search.price import Depth

MOMENTS_BYTES = 8  # of AdamW, by parameter: a plan's memory budget leaves them out
WORTH = 1.05
"""So many times as fast as the best single strategy a set must be predicted to be. Predictions are off by about as much
(`benchmarks/bench_truth.py`), and one strategy has no switches that could be slower than predicted.
"""


def read_rows(
    module: nn.Module,
    loss: LossFunction,
    example: Mapping[str, Tensor] | None = None,
    precision: Precision | str | None = None,
    packed: bool | None = None,
) -> LogicalGraph:
    """The graph that a search lowers, captured as `parallelize` does. Raises what `capture` raises."""
    rows = packed_if_proved(capture_step(module, loss, example), force=bool(packed))[0]
    return with_precision(rows, as_precision(precision))


@dataclass(frozen=True)
class Search:
    """What a plan is made for. `batches` are the lengths of mini-batches such as those that will be run, `longest` is
    what the last group takes; `cluster` is what was described of devices and links, `memory_budget_bytes` as
    `fxpar.parallelize` takes it, without the states of the optimizer.
    """

    model: str
    rows: Rows
    depth: Depth
    batches: Sequence[Sequence[int]]
    longest: int
    tokens_per_step: int
    world: int
    device: torch.device
    options: tuple[str, ...] = ()
    cluster: ClusterSpec | None = None
    memory_budget_bytes: float | None = None
    overlap: bool = True
    packed: bool = True

    def plan(self, said: Said = lambda _: None) -> Plan:
        """Search. Raises NoCandidateError, SequenceFitsNowhereError, ClusterError."""
        cluster = of_ranks(cluster_here(self.cluster, self.world, self.device), self.world)
        problem = problem_of(self.rows, self.depth, cluster, self.batches, self.longest, None)
        planned = planned_for(self.model, self.options, self.tokens_per_step, problem, self.rows)
        memory = self._memory_bytes(cluster, planned.parameters)
        overlap = self.overlap and self.device.type == "cpu"  # as a session decides it
        problem = replace(problem, memory_bytes=memory, overlap=overlap, packed=problem.packed and self.packed, keep=1)
        found = searched(problem, self.rows, said)
        chosen = found.plans[0] if found.speedup >= WORTH else found.best_static
        return replace(planned, memory_bytes=memory).plan(found, chosen)

    def _memory_bytes(self, cluster: ClusterSpec, parameters: int) -> int:
        """What a device holds, states of the optimizer included: as the budget or the cluster says, else as it is."""
        if self.memory_budget_bytes is not None:
            return int(self.memory_budget_bytes) + MOMENTS_BYTES * -(-parameters // self.world)
        if cluster.sustained.memory_bytes is not None:
            return cluster.sustained.memory_bytes
        return int(memory_bytes(self.device, int(os.environ.get("LOCAL_WORLD_SIZE", self.world))))
