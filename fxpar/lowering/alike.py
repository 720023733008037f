"""`LowerAlike`: strategies that differ only in what saves memory on a rank climb together until that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fxpar.ir.collector import collector_paused
from fxpar.ir.copies import copy_graph
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.lowering.driver import check_strategy, finished, lower, split_phases
from fxpar.lowering.ladder import climb, run_passes
from fxpar.lowering.pipeline import cut, of_stages, stage_program, strategy_of_stage
from fxpar.passes.chunk_loss import ChunkLoss
from fxpar.passes.sink_waits import SinkWaits
from fxpar.stages import StagedGraph


@dataclass(frozen=True)
class LowerAlike:
    """`lower(logical, strategy, passes=passes, verified=False)` for many strategies (not of teams); the graph in front
    of `chunk_loss`, of a pipeline those of its stages, is kept for each that differs in more than the chunks of the
    loss, what is recomputed and what the host keeps. Schedules of one stage per rank have the same program.
    """

    logical: LogicalGraph
    passes: Sequence[GraphPass]
    _reached: dict[Strategy, AnnotatedGraph] = field(default_factory=dict)
    _staged: dict[Strategy, tuple[StagedGraph, list[AnnotatedGraph]]] = field(default_factory=dict)
    _pipelines: dict[Strategy, PipelineGraph] = field(default_factory=dict)

    def __call__(self, strategy: Strategy) -> TrainGraph:
        """The program, equal to that of `lower`. Raises as `lower` does."""
        if strategy.by_stage or (strategy.pipeline_size > 1 and _names_modules(strategy)):
            return lower(self.logical, strategy, passes=[*self.passes], verified=False)
        if strategy.pipeline_size > 1:
            return self._pipeline(strategy)
        with collector_paused():
            graph = _own(self._in_front(strategy), strategy)
            climb(graph, self._behind, verified=False)
        return self._finished(graph)

    def with_another(
        self, strategy: Strategy, changed: Callable[[AnnotatedGraph], AnnotatedGraph | None]
    ) -> tuple[TrainGraph | None, TrainGraph]:
        """Of a strategy without stages: the program of a graph that `changed` makes of the one in front of the passes
        that let transfers begin earlier and end later, which it leaves as it is (None: it makes none), and that of
        this one.
        """
        at = [step.name for step in self._behind].index(SinkWaits.name)
        with collector_paused():
            graph = _own(self._in_front(strategy), strategy)
            climb(graph, self._behind[:at], verified=False)
            other = changed(graph)
            for one in (graph, other):
                if one is not None:
                    climb(one, self._behind[at:], verified=False)
        return None if other is None else self._finished(other), self._finished(graph)

    def _finished(self, graph: AnnotatedGraph) -> ExecGraph:
        return finished(self.logical, split_phases(graph), self.passes)

    @property
    def _middle(self) -> int:
        return [step.name for step in self.passes].index(ChunkLoss.name)

    @property
    def _behind(self) -> list[GraphPass]:
        return [*self.passes[self._middle :]]

    def _in_front(self, strategy: Strategy) -> AnnotatedGraph:
        key = _shared(strategy)
        if key not in self._reached:
            check_strategy(self.logical, strategy)
            front = [*self.passes[: self._middle]]
            self._reached[key] = run_passes(self.logical, key, front, None, verified=False)[0]
        return self._reached[key]

    def _pipeline(self, strategy: Strategy) -> PipelineGraph:
        plan = strategy.pipeline
        key = replace(strategy, pipeline=replace(plan, schedule="1f1b")) if plan.virtual == 1 else strategy
        if key not in self._pipelines:
            with collector_paused():
                self._pipelines[key] = self._of_stages(key)
        return replace(self._pipelines[key], strategy=strategy)

    def _of_stages(self, strategy: Strategy) -> PipelineGraph:
        key = _shared(strategy)
        if key not in self._staged:
            check_strategy(self.logical, strategy)
            staged, front = cut(self.logical, key), [*self.passes[: self._middle]]
            self._staged[key] = (
                staged,
                [run_passes(one, strategy_of_stage(one, key), front, None, verified=False)[0] for one in staged.stages],
            )
        staged, reached = self._staged[key]
        programs = []
        for stage, found in zip(staged.stages, reached, strict=True):
            graph = _own(found, strategy_of_stage(stage, strategy))
            climb(graph, self._behind, verified=False)
            programs.append(stage_program(graph, stage.index))
        return finished(self.logical, of_stages(self.logical, strategy, staged, tuple(programs)), self.passes)


def _shared(strategy: Strategy) -> Strategy:
    """With what the first passes know nothing of left out."""
    return replace(strategy, remat=None, offload=0.0, chunks=1, tokens=0)


def _names_modules(strategy: Strategy) -> bool:
    """Whether it names modules to recompute, of which each must be on some stage."""
    return strategy.remat is not None and strategy.remat.mode == "modules"


def _own(found: AnnotatedGraph, strategy: Strategy) -> AnnotatedGraph:
    """A graph of one's own for `strategy`."""
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
