"""What a stage takes, as `fxpar.search.cutting` asks for it: guessed from strategies without stages, or as lowered."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.flowing import strategy_pace
from fxpar.cost.group import of_strategy
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.strategy import Strategy
from fxpar.schedule.mini_batch import Pace
from fxpar.search.blends import ChangedFlat
from fxpar.search.cutting import StageOption, borders_of
from fxpar.search.kinds import MixedCandidate
from fxpar.search.positions import PlannedStage
from fxpar.search.price import Candidate, Memory, Priced, around
from fxpar.search.staged import handed_on_s

NOWHERE = 1 << 62  # bytes: of an option at a place that it is not for


class Stage(Protocol):
    """A way to run a stage, at any of `places` places, with any number of layers of each of its kinds."""

    @property
    def strategies(self) -> tuple[Strategy, ...]: ...  # by kind, without stages
    @property
    def places(self) -> Sequence[int]: ...
    def seconds_at(self, place: int, counts: Sequence[int]) -> Polynomial: ...
    @property
    def anchors(self) -> tuple[int, ...]: ...  # tokens for which memory is known
    def memory_at(self, place: int, counts: Sequence[int], tokens: int) -> Memory: ...
    @property
    def sync_s(self) -> Sequence[float]: ...  # of a layer of each kind; () where that is not told apart
    @property
    def borders(self) -> Sequence[Sequence[Polynomial]]: ...  # seconds from kind to kind; () for none


Flat = Candidate | ChangedFlat


@dataclass(frozen=True)
class GuessedStage:
    """One of `stages` equal places, guessed from strategies without stages, one for each kind of layers. As in
    `fxpar.search.staged`: what is no layer counts to the last place, and the first keeps most micro-batches.
    """

    strategies: tuple[Strategy, ...]
    flats: tuple[Flat, ...]
    stages: int
    cluster: ClusterSpec
    sync_s: tuple[float, ...] = ()
    borders: tuple[tuple[Polynomial, ...], ...] = ()

    @property
    def places(self) -> range:
        return range(self.stages)

    @property
    def anchors(self) -> tuple[int, ...]:
        return self.flats[0].anchors

    @cached_property
    def _steps(self) -> tuple[Polynomial, ...]:
        return tuple(flat.per_step()[1] * (1 / per_step(flat)) for flat in self.flats)

    @cached_property
    def _beside(self) -> Polynomial:
        """Seconds of what is no layer."""
        flat = self.flats[0]
        return flat.per_step()[0] + self._steps[0] * -Fraction(flat.samples[0])

    @cached_property
    def _handed(self) -> Polynomial:
        return handed_on_s(self.flats[0], self.strategies[0], self.cluster) if self.stages > 1 else Polynomial()

    def seconds_at(self, place: int, counts: Sequence[int]) -> Polynomial:
        ends = self._handed + (self._beside if place == self.stages - 1 else Polynomial())
        return sum((one * n for one, n in zip(self._steps, counts, strict=True)), ends)

    def memory_at(self, place: int, counts: Sequence[int], tokens: int) -> Memory:
        """ZeRO cuts over the replicas of all stages in a strategy without them, here over those of one."""
        flat, whole = self.flats[0], self.flats[0].at(tokens)
        beside = beside_layers(flat, tokens)
        held = beside.step_bytes if place == self.stages - 1 else Fraction(0)  # mostly logits
        weights, gradients = (Fraction(one, self.stages) for one in (beside.weight_bytes, beside.gradient_bytes))
        for one, count in zip(self.flats, counts, strict=True):
            layer = of_layer(one, tokens)
            again = Fraction(one.strategy.replicas, self.strategies[0].replicas)
            gradient = layer.gradient_bytes * (again if one.strategy.zero >= 2 else 1)
            weights += count * layer.weight_bytes * (again if one.strategy.zero >= 3 else 1)
            gradients += count * gradient
            held += count * (gradient + (layer.step_bytes - layer.gradient_bytes) * (self.stages - place))
        return Memory(
            home_bytes=whole.home_bytes,
            optimizer_bytes=whole.optimizer_bytes,
            weight_bytes=math.ceil(weights),
            step_bytes=max(0, math.ceil(held)),
            gradient_bytes=max(0, math.ceil(gradients)),
            staging_bytes=whole.staging_bytes,
        )


@dataclass(frozen=True)
class Bytes:
    """Of a layer, or of what is none; may be fractions, and below 0."""

    weight_bytes: Fraction
    step_bytes: Fraction
    gradient_bytes: Fraction


def per_step(flat: Flat) -> Fraction:
    """Layers of a step from the first sample to the second."""
    return Fraction(flat.samples[1] - flat.samples[0])


def of_layer(flat: Flat, tokens: int) -> Bytes:
    whole, few = flat.at(tokens), flat.of_first(tokens)
    beyond = flat.steps * per_step(flat)
    names = ("weight_bytes", "step_bytes", "gradient_bytes")
    return Bytes(*((Fraction(getattr(whole, name) - getattr(few, name)) / beyond) for name in names))


def beside_layers(flat: Flat, tokens: int) -> Bytes:
    few, layer = flat.of_first(tokens), of_layer(flat, tokens)
    names = ("weight_bytes", "step_bytes", "gradient_bytes")
    return Bytes(*(getattr(few, name) - flat.samples[0] * getattr(layer, name) for name in names))


@dataclass(frozen=True)
class LoweredStage:
    """The stage that a lowered pipeline has at a place."""

    strategies: tuple[Strategy, ...]
    mixed: MixedCandidate
    place: int
    sync_s: tuple[float, ...] = ()
    borders: tuple[tuple[Polynomial, ...], ...] = ()

    @property
    def places(self) -> tuple[int]:
        return (self.place,)

    @property
    def anchors(self) -> tuple[int, ...]:
        return self.mixed.anchors

    def _more(self, counts: Sequence[int]) -> tuple[int, ...]:
        few = self.mixed.few[self.place]
        return tuple(n - one for n, one in zip((*counts, *[0] * (len(few) - len(counts))), few, strict=True))

    def seconds_at(self, place: int, counts: Sequence[int]) -> Polynomial:
        return self.mixed.seconds_at(place, self._more(counts))

    def memory_at(self, place: int, counts: Sequence[int], tokens: int) -> Memory:
        return self.mixed.memory_at(place, self._more(counts), tokens)


@dataclass
class GuessedPipeline(Priced):
    """A strategy whose stages, each of so many layers of each kind, are guessed: nothing is lowered for it."""

    stages: tuple[tuple[Stage, tuple[int, ...]], ...]
    like: Priced  # a strategy of the same world

    @property
    def multiple(self) -> int:
        return self.like.multiple

    @property
    def reduce_s(self) -> float:
        pairs = [pair for pair in self.stages if pair[0].sync_s]
        found = (sum(map(operator.mul, stage.sync_s, counts)) for stage, counts in pairs)
        return max(found, default=self.like.reduce_s)

    @cached_property
    def cost(self) -> GroupCost:
        found = [
            sum((stage.borders[a][b] for a, b in borders_of(counts) if stage.borders), stage.seconds_at(place, counts))
            for place, (stage, counts) in enumerate(self.stages)
        ]
        # What borders are guessed to add is a difference, and may be more than all that does not grow.
        positive = [Polynomial(*(max(Fraction(0), term) for term in (one.c0, one.c1, one.c2))) for one in found]
        return of_strategy(positive, self.strategy, self.cluster)

    @cached_property
    def pace(self) -> Pace | None:
        return strategy_pace(self.strategy)

    def predicted(self, tokens: int) -> Memory:
        found = (stage.memory_at(place, counts, tokens) for place, (stage, counts) in enumerate(self.stages))
        return max(found, key=lambda one: one.peak_bytes)


def planned(stage: Stage, counts: tuple[int, ...]) -> PlannedStage:
    return PlannedStage(stage.strategies, counts)


def option_of(stage: Stage, stages: int, tokens: int, mean: float, squares: float) -> StageOption:
    """For micro-batches of `mean` tokens, with so many squares of lengths, in memory for `tokens`."""

    def taken(found: Polynomial) -> float:
        return float(found.c0) + float(found.c1) * mean + float(found.c2) * squares

    kinds, (low, high) = len(stage.strategies), around(stage.anchors, tokens)
    units = [tuple(int(i == k) for i in range(kinds)) for k in range(kinds)]
    columns: list[tuple[float, tuple[float, ...], int, tuple[int, ...]]] = []
    for place in range(stages):
        if place not in stage.places:
            columns.append((0.0, (0.0,) * kinds, NOWHERE, (0,) * kinds))
            continue

        def seconds(counts: Sequence[int], place: int = place) -> float:
            return taken(stage.seconds_at(place, counts))

        def nbytes(counts: Sequence[int], place: int = place) -> int:
            ends = [stage.memory_at(place, counts, anchor).peak_bytes for anchor in (low, high)]
            return ends[0] - (ends[0] - ends[1]) * (tokens - low) // (high - low)

        # On a line through numbers that stages have: one layer of each kind, and one more.
        ones = (2,) if kinds == 1 else (1,) * kinds
        more = [tuple(map(sum, zip(ones, unit, strict=True))) for unit in units]
        each_s = tuple(seconds(one) - seconds(ones) for one in more)
        each_bytes = tuple(max(0, nbytes(one) - nbytes(ones)) for one in more)
        beside = seconds(ones) - ones[0] * sum(each_s), nbytes(ones) - ones[0] * sum(each_bytes)
        columns.append((beside[0], each_s, beside[1], each_bytes))
    ends_s, layer_s, ends_bytes, layer_bytes = (tuple(column) for column in zip(*columns, strict=True))
    return StageOption(
        stage.strategies[0].world,
        ends_s,
        layer_s,
        ends_bytes,
        layer_bytes,
        layer_sync_s=tuple(stage.sync_s),
        border_s=tuple(tuple(max(0.0, taken(one)) for one in row) for row in stage.borders),
    )
