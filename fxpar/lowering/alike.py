"""`LowerAlike`: strategies that differ only in what saves memory on a rank climb together until that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxpar.ir.collector import collector_paused
from fxpar.ir.copies import copy_graph
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.strategy import Strategy
from fxpar.lowering.driver import check_strategy, finished, split_phases
from fxpar.lowering.ladder import climb, run_passes
from fxpar.passes.chunk_loss import ChunkLoss


@dataclass(frozen=True)
class LowerAlike:
    """`lower(logical, strategy, passes=passes, verified=False)` for many strategies without pp; the graph in front of
    `chunk_loss` is kept for each that differs in more than the chunks of the loss, what is recomputed and what the host
    keeps.
    """

    logical: LogicalGraph
    passes: Sequence[GraphPass]
    _reached: dict[Strategy, AnnotatedGraph] = field(default_factory=dict)

    def __call__(self, strategy: Strategy) -> ExecGraph:
        """The program, equal to that of `lower`. Raises as `lower` does."""
        names = [step.name for step in self.passes]
        middle = names.index(ChunkLoss.name)
        with collector_paused():
            graph = self._in_front(strategy, list(self.passes[:middle]))
            climb(graph, list(self.passes[middle:]), verified=False)
        return finished(self.logical, split_phases(graph), self.passes)

    def _in_front(self, strategy: Strategy, passes: list[GraphPass]) -> AnnotatedGraph:
        """A graph of one's own."""
        key = replace(strategy, remat=None, offload=0.0, chunks=1, tokens=0)
        if key not in self._reached:
            check_strategy(self.logical, strategy)
            self._reached[key] = run_passes(self.logical, key, passes, None, verified=False)[0]
        found = self._reached[key]
        return replace(
            found,
            graph=copy_graph(found.graph),
            strategy=strategy,
            divisors=dict(found.divisors),
            notes=list(found.notes),
            deferred=dict(found.deferred),
            timings=dict(found.timings),
            passes=list(found.passes),
        )
