"""Layers that rules tell apart, in a deep model: priced from small ones that have a layer of each kind.

`dp4.tp8+sp[layers.{0-19}: +remat]` has two kinds of layers, 20 and the others. The smallest model that is lowered has
one of each, and each further one has one more of a kind, so that what the whole model takes follows from their numbers.
Stages of a pipeline must have the same kinds in the same order; then each stage of the small ones has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import of_strategy, rank_costs
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.errors import NotYetError
from fxpar.ir.fqn import block_of
from fxpar.ir.module_rules import ModuleRule
from fxpar.ir.node_meta import fqn_of, is_backward
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.memory.series import Series
from fxpar.search.price import Candidate, Depth, Lower, Memory
from fxpar.search.repeated import FEW, of_few_stages, repeated

Kind = tuple[frozenset[str], ...]  # by rule: the modules in the layer ("" itself) that its glob matches


def modules_in(program: TrainGraph) -> set[str]:
    """FQNs of all modules of a program that is not cut into stages."""
    assert not isinstance(program, PipelineGraph)
    places = {info.fqn.rpartition(".")[0] for info, _ in program.params()}
    for part in program.parts.values():
        places |= {fqn_of(node) for node in part.graph.nodes if node.op == "call_function"}
    return {".".join(place.split(".")[:end]) for place in places if place for end in range(1, place.count(".") + 2)}


@dataclass(frozen=True)
class Layers:
    """The list of a model's layers (`model.layers`): how many it has, the modules in a layer ("" itself) and those
    outside of the list.
    """

    name: str
    count: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]

    @classmethod
    def of(cls, name: str, count: int, modules: set[str]) -> Layers:
        first = f"{name}.0"
        inside = tuple(sorted(m[len(first) + 1 :] for m in modules if m == first or m.startswith(f"{first}.")))
        return cls(name, count, inside, tuple(sorted(m for m in modules if not m.startswith(f"{name}."))))

    def module(self, number: int | str, inside: str) -> str:
        return f"{self.name}.{number}.{inside}".rstrip(".")

    def kinds(self, rules: Sequence[ModuleRule]) -> tuple[Kind, ...]:
        """Of each layer."""
        return tuple(
            tuple(frozenset(m for m in self.inside if rule.matches(self.module(i, m))) for rule in rules)
            for i in range(self.count)
        )

    def sampled(self, rules: Sequence[ModuleRule], kinds: Sequence[Kind]) -> tuple[ModuleRule, ...]:
        """The rules for a model whose layers are of these kinds."""
        found: dict[ModuleRule, None] = {}
        for index, rule in enumerate(rules):
            names = [m for m in self.outside if rule.matches(m)]
            by_module: dict[str, list[int]] = {}
            for number, kind in enumerate(kinds):
                for module in kind[index]:
                    by_module.setdefault(module, []).append(number)
            names += [self.module(numbered(numbers), m) for m, numbers in sorted(by_module.items())]
            found |= dict.fromkeys(replace(rule, glob=name) for name in names)
        return tuple(found)


def numbered(numbers: Sequence[int]) -> str:
    """`7`, `{0-7}` or `{0-2,8-10}`: ascending numbers as a glob says them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return words[0] if len(numbers) == 1 else f"{{{','.join(words)}}}"


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
    _held: dict[int, list[list[Sampled]]] = field(default_factory=dict)

    @cached_property
    def positions(self) -> list[list[Polynomial]]:
        """Seconds by sample and position of the pipeline."""
        return [list(rank_costs(one.programs[0], one.cluster).values()) for one in self.programs]

    def held(self, tokens: int) -> list[list[Sampled]]:
        """By sample and position of the pipeline."""
        if tokens not in self._held:
            self._held[tokens] = [
                [
                    Sampled(memory, rank.prediction.body.saved_bytes, self._peaks(rank.series))
                    for memory, rank in zip(one.at_positions(tokens), one.over_time(program, tokens), strict=True)
                ]
                for one in self.programs
                for program in one.programs
            ]
        return self._held[tokens]

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
    """A strategy whose layers are of several kinds. `more[k]`: the layers of kind k in a stage beyond the first one.
    `flat` is placed alike, without stages.
    """

    kinds: KindSamples = field(default_factory=lambda: KindSamples(()))
    more: tuple[int, ...] = ()

    @cached_property
    def cost(self) -> GroupCost:
        few, *others = self.kinds.positions
        found = []
        for place, start in enumerate(few):
            steps = (one[place] + start * -1 for one in others)
            found.append(sum((step * count for step, count in zip(steps, self.more, strict=True)), start))
        return of_strategy(found, self.strategy, self.cluster)

    def predicted(self, tokens: int) -> Memory:
        found = [self._whole(position) for position in zip(*self.kinds.held(tokens), strict=True)]
        return max(found, key=lambda one: one.peak_bytes)

    def _whole(self, samples: Sequence[Sampled]) -> Memory:
        columns = zip(*(one.memory.columns for one in samples), strict=True)
        found = Memory(*(self._added(column) for column in columns))
        saved = self._more([one.saved_bytes for one in samples])
        if self.strategy.stages > 1:  # other micro-batches keep what they have saved
            gradients = self._more([one.memory.gradient_bytes for one in samples])
            steps = self._more([one.memory.step_bytes for one in samples])
            grown = sum(max(step, one + other) for step, one, other in zip(steps, saved, gradients, strict=True))
            return replace(found, step_bytes=samples[0].memory.step_bytes + grown)
        beside = samples[0].memory.step_bytes - max(samples[0].peaks)  # accumulators
        first, *in_backward = samples[0].peaks
        peaks = [first + sum(saved), *(peak + sum(saved[: k + 1]) for k, peak in enumerate(in_backward))]
        grown = found.gradient_bytes - samples[0].memory.gradient_bytes
        return replace(found, step_bytes=max(peaks) + beside + grown)

    @cached_property
    def reduce_s(self) -> float:
        seconds = [one.reduce_s for one in self.kinds.programs]
        first, *others = seconds
        return max(0.0, first + sum((one - first) * count for one, count in zip(others, self.more, strict=True)))

    def _more(self, column: Sequence[int]) -> list[int]:
        """By kind, what its further layers add; more layers never take less."""
        first, *others = column
        return [max(one - first, 0) * count for one, count in zip(others, self.more, strict=True)]

    def _added(self, column: Sequence[int]) -> int:
        return column[0] + sum(self._more(column))


