"""Layers that rules, cuts or stages tell apart, in a deep model: priced from small ones with a layer of each kind.

`dp4.tp8+sp[layers.{0-19}: +remat]` has two kinds of layers, 20 and the others. The smallest model that is lowered has
one of each, and each further one has one more of a kind, so that what the whole model takes follows from their numbers.
In a pipeline each stage has its own numbers. Under one strategy with a pp axis every stage of the small models has a
layer of each kind, wherever the whole model has them, so that they stand for all numbers and all cuts; stages that
differ have the kinds that they have.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import rank_costs
from fxpar.cost.link_bytes import ByReplica, LinkBytes, added, grown, sent_by_position
from fxpar.cost.polynomial import Polynomial
from fxpar.errors import NotYetError
from fxpar.ir.fqn import block_of
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.memory.pipeline import equal_positions
from fxpar.memory.series import Series
from fxpar.search.going_home import sent_home_by_position, staging_of
from fxpar.search.layer_list import Kind, Layers
from fxpar.search.price import Candidate, Depth, Lower, Memory
from fxpar.search.repeated import FEW, of_few_stages, repeated


@dataclass(frozen=True)
class Sampled:
    """What the ranks of a small model hold: `saved_bytes` for the backward, and the `peaks` beside which all of that is
    held (first), or that of the layers up to one of a kind.
    """

    memory: Memory
    saved_bytes: int
    peaks: tuple[int, ...]


@dataclass
class KindSamples:
    """Small models: `programs[0]` has one layer of each kind, `programs[k + 1]` one more of kind k."""

    programs: tuple[Candidate, ...]
    layers: str = ""
    _held: dict[tuple[int, tuple[int, ...] | None], list[list[Sampled]]] = field(default_factory=dict)

    @cached_property
    def positions(self) -> list[list[Polynomial]]:
        """Seconds by sample and position of the pipeline."""
        return [list(rank_costs(one.programs[0], one.cluster).values()) for one in self.programs]

    def held(self, tokens: int, positions: tuple[int, ...] | None = None) -> list[list[Sampled]]:
        """By sample and position of the pipeline, or of `positions` alone."""
        if (tokens, positions) not in self._held:
            self._held[tokens, positions] = [
                [
                    Sampled(one.memory_of(program, rank), rank.prediction.body.saved_bytes, self._peaks(rank.series))
                    for rank in one.over_time(program, tokens, positions)
                ]
                for one in self.programs
                for program in one.programs
            ]
        return self._held[tokens, positions]

    def _peaks(self, series: Series) -> tuple[int, ...]:
        """Of `programs[0]` without stages: what runs in the backward of a layer runs beside what those before it have
        saved, and that of the layers behind it is gone.
        """
        peaks = [0] * len(self.programs)
        now = 0
        for moment in series.moments:
            number = block_of(fqn_of(moment.node)).removeprefix(f"{self.layers}.") if moment.node else ""
            if moment.node is not None and is_backward(moment.node) and number.isdigit():
                now = min(int(number), len(peaks) - 2) + 1
            peaks[now] = max(peaks[now], moment.total_bytes)
        return tuple(peaks)


@dataclass
class MixedCandidate(Candidate):
    """A strategy whose layers are of several kinds, or are cut into stages as it says. `more[s][k]`: the layers of kind
    k in stage s beyond the `few` of the first small model. `stands`: the layer of that model that lies as each of the
    whole one; () where these lie as under `flat`, which is placed alike, without stages.
    """

    kinds: KindSamples = field(default_factory=lambda: KindSamples(()))
    more: tuple[tuple[int, ...], ...] = ()
    few: tuple[tuple[int, ...], ...] = ()
    stands: tuple[int, ...] = ()

    def with_counts(self, strategy: Strategy, counts: Sequence[Sequence[int]]) -> MixedCandidate:
        """With other numbers of layers of the same kinds in the stages: `strategy` says them. Nothing is lowered."""
        filled = [_filled(mine, len(few)) for mine, few in zip(counts, self.few, strict=True)]
        more = tuple(tuple(map(operator.sub, mine, few)) for mine, few in zip(filled, self.few, strict=True))
        begins = list(itertools.accumulate(itertools.chain(*self.few), initial=0))[:-1]
        stands = [begin for begin, n in zip(begins, itertools.chain(*filled), strict=True) for _ in range(n)]
        own = bool(self.stands or strategy.pipeline.cuts)
        return replace(self, strategy=strategy, more=more, stands=tuple(stands) if own else ())

    @cached_property
    def by_position(self) -> Sequence[Polynomial]:
        return [self.seconds_at(place, more) for place, more in enumerate(self.more)]

    def seconds_at(self, place: int, more: Sequence[int]) -> Polynomial:
        """Of a micro-batch at a place of the pipeline that has so many more layers."""
        few, *others = (one[place] for one in self.kinds.positions)
        return sum(((one + few * -1) * count for one, count in zip(others, more, strict=True)), few)

    def predicted(self, tokens: int) -> Memory:
        equal = self.flat is not None and all(more == self.more[0] for more in self.more)
        looked_at = equal_positions(len(self.more)) if equal else None
        found = map(self._beyond, zip(*self.kinds.held(tokens, looked_at), strict=True), self.more)
        return max(found, key=lambda one: one.peak_bytes)

    def memory_at(self, place: int, more: Sequence[int], tokens: int) -> Memory:
        """Of a rank at a place of the pipeline that has so many more layers."""
        return self._beyond([one[place] for one in self.kinds.held(tokens)], more)

    def _beyond(self, samples: Sequence[Sampled], more: Sequence[int]) -> Memory:
        first = samples[0].memory
        columns = zip(*(one.memory.columns for one in samples), strict=True)
        found = Memory(*(column[0] + sum(_added(column, more)) for column in columns))
        found = replace(found, **self._shared(samples, found.weight_bytes))
        saved = _added([one.saved_bytes for one in samples], more)
        gradients = _added([one.memory.gradient_bytes for one in samples], more)
        if self.strategy.stages > 1:  # other micro-batches keep what they have saved
            steps = _added([one.memory.step_bytes for one in samples], more)
            pairs = zip(more, steps, saved, gradients, strict=True)
            grown = sum(max(step, one + other) if count > 0 else step for count, step, one, other in pairs)
            return replace(found, step_bytes=first.step_bytes + grown)
        beside = first.step_bytes - max(samples[0].peaks)  # accumulators
        start, *in_backward = samples[0].peaks
        peaks = [start + sum(saved), *(peak + sum(saved[: k + 1]) for k, peak in enumerate(in_backward))]
        return replace(found, step_bytes=max(peaks) + beside + sum(gradients))

    def _shared(self, samples: Sequence[Sampled], weights: int) -> dict[str, int]:
        """What all ranks share evenly of all layers, whatever their kinds and places; and messages, for so many bytes
        of weights on a rank.
        """
        few, grown = samples[0].memory, samples[1].memory
        stages, beyond = self.strategy.stages, sum(map(sum, self.more))  # each of the stages has grown by a layer

        def whole(name: str) -> int:
            start = getattr(few, name)
            return start + (getattr(grown, name) - start) * beyond // stages

        programs = [one.programs[0] for one in self.kinds.programs[:2]]
        found = {name: whole(name) for name in ("home_bytes", "optimizer_bytes")}
        return found | {"staging_bytes": staging_of(weights, programs, beyond / stages, self.cluster)}

    @cached_property
    def reduce_s(self) -> float:
        first, *others = [one.reduce_s for one in self.kinds.programs]
        adds = [one - first for one in others]
        return max(0.0, *(first + sum(map(operator.mul, adds, more)) for more in self.more))

    @property
    def reduced(self) -> LinkBytes:
        samples = [sent_home_by_position(one.programs[0], self.cluster) for one in self.kinds.programs]
        found = LinkBytes()
        for (few, *others), more in zip(zip(*samples, strict=True), self.more, strict=True):
            found += sum(((one + few * -1) * count for one, count in zip(others, more, strict=True)), few)
        return found

    @cached_property
    def sent(self) -> ByReplica:
        samples = [sent_by_position(one.programs[0], self.cluster) for one in self.kinds.programs]
        return added(map(grown, zip(*samples, strict=True), self.more))


def _added(column: Sequence[int], more: Sequence[int]) -> list[int]:
    """By kind, what its further layers add; more layers never take less."""
    first, *others = column
    return [max(one - first, 0) * count for one, count in zip(others, more, strict=True)]


@dataclass(frozen=True)
class _Stage:
    """A stage of the whole model: its rules, the kinds of its layers in their order, and the kinds that the stage of
    the small models has, each once.
    """

    rules: tuple[ModuleRule, ...]
    layers: tuple[Kind, ...]
    kinds: tuple[Kind, ...]

    @property
    def few(self) -> tuple[Kind, ...]:
        """The layers of the first small model, two at least: a single one may be placed otherwise."""
        return self.kinds if len(self.kinds) > 1 else self.kinds * 2

    def sample(self, grown: int | None) -> tuple[Kind, ...]:
        """The layers of the first small model, or of that with one more of a kind, if the stage has so many kinds."""
        if grown is None or grown >= len(self.kinds):
            return self.few
        return tuple(sorted([*self.few, self.kinds[grown]], key=self.kinds.index))

    @property
    def more(self) -> tuple[int, ...]:
        """By kind, the layers of the whole model beyond those of the first small one."""
        return tuple(self.layers.count(kind) - self.few.count(kind) for kind in self.kinds)


@dataclass
class KindsOfModel:
    """Prices strategies whose layers are of several kinds; small models are lowered once for all numbers of each."""

    lower: Lower
    cluster: ClusterSpec
    depth: Depth
    _samples: dict[tuple[int, tuple[Strategy, ...]], KindSamples] = field(default_factory=dict)

    def candidate(
        self, strategy: Strategy, layers: Layers, flat: Candidate | None, anchors: tuple[int, ...]
    ) -> MixedCandidate:
        """`flat` is placed alike, without stages; None if there is none. Raises NotYetError for rules that a small
        model cannot stand for, and what `fxpar.lower` raises.
        """
        stages = self._stages(strategy, layers)
        most = max(len(stage.kinds) for stage in stages)
        grown = [[stage.sample(kind) for stage in stages] for kind in (None, *range(most))]
        shallow = [_small(strategy, layers, stages, kinds) for kinds in grown]
        key = strategy.stages, tuple(shallow)
        if key not in self._samples:
            made = (self._sample(one, strategy, layers, kinds) for one, kinds in zip(shallow, grown, strict=True))
            self._samples[key] = KindSamples(
                tuple(Candidate(strategy, self.cluster, anchors, (n,), Fraction(0), (one,)) for n, one in made),
                layers.name,
            )
        found = self._samples[key]
        more = tuple(_filled(stage.more, most) for stage in stages)
        few = tuple(_filled([stage.few.count(kind) for kind in stage.kinds], most) for stage in stages)
        first = found.programs[0].programs[0]
        own = bool(strategy.by_stage or strategy.pipeline.cuts) or _places_apart(stages)
        stands = _stand_ins(stages) if own else ()
        whole = (layers.count,)
        return MixedCandidate(
            strategy,
            self.cluster,
            anchors,
            whole,
            Fraction(0),
            (first,),
            flat,
            kinds=found,
            more=more,
            few=few,
            stands=stands,
        )

    def _stages(self, strategy: Strategy, layers: Layers) -> list[_Stage]:
        """Raises NotYetError."""
        each, virtual = [strategy.rules] * strategy.stages, strategy.pipeline.virtual
        each = [one.rules for one in strategy.by_stage] or each
        parts = stage_layers(strategy, layers)
        if parts is None or virtual > 1:
            raise NotYetError(
                f"a price for '{strategy}'", f"Cut at modules of {layers.name}, so that each stage has one."
            )
        kinds = [layers.kinds(rules, numbers) for rules, numbers in zip(each, parts, strict=True)]
        every = tuple(dict.fromkeys(itertools.chain(*kinds)))
        mine = [tuple(dict.fromkeys(one)) if strategy.by_stage else every for one in kinds]
        stages = [_Stage(*one) for one in zip(each, kinds, mine, strict=True)]
        if _places_apart(stages) and (self.depth.period > 1 or not all(map(_in_runs, stages))):
            raise NotYetError(
                f"a price for '{strategy}', some of whose layers have another placement than others,",
                "Let layers that are placed alike follow each other.",
            )
        if self.depth.period > 1 and (strategy.by_stage or strategy.pipeline.cuts):
            raise NotYetError(
                f"a price for '{strategy}', whose kinds of layers take turns,", "Let all stages be alike."
            )
        return stages

    def _sample(
        self, small: Strategy, strategy: Strategy, layers: Layers, kinds: Sequence[tuple[Kind, ...]]
    ) -> tuple[int, TrainGraph]:
        """A small model's layers, and its program with all stages."""
        count = sum(map(len, kinds[: small.stages]))
        program = self.lower(small, count)
        if small.stages == strategy.stages:
            return count, program
        assert isinstance(program, PipelineGraph)
        return count, repeated(program, strategy, layers.name, len(kinds[0]))


