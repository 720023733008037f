"""What a strategy takes, in time and memory, from its lowered program; layers that repeat are priced by their number.

A model of many layers is not lowered whole. Two small ones are, of `few` and of `more` layers: all that is counted (
seconds, bytes) grows by the same amount with each layer, so what the whole model takes follows from the two. Stages of
a pipeline get two and three layers each, and the whole model's layers go where they make the slowest stage least slow.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.flowing import flowing_pace
from fxpar.cost.group import of_strategy, rank_costs
from fxpar.cost.group_cost import Cost, GroupCost
from fxpar.cost.link_bytes import ByReplica, LinkBytes, added, grown, sent_by_position
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.pipeline_graph import PipelineGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.memory import Conditions, RankMemory, memory_over_time, steady_micro_batches
from fxpar.memory.pipeline import equal_positions
from fxpar.passes.share_weights import ALIGN_BYTES
from fxpar.schedule.mini_batch import Pace
from fxpar.search.going_home import going_home, sent_home, staging_of
from fxpar.search.spread import spread_layers

Lower = Callable[[Strategy, int], TrainGraph]  # a strategy, layers of the model: its program for a store
ADAM_BYTES = 16 + 12  # of fp32 that AdamW reads and writes for each parameter
MOMENTS_BYTES = 8  # of them are its two moments
BENT = 1.05  # by so much a line between two anchors may lie above what is predicted in its middle
SHORT = 32  # tokens
DENSE = 1.5  # times the anchor before: a square is then 4 % below the line at most
DEEPEST = 9  # layers that are captured; what needs more is put together from shallower models
_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True)
class Depth:
    """A model of `layers` that repeat with a period (2 where two kinds of layers take turns); `whole`: it is always
    lowered with all of them.
    """

    layers: int
    period: int = 1
    whole: bool = False

    def samples(self, stages: int) -> tuple[int, ...]:
        """The numbers of layers that stand for the whole model under a strategy with so many stages."""
        # The first and the last layer of a model may differ from those between, and so they may in each stage: one of a
        # single layer may even be placed otherwise.
        few, more = 2 * stages * self.period, 3 * stages * self.period
        return (self.layers,) if self.whole or more >= self.layers else (few, more)

    @property
    def most_stages(self) -> int:
        """As many as layers; half as many of a model too deep to be captured whole, one where it has no two periods."""
        return self.layers if self.whole or self.layers <= DEEPEST else max(1, self.layers // (2 * self.period))

    def beyond(self, samples: Sequence[int]) -> Fraction:
        """By how many steps from the first sample to the second the model is larger than the first."""
        return Fraction(self.layers - samples[0], samples[1] - samples[0]) if len(samples) == 2 else Fraction(0)


def extrapolated(values: Sequence[float], steps: float) -> float:
    """`values[0]` plus so many times what the second value is larger by."""
    return values[0] + (values[-1] - values[0]) * float(steps)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank, counted as the engine counts its budget: what all strategies share (masters, gradients
    at home, the optimizer's states, which the budget leaves out), the weights of this graph, what a step needs beside
    (accumulators of gradients are a part of it), and messages of switches and reductions.
    """

    home_bytes: int
    optimizer_bytes: int
    weight_bytes: int
    step_bytes: int
    gradient_bytes: int
    staging_bytes: int

    @property
    def columns(self) -> tuple[int, ...]:
        """As the constructor takes them."""
        stays = self.home_bytes, self.optimizer_bytes, self.weight_bytes
        return *stays, self.step_bytes, self.gradient_bytes, self.staging_bytes

    @property
    def beside_bytes(self) -> int:
        """What there is beside home, optimizer and weights."""
        return self.step_bytes + self.staging_bytes

    @property
    def stays_bytes(self) -> int:
        """Home and optimizer."""
        return self.home_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        return self.stays_bytes + self.weight_bytes + self.beside_bytes