@dataclass
class KindsOfModel:
    """Prices strategies whose rules tell layers apart; small models are lowered once for all numbers of each kind."""

    lower: Lower
    cluster: ClusterSpec
    depth: Depth
    _samples: dict[tuple[Strategy, tuple[Strategy, ...]], KindSamples] = field(default_factory=dict)

    def candidate(
        self, strategy: Strategy, layers: Layers, flat: Candidate | None, anchors: tuple[int, ...]
    ) -> MixedCandidate:
        """Raises NotYetError for rules that a small model cannot stand for, and what `fxpar.lower` raises."""
        in_stage = self._kinds_in_stage(strategy, layers)
        unique = list(dict.fromkeys(in_stage))
        more = tuple(in_stage.count(kind) - 1 for kind in unique)
        grown = [sorted([*unique, kind], key=unique.index) for kind in unique]
        shallow = [self._small(strategy, layers, kinds) for kinds in (unique, *grown)]
        key = replace(strategy, rules=()), tuple(one for one, _ in shallow)
        if key not in self._samples:
            lowered = [(each, self._lowered(one, layers, strategy, each)) for one, each in shallow]
            made = (Candidate(strategy, self.cluster, anchors, (n,), Fraction(0), (one,), flat) for n, one in lowered)
            self._samples[key] = KindSamples(tuple(made), layers.name)
        found = self._samples[key]
        first = found.programs[0].programs[0]
        samples = (layers.count,)
        return MixedCandidate(strategy, self.cluster, anchors, samples, Fraction(0), (first,), flat, found, more)

    def _kinds_in_stage(self, strategy: Strategy, layers: Layers) -> tuple[Kind, ...]:
        kinds, stages = layers.kinds(strategy.rules), strategy.stages
        each = layers.count // stages
        same = all(kinds[each * i : each * (i + 1)] == kinds[:each] for i in range(stages))
        if layers.count % stages or not same or strategy.pipeline.virtual > 1 or strategy.pipeline.cuts:
            raise NotYetError(
                f"a price for '{strategy}', whose stages differ,", "Let rules name the same layers of each stage."
            )
        placing = [index for index, rule in enumerate(strategy.rules) if rule.axes or rule.zero is not None]
        if self.depth.period > 1 or any(len({kind[index] for kind in kinds}) > 1 for index in placing):
            raise NotYetError(
                f"a price for '{strategy}', some of whose layers are placed otherwise than others,",
                "Let roles and ZeRO levels be those of all layers.",
            )
        return kinds[:each]

    def _small(self, strategy: Strategy, layers: Layers, kinds: Sequence[Kind]) -> tuple[Strategy, int]:
        """For a model with layers of these kinds in each of at most FEW stages, and how many these are."""
        stages, each = min(strategy.stages, FEW), len(kinds)
        small = replace(strategy, rules=layers.sampled(strategy.rules, [*kinds] * stages))
        return (small if stages == 1 else of_few_stages(small, layers.name, each, stages)), each

    def _lowered(self, small: Strategy, layers: Layers, strategy: Strategy, each: int) -> TrainGraph:
        program = self.lower(small, each * small.stages)
        if strategy.stages <= FEW:
            return program
        assert isinstance(program, PipelineGraph)
        return repeated(program, strategy, layers.name, each)
