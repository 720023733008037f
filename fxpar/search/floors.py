"""What a strategy that saves memory takes at least, from the same one that saves nothing: no program is lowered for it.

Time: full recomputation runs all kernels again whose values a backward reads, but for what a block hands on; ZeRO-3
moves weights and gradients once per micro-batch, of which kernels hide no more than they take. Memory: weights and
accumulators are those of the strategy without savings, under ZeRO-3 cut over the ranks that replicate them; activations
are as large where nothing is recomputed and the loss is whole, and count as nothing elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from torch import fx

from fxpar.cost.calls import NOMINAL_TOKENS, computed_s
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group import of_strategy
from fxpar.cost.group_cost import GroupCost
from fxpar.cost.links import ring
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.fqn import block_of
from fxpar.ir.node_meta import fqn_of, is_backward, reader_of
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.schedule.mini_batch import Pace
from fxpar.search.price import Candidate, Memory, Priced

ZERO = 3  # the level that cuts all there is


@dataclass
class Floor(Priced):
    """`base` is the same strategy without stages that saves nothing, priced from two samples; `again` is `again_s` of
    it.
    """

    base: Candidate
    again: tuple[Polynomial, Polynomial]

    @property
    def multiple(self) -> int:
        return self.base.multiple

    @property
    def samples(self) -> tuple[int, ...]:
        return self.base.samples

    @property
    def steps(self) -> Fraction:
        return self.base.steps

    @property
    def programs(self) -> tuple[TrainGraph, ...]:
        return self.base.programs

    @cached_property
    def cost(self) -> GroupCost:
        few, step = self.per_step()
        return of_strategy([few + step * self.steps], self.strategy, self.cluster)

    def per_step(self) -> tuple[Polynomial, Polynomial]:
        """As that of a `Candidate`."""
        remat = self.strategy.remat
        again = self.again if remat is not None and remat.mode == "full" else (Polynomial(), Polynomial())
        kernels = [one + more for one, more in zip(self.base.per_step(), again, strict=True)]
        few, step = (one + self._waits(one, nbytes) for one, nbytes in zip(kernels, self._weights, strict=True))
        return few, step

    def _waits(self, kernels: Polynomial, nbytes: Fraction) -> Polynomial:
        """For weights that are gathered, and gradients that are added up, once per micro-batch: what of that no kernel
        hides.
        """
        if self._cut == 1:
            return Polynomial()
        axis, sent = ".".join(self.strategy.data_axes), nbytes * (1 - Fraction(1, self._cut)) * 2
        loads = ring(self.strategy.mesh, axis, self.cluster)
        per_byte_s = loads.byte_s(self.cluster) if loads.between else 1 / self.cluster.bytes_per_s(between=False)
        hidden = 0 if self.cluster.sustained.overlap_slowdown is None else kernels.at(NOMINAL_TOKENS)
        return Polynomial(max(Fraction(0), sent * per_byte_s - hidden))

    @property
    def _weights(self) -> tuple[Fraction, Fraction]:
        """Bytes of the weights of a rank: of the first sample, and what the second has more."""
        tokens = self.anchors[-1]
        few, whole = self.base.of_first(tokens).weight_bytes, self.base.at(tokens).weight_bytes
        return Fraction(few), Fraction(whole - few) / self.steps

    @property
    def _cut(self) -> int:
        """Ranks over which ZeRO cuts what is replicated."""
        strategy = self.strategy
        return math.prod(strategy.degree(axis) for axis in strategy.data_axes) if strategy.zero == ZERO else 1

    @property
    def reduce_s(self) -> float:
        return self.base.reduce_s

    @property
    def pace(self) -> Pace | None:
        return self.base.pace

    def predicted(self, tokens: int) -> Memory:
        return self._least(self.base.at(tokens))

    def of_first(self, tokens: int) -> Memory:
        """Of the first sample."""
        return self._least(self.base.of_first(tokens))

    def _least(self, one: Memory) -> Memory:
        cut = self._cut
        gradients = one.gradient_bytes // cut
        saved = self.strategy.remat is None and self.strategy.chunks == 1
        step = gradients + (one.step_bytes - one.gradient_bytes if saved else 0)
        weights, staging = one.weight_bytes // cut, one.staging_bytes // cut
        return replace(one, weight_bytes=weights, step_bytes=step, gradient_bytes=gradients, staging_bytes=staging)


def again_s(base: Candidate) -> tuple[Polynomial, Polynomial]:
    """Seconds of the kernels that full recomputation runs again: of the first sample, and what the second has more."""
    few, more = (_again_s(program, base.cluster) for program in base.programs)
    return few, more + few * -1


def _again_s(program: TrainGraph, cluster: ClusterSpec) -> Polynomial:
    assert isinstance(program, ExecGraph)
    return computed_s(program, cluster, _run_again(program.body.graph))


def _run_again(graph: fx.Graph) -> set[fx.Node]:
    """Forward nodes of a block whose values its backward reads, with what they are made of there, but for those that
    are read outside of the block, which are kept.
    """
    blocks = {node: block_of(reader_of(node)) for node in graph.nodes if not is_backward(node)}

    def leaves(node: fx.Node) -> bool:
        return any(blocks[node] != blocks[user] for user in node.users if user in blocks)

    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not blocks.get(node) or leaves(node) or block_of(fqn_of(node)) == "":
            continue
        if any(is_backward(user) or user in found for user in node.users):
            found.add(node)
    return found