class Lowered(Protocol):
    """What is known of a strategy only once it is lowered: the bytes that its ranks send."""

    @property
    def name(self) -> str: ...

    @property
    def reduced(self) -> LinkBytes:
        """What gradients of a group take to go home."""
        ...

    @property
    def sent(self) -> ByReplica:
        """What is sent in a micro-batch of each replica, those of all teams."""
        ...


@dataclass
class Priced(ABC):
    """A strategy whose memory is known at the numbers of tokens in `anchors`, ascending."""

    strategy: Strategy
    cluster: ClusterSpec
    anchors: tuple[int, ...]
    _memory: dict[int, Memory] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return str(self.strategy)

    @property
    @abstractmethod
    def multiple(self) -> int:
        """What the lengths of its sequences must be multiples of: tokens are cut, and the model would see padding."""

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """Of one micro-batch of a replica; of teams side by side that of each."""

    @property
    def by_position(self) -> Sequence[Polynomial]:
        """Seconds of a micro-batch by position of the pipeline, as far as that is known."""
        return ()

    @property
    def group_cost(self) -> GroupCost:
        """`cost` of what is one team."""
        assert isinstance(self.cost, GroupCost), f"{self.name} is several teams"
        return self.cost

    @property
    @abstractmethod
    def reduce_s(self) -> float:
        """Seconds in which the gradients of a group go home."""

    @property
    @abstractmethod
    def pace(self) -> Pace | None:
        """See `fxpar.cost.flowing`; of a graph that runs eagerly."""

    @abstractmethod
    def predicted(self, tokens: int) -> Memory:
        """For micro-batches of just so many tokens."""

    def at(self, tokens: int) -> Memory:
        """`predicted`, once for each number of tokens."""
        if tokens not in self._memory:
            self._memory[tokens] = self.predicted(tokens)
        return self._memory[tokens]

    @property
    def stays(self) -> Memory:
        """What does not depend on tokens: home, optimizer and weights are those of any number."""
        return self.at(self.anchors[-1])

    def memory(self, tokens: int) -> Memory:
        """For micro-batches of so many tokens, which may be one sequence.

        Predicted at the `anchors` around it, and on the straight line in between: a peak is the largest of sums that
        grow evenly with the tokens, so it lies on that line or below, but for a hundredth that kernels need in blocks.
        """
        low, high = around(self.anchors, tokens)
        above, width = tokens - low, high - low
        pairs = zip(self.at(low).columns, self.at(high).columns, strict=True)
        return Memory(*(one - (one - other) * above // width for one, other in pairs))  # rounded up

    def most_tokens(self, least: int, room_bytes: int, most: int) -> int | None:
        """The most tokens of a micro-batch that takes at most `room_bytes` beside masters and weights: `least` or more,
        at most `most`; None if `least` need more.
        """
        most = max(least, most)
        fits_all = most <= self.anchors[-1] and self.at(self.anchors[-1]).beside_bytes <= room_bytes
        if fits_all or self.memory(most).beside_bytes <= room_bytes:
            return most
        if self.memory(least).beside_bytes > room_bytes:
            return None
        low, high = least, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.memory(middle).beside_bytes <= room_bytes else (low, middle)
        return low


def around(anchors: Sequence[int], tokens: int) -> tuple[int, int]:
    """The two anchors on whose line the memory of so many tokens is taken to lie."""
    place = min(max(bisect_right(anchors, tokens), 1), len(anchors) - 1)
    return anchors[place - 1], anchors[place]


def anchors_of(one: Priced) -> tuple[int, ...]:
    """The anchors of `one`, and some between where its memory is far below a straight line: attention that is written
    out keeps matrices of tokens by tokens. What this asks for is nearly the same under all strategies of a model.
    """
    first, last = one.anchors[0], one.anchors[-1]
    middles = [math.isqrt(low * high) for low, high in pairwise(one.anchors)]
    if all(one.memory(middle).step_bytes <= BENT * one.at(middle).step_bytes for middle in middles):
        return one.anchors
    first = min(first, SHORT)  # below the first anchor the line would be too low
    count = math.ceil(math.log(last / first, DENSE))
    between = {round(first * (last / first) ** (number / count)) for number in range(count + 1)}
    return tuple(sorted(between | {*one.anchors}))


@dataclass
class Candidate(Priced):
    """A strategy and its programs, one for each number of layers in `samples`. A pipeline whose stages between the
    first and the last are all the same one has the strategy without stages as `flat`; one that differs from another in
    its schedule alone has that as `alike`, whose programs, times of a micro-batch and reductions are its own.
    """

    samples: tuple[int, ...]
    steps: Fraction
    programs: tuple[TrainGraph, ...]
    flat: Candidate | None = None
    alike: Candidate | None = None
    _samples: dict[int, list[list[Memory]]] = field(default_factory=dict, init=False)

    @property
    def multiple(self) -> int:
        program = self.programs[0]
        return program.divisors.get("T", 1) if program.padding_hazard else 1

    @cached_property
    def cost(self) -> GroupCost:
        return of_strategy(self.by_position, self.strategy, self.cluster)

    @cached_property
    def by_position(self) -> Sequence[Polynomial]:
        if self.alike is not None:
            return self.alike.by_position
        if len(self.programs) == 1:
            return tuple(rank_costs(self.programs[0], self.cluster).values())
        return spread_layers(self._positions, self.steps * len(self._positions))

    @cached_property
    def _positions(self) -> list[tuple[Polynomial, Polynomial]]:
        """By position: seconds of the first sample, and of what the second has more."""
        found = [list(rank_costs(program, self.cluster).values()) for program in self.programs]
        return [(few, more + few * -1) for few, more in zip(*found, strict=True)]

    def per_step(self) -> tuple[Polynomial, Polynomial]:
        """Without stages: seconds of the first sample, and of what the second has more."""
        (found,) = self._positions
        return found

    def of_first(self, tokens: int) -> Memory:
        """Of the first sample, without stages."""
        return self._sampled(tokens)[0][0]

    def predicted(self, tokens: int) -> Memory:
        """Of the position of a pipeline that is fullest with all layers: in a shallow model it may be another one."""
        return max(self.positions(tokens), key=lambda one: one.peak_bytes)

    def positions(self, tokens: int) -> list[Memory]:
        """Of each position of a pipeline that is looked at, with all layers."""
        return [self._grown(samples) for samples in zip(*self._sampled(tokens), strict=True)]

    def at_position(self, position: int, tokens: int) -> Memory:
        """Of one position of a pipeline, with all layers; no other one is looked at."""
        found = [self._looked_at(program, tokens, (position,)) for program in self.programs]
        return self._grown([one for (one,) in found])

    def _grown(self, samples: Sequence[Memory]) -> Memory:
        """With all layers, from the samples."""
        steps = float(math.ceil(self.steps) if self.strategy.pipeline_size > 1 else self.steps)
        # What a recomputation chooses may shrink from one sample to the next; more layers never take less.
        columns = ((one[0], max(one[0], one[-1])) for one in zip(*(one.columns for one in samples), strict=True))
        found = Memory(*(round(extrapolated(column, steps)) for column in columns))
        if len(self.programs) < 2:
            return found
        return replace(found, staging_bytes=staging_of(found.weight_bytes, self.programs, steps, self.cluster))

    def _sampled(self, tokens: int) -> list[list[Memory]]:
        """By sample, then by position of the pipeline that is looked at."""
        if tokens not in self._samples:
            self._samples[tokens] = [self._looked_at(program, tokens, self.looked_at) for program in self.programs]
        return self._samples[tokens]

    @property
    def looked_at(self) -> tuple[int, ...] | None:
        """Positions of a pipeline among which is the fullest; None: all."""
        return None if self.flat is None else equal_positions(self.strategy.stages)

    def _looked_at(self, program: TrainGraph, tokens: int, positions: Sequence[int] | None) -> list[Memory]:
        return [self.memory_of(program, rank) for rank in self.over_time(program, tokens, positions, brief=True)]

    def memory_of(self, program: TrainGraph, rank: RankMemory) -> Memory:
        """With what pads the parameters of a rank in its arena, which weights lie in."""
        one, padding_bytes = rank.prediction, ALIGN_BYTES * _params_of(program, rank.ranks[0])
        return Memory(
            home_bytes=one.master_bytes + one.home_gradient_bytes,
            optimizer_bytes=one.optimizer_bytes,
            weight_bytes=one.weight_bytes + padding_bytes,
            step_bytes=one.step_bytes,
            gradient_bytes=one.gradient_bytes,
            staging_bytes=one.staging_bytes + one.sums_bytes,
        )

    def over_time(
        self, program: TrainGraph, tokens: int, positions: Sequence[int] | None = None, brief: bool = False
    ) -> Sequence[RankMemory]:
        """By position of the pipeline; `positions` and `brief` as in `memory_over_time`."""
        sizes = {dim.name: tokens for dim in program.dims if dim.name == "T"}
        count = steady_micro_batches(self.strategy)
        how = {"micro_batches": count, "cluster": self.cluster, "conditions": Conditions(several=True)}
        return memory_over_time(program, sizes, **how, positions=positions, brief=brief).ranks  # type: ignore[arg-type]

    @cached_property
    def reduce_s(self) -> float:
        """Seconds in which the gradients of a group go home."""
        if self.alike is not None:
            return self.alike.reduce_s
        seconds = [going_home(program, self.cluster).predicted_s for program in self.programs]
        return max(extrapolated(seconds, float(self.steps)), 0.0)

    @property
    def reduced(self) -> LinkBytes:
        first, *others = [sent_home(program, self.cluster) for program in self.programs]
        return first + (others[-1] + first * -1) * float(self.steps) if others else first

    @cached_property
    def sent(self) -> ByReplica:
        samples = [added(sent_by_position(program, self.cluster)) for program in self.programs]
        return grown(samples, (self.steps,) * (len(samples) - 1))

    @cached_property
    def pace(self) -> Pace | None:
        return flowing_pace(self.programs[0])


def _params_of(program: TrainGraph, rank: int) -> int:
    """How many parameters a rank has."""
    mine = program.stages_of(rank) if isinstance(program, PipelineGraph) else (program,)
    return sum(len(one.params()) for one in mine)


def optimizer_s(one: Priced, cluster: ClusterSpec) -> float:
    """Seconds of AdamW on a rank's share of the parameters, in fp32."""
    moved = one.stays.optimizer_bytes / MOMENTS_BYTES * ADAM_BYTES
    return moved / float(cluster.sustained.bytes_per_s)


def candidate(
    lower: Lower, strategy: Strategy, cluster: ClusterSpec, depth: Depth, anchors: tuple[int, ...]
) -> Candidate:
    """Lower a strategy of a model. Raises what `fxpar.lower` raises."""
    samples = depth.samples(strategy.stages)
    programs = [lower(strategy, samples[0])]
    if len(samples) == 2:
        programs.append(lower(_cut_alike(strategy, programs[0], Fraction(samples[1], samples[0])), samples[1]))
    return Candidate(strategy, cluster, anchors, samples, depth.beyond(samples), tuple(programs))


def _cut_alike(strategy: Strategy, program: TrainGraph, times: Fraction) -> Strategy:
    """For so many times as many layers, with so many times as many in each stage."""
    if not isinstance(program, PipelineGraph):
        return strategy
    cuts = tuple(_NUMBER.sub(lambda found: str(int(int(found[0]) * times)), cut) for cut in program.cuts)
    return replace(strategy, pipeline=replace(strategy.pipeline, cuts=cuts))
