"""A guess at what a pipeline takes, from the same strategy without stages: nothing is lowered for it.

A search guesses at all pipelines, and lowers those that its best sets have. Time: layers go where they make the slowest
position least slow, what is no layer counts to the last one, and each position hands its tokens on. Memory: the first
position keeps as many micro-batches as there are positions (1F1B; Narayanan et al. 2021, 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.flowing import strategy_pace
from fxpar.cost.group import of_strategy
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.strategy import Strategy
from fxpar.schedule.mini_batch import Pace
from fxpar.search.blends import ChangedFlat
from fxpar.search.floors import Floor
from fxpar.search.price import Candidate, Memory, Priced
from fxpar.search.spread import spread_layers


@dataclass
class StagedGuess(Priced):
    """`flat` is the strategy without stages, on all ranks, priced from two samples."""

    flat: Candidate | Floor

    @property
    def positions(self) -> int:
        return self.strategy.pipeline_size

    @property
    def multiple(self) -> int:
        return self.flat.multiple

    @cached_property
    def cost(self) -> GroupCost:
        few, step = self.flat.per_step()
        rest = few + step * -self._in_few
        handed = handed_on_s(self.flat, self.strategy, self.cluster)
        positions = [(handed + (rest if last else Polynomial()), step) for last in self._is_last()]
        shares = spread_layers(positions, self._in_few + self.flat.steps)
        return of_strategy(shares, self.strategy, self.cluster)

    @property
    def _in_few(self) -> Fraction:
        """Steps that the first sample has itself."""
        few, more = self.flat.samples
        return Fraction(few, more - few)

    def _is_last(self) -> list[bool]:
        return [number == self.positions - 1 for number in range(self.positions)]

    @property
    def reduce_s(self) -> float:
        """A rank has only its positions' share of the gradients."""
        return self.flat.reduce_s / self.positions

    @cached_property
    def pace(self) -> Pace | None:
        return None if self.flat.pace is None else strategy_pace(self.strategy)

    def predicted(self, tokens: int) -> Memory:
        whole, few = self.flat.at(tokens), self.flat.of_first(tokens)
        share = Fraction(1, self.positions)

        def held(level: int) -> Fraction:
            """ZeRO cuts over the ranks of all positions there: here a position has as much, cut over its own ranks."""
            return share if self.strategy.zero < level else Fraction(1)

        steps = self.flat.steps
        # By step: what accumulates, and what a micro-batch leaves for its backward.
        gradients = Fraction(whole.gradient_bytes - few.gradient_bytes) / steps
        saved = Fraction(whole.step_bytes - few.step_bytes) / steps - gradients
        every = self._in_few + steps
        rest = whole.step_bytes - every * (gradients + saved)
        mine = Fraction(math.ceil(every * share))
        accumulated = (mine if held(2) < 1 else every) * gradients
        return Memory(
            home_bytes=whole.home_bytes,
            optimizer_bytes=whole.optimizer_bytes,
            weight_bytes=math.ceil(whole.weight_bytes * held(3)),
            step_bytes=math.ceil(rest + accumulated + mine * self.positions * saved),
            gradient_bytes=math.ceil(whole.gradient_bytes * held(2)),
            staging_bytes=whole.staging_bytes,
        )


def handed_on_s(flat: Candidate | ChangedFlat | Floor, strategy: Strategy, cluster: ClusterSpec) -> Polynomial:
    """One tensor of a row per token and direction, cut as tokens are; its width is that of the first matrix."""
    meta = next(stored.meta for _, stored in flat.programs[0].params() if len(stored.meta.shape) == 2)
    cut = math.prod(strategy.degree(axis) for axis in strategy.token_axes)
    nbytes = Fraction(int(meta.shape[-1]) * meta.dtype.itemsize, cut)
    each = Polynomial(Fraction(0), nbytes / cluster.bytes_per_s(cluster.nodes > 1)) + Polynomial(cluster.latency_s)
    return each * 2
