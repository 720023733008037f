"""What searches learn about a model, for all of its problems: strategies that were lowered, and switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import FxparError
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.search.kinds import KindsOfModel
from fxpar.search.layer_list import Layers
from fxpar.search.layouts import list_of_layers
from fxpar.search.positions import modules_in
from fxpar.search.price import DEEPEST, Candidate, Depth, Lower, Priced, anchors_of, candidate
from fxpar.search.repeated import FEW, of_few_stages, repeated
from fxpar.search.space import placed_alike, without_stages
from fxpar.search.staged import StagedGuess
from fxpar.search.switching import ModelSwitches, Outlines
from fxpar.search.teams import of_teams

Said = Callable[[str], object]


@dataclass
class KnownModel:
    """A model on a cluster. `anchors` are the tokens of micro-batches for which memory is predicted: of several
    problems those of the largest mini-batch, with those that the first strategy asks for. `refused` are strategies that
    it cannot run under, with the reason.
    """

    lower: Lower
    outlines: Outlines
    cluster: ClusterSpec
    depth: Depth
    anchors: tuple[int, ...]
    refused: dict[str, str] = field(default_factory=dict)
    other_switches: ModelSwitches | None = None  # over links that sustain another rate there than in programs
    _candidates: dict[Strategy, Candidate | None] = field(default_factory=dict)
    _teams: dict[Strategy, Priced | None] = field(default_factory=dict)
    _found_layers: Layers | None = None

    @cached_property
    def switches(self) -> ModelSwitches:
        """Each planned once."""
        return self.other_switches or ModelSwitches(self.cluster, self.depth, self.outlines)

    def candidate(self, strategy: Strategy, said: Said) -> Candidate | None:
        """Lowered once; None, and the reason among the refused, if the model cannot run under it."""
        if strategy not in self._candidates:
            said(f"lowering {strategy}")
            one = self._lowered(strategy)
            if one is not None and not any(self._candidates.values()):
                self.anchors = one.anchors = anchors_of(one)
            self._candidates[strategy] = one
        return self._candidates[strategy]

    def guessed(self, strategy: Strategy, said: Said) -> StagedGuess | None:
        """For a pipeline, from the same strategy without stages, if that can be priced from two samples."""
        named = strategy.rules or strategy.by_stage or strategy.teams or strategy.pipeline.cuts
        if named or strategy.pipeline_size == 1 or len(self.depth.samples(1)) == 1:
            return None
        flat = self.candidate(without_stages(strategy), said)
        return None if flat is None else StagedGuess(strategy, self.cluster, self.anchors, flat)

    def priced(self, strategy: Strategy, said: Said) -> Priced | None:
        """`candidate`, or teams side by side."""
        if not strategy.teams:
            return self.candidate(strategy, said)
        if strategy not in self._teams:
            said(f"lowering {strategy}")
            try:
                self._teams[strategy] = self.named(strategy)
            except FxparError as error:
                self.refused[str(strategy)] = str(error)
                self._teams[strategy] = None
        return self._teams[strategy]

    def _lowered(self, strategy: Strategy) -> Candidate | None:
        try:
            one = self._rescheduled(strategy) or self.mixed(strategy) or self._repeated(strategy)
            one = one or candidate(self.lower, strategy, self.cluster, self.depth, self.anchors)
        except FxparError as error:
            self.refused[str(strategy)] = str(error)
            return None
        if one.multiple > 1:
            self.refused[one.name] = f"it takes only lengths that are multiples of {one.multiple}"
            return None
        return one

    def _rescheduled(self, strategy: Strategy) -> Candidate | None:
        """A pipeline of which all but its schedule is known: with one stage per rank programs are the same."""
        plan = strategy.pipeline
        alike = self._candidates.get(replace(strategy, pipeline=replace(plan, schedule="1f1b")))
        if plan.schedule == "1f1b" or plan.virtual > 1 or type(alike) is not Candidate:
            return None
        programs = tuple(_under(program, plan.schedule) for program in alike.programs)
        return replace(alike, strategy=strategy, programs=programs, alike=alike)

    @cached_property
    def _kinds(self) -> KindsOfModel:
        return KindsOfModel(self.lower, self.cluster, self.depth)

    @property
    def layers(self) -> Layers | None:
        """The layers of a deep model; None if it is lowered with all of them, or they are in no list."""
        one = next((one for one in self._candidates.values() if one and list_of_layers(one.flat or one)), None)
        if self.depth.whole or one is None:
            return None
        flat = one.flat or one
        if self._found_layers is None:
            self._found_layers = Layers.of(list_of_layers(flat) or "", self.depth.layers, modules_in(flat.programs[1]))
        return self._found_layers

    def named(self, strategy: Strategy) -> Priced:
        """A strategy, or teams side by side, that someone names: as many are lowered as differ. Raises what
        `fxpar.lower` raises.
        """
        if strategy.teams:
            return of_teams(strategy, self.cluster, self.anchors, self.depth, self.outlines, self.named)
        one = self.mixed(strategy)
        return one or candidate(self.lower, strategy, self.cluster, self.depth, self.anchors)

    def mixed(self, strategy: Strategy) -> Candidate | None:
        """A strategy that tells the layers of a deep model apart, by rules, cuts or stages that differ; None for
        another one. Raises NotYetError for one that small models cannot stand for, and what `fxpar.lower` raises.
        """
        cut = bool(strategy.pipeline.cuts)
        if not (strategy.rules or cut) or len(self.depth.samples(strategy.stages)) == 1:
            return None
        alone = replace(strategy.by_stage[0] if strategy.by_stage else strategy, rules=(), remat=None, zero=0)
        self.candidate(without_stages(alone), lambda _: None)
        layers = self.layers
        if layers is None or (not cut and len(set(layers.kinds(strategy.rules))) == 1):
            return None
        flat = None
        if not strategy.by_stage and (alike := without_stages(placed_alike(strategy))) != strategy:
            flat = self.candidate(alike, lambda _: None)
        return self._kinds.candidate(strategy, layers, flat, self.anchors)

    def _repeated(self, strategy: Strategy) -> Candidate | None:
        """A pipeline for which more than DEEPEST layers would have to be captured, from one of few stages; None for
        another one, and where a stage would have less than two layers.
        """
        each, more = 2 * self.depth.period, 3 * self.depth.period
        few, many = each * strategy.stages, more * strategy.stages
        if self.depth.whole or strategy.stages <= FEW or many <= DEEPEST or few > self.depth.layers:
            return None
        flat = self._candidates.get(without_stages(strategy))
        if flat is None and strategy.rules:  # proposed as it is
            flat = self.candidate(without_stages(strategy), lambda _: None)
        layers = None if flat is None else list_of_layers(flat)
        if layers is None:
            return None
        programs = tuple(self._of_stages(strategy, layers, count) for count in (each, more))
        steps = Fraction(self.depth.layers - few, many - few)
        return Candidate(strategy, self.cluster, self.anchors, (few, many), steps, programs, flat)

    def _of_stages(self, strategy: Strategy, layers: str, each: int) -> PipelineGraph:
        program = self.lower(of_few_stages(strategy, layers, each), FEW * each)
        assert isinstance(program, PipelineGraph)
        return repeated(program, strategy, layers, each)


def _under(program: TrainGraph, schedule: str) -> TrainGraph:
    """The same program, whose strategy has another schedule."""
    strategy = program.strategy
    return replace(program, strategy=replace(strategy, pipeline=replace(strategy.pipeline, schedule=schedule)))