def stage_layers(strategy: Strategy, layers: Layers) -> list[range] | None:
    """The numbers of the layers of each stage, equally many where no cuts say it; None if a cut is at no layer, or some
    stage has none, or they do not divide.
    """
    cuts = strategy.pipeline.cuts
    if not cuts:
        each, left = divmod(layers.count, strategy.stages)
        return None if left else [range(each * i, each * (i + 1)) for i in range(strategy.stages)]
    numbers = [cut.removeprefix(f"{layers.name}.") for cut in cuts]
    if not all(number.isdigit() for number in numbers):
        return None
    begins = [0, *map(int, numbers), layers.count]
    return [range(a, b) for a, b in itertools.pairwise(begins)] if begins == sorted(set(begins)) else None


def _small(strategy: Strategy, layers: Layers, stages: Sequence[_Stage], kinds: Sequence[tuple[Kind, ...]]) -> Strategy:
    """For a model with layers of these kinds in its stages, FEW of them at most where all are alike."""
    if not strategy.by_stage:
        count = min(strategy.stages, FEW)
        small = replace(strategy, rules=layers.sampled(strategy.rules, [*kinds[0]] * count))
        return small if count == 1 else of_few_stages(small, layers.name, len(kinds[0]), count)
    begins = list(itertools.accumulate(map(len, kinds), initial=0))
    parts = [
        replace(own, rules=layers.sampled(stage.rules, mine, begin, layers.ends(index, len(stages))))
        for index, (own, stage, mine, begin) in enumerate(
            zip(strategy.by_stage, stages, kinds, begins[:-1], strict=True)
        )
    ]
    cuts = tuple(f"{layers.name}.{begin}" for begin in begins[1:-1])
    return replace(strategy, by_stage=tuple(parts), pipeline=replace(strategy.pipeline, cuts=cuts))


def _filled(counts: Sequence[int], length: int) -> tuple[int, ...]:
    return (*counts, *[0] * (length - len(counts)))


def _places_apart(stages: Sequence[_Stage]) -> bool:
    """Whether some layers of a stage are placed otherwise than others."""
    placing = [[i for i, rule in enumerate(one.rules) if rule.axes or rule.zero is not None] for one in stages]
    return any(
        len({kind[index] for kind in stage.kinds}) > 1
        for stage, mine in zip(stages, placing, strict=True)
        for index in mine
    )


def _in_runs(stage: _Stage) -> bool:
    """Whether layers of a kind follow each other, in the order of the small models: then as much lies between them."""
    runs = [kind for kind, _ in itertools.groupby(stage.layers)]
    return runs == [kind for kind in stage.kinds if kind in runs]


def _stand_ins(stages: Sequence[_Stage]) -> tuple[int, ...]:
    """For each layer of the whole model one of the first small model that is of its kind and in its stage."""
    found, before = [], 0
    for stage in stages:
        found += [before + stage.few.index(kind) for kind in stage.layers]
        before += len(stage.few)
    return tuple(found)
