"""The terms of gradients: what ranks hold before a reduction, and who adds what.

A gradient is a sum of *terms*: one for every coordinate of the partial axes of its placement (and, for a tied weight,
of every stage that has it). Ranks that differ only on axes which neither shard nor are partial hold the same term.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fxpar.cost.flowing import flowing_pace
from fxpar.errors import ReductionError
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import ExecGraph, Program
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.switch.boxes import Grid, Holders, places
from fxpar.switch.layout import PlacedParam
from fxpar.switch.problem import TensorClass

NOWHERE, EVERYWHERE = -1, -2  # instead of a node


@dataclass(frozen=True)
class GradientPlacement:
    """A gradient before its reduction: global shape, placement (with partial axes), dtype on the wire."""

    shape: tuple[int, ...]
    dist: DistConfig
    dtype: torch.dtype


Placements = Mapping[str, GradientPlacement | Sequence[GradientPlacement]]


def gradient_placements(program: Program) -> dict[str, tuple[GradientPlacement, ...]]:
    """How each gradient leaves the graph, partial axes included: once per pipeline stage that gives a term of it, but
    only once per rank, which adds up what its stages give.
    """
    found: dict[str, dict[GradientPlacement, None]] = defaultdict(dict)
    for part in program.storing:
        for out, stored in zip(part.outputs, part.stored_outputs, strict=True):
            if out.kind == "grad":
                shape = tuple(int(s) for s in stored.meta.shape)
                found[out.fqn][GradientPlacement(shape, stored.dist, stored.meta.dtype)] = None
    return {out.fqn: tuple(found[out.fqn]) for out in program.outputs if out.kind == "grad"}


def accumulators_of(program: Program) -> Hashable | None:
    """What tells the accumulators of two programs apart: where it is the same, a run of one goes on adding to the
    gradients that a run of the other has left, and both leave at once. None for a program that changes gradients behind
    its micro-batches, and for several teams.
    """
    if not isinstance(program, ExecGraph | PipelineGraph) or flowing_pace(program) is None:
        return None
    return tuple(sorted(gradient_placements(program).items(), key=operator.itemgetter(0)))


@dataclass(frozen=True, eq=False)
class TermClass:
    """The terms of a class of tensors: `held` [slices, ranks] (of any term), and the term of each rank (-1: none).

    `to` [slices, terms] says which ranks that need a slice get a term of it: those of a node, those EVERYWHERE, or
    NOWHERE any; None is everywhere for all. `node_of` [ranks] is the node of each rank.
    """

    cls: TensorClass
    term_of: np.ndarray
    count: int
    to: np.ndarray | None = None
    node_of: np.ndarray | None = None

    def term(self, number: int) -> TensorClass:
        """The class with only the holders of one term, and who gets it."""
        one = replace(self.cls, giving=self.term_of == number)
        if self.to is None:
            return one
        there = self.to[:, number, None]
        return replace(one, getting=(there == EVERYWHERE) | (there == self.node_of))

    def own(self, rank: int) -> np.ndarray:
        """[slices]: whether a rank that needs a slice adds the term of it that it has itself."""
        held = self.cls.before.of(rank)
        if self.to is None or self.node_of is None:
            return held
        there = self.to[:, self.term_of[rank]]
        return held & ((there == EVERYWHERE) | (there == self.node_of[rank]))

    def adding_bytes(self, target_itemsize: int) -> np.ndarray:
        """[ranks]: bytes that each reads and writes (sums: both) to add all terms of its part of one tensor."""
        needed, per_byte = self.cls.after.table, 1 + 2 * target_itemsize / self.cls.itemsize
        if self.to is None or self.node_of is None:
            return per_byte * self.count * (self.cls.nbytes @ needed)
        slices, nodes = len(self.to), int(self.node_of[-1]) + 1
        chosen = np.argwhere(self.to >= 0)
        by_node = np.bincount(chosen[:, 0] * nodes + self.to[tuple(chosen.T)], minlength=slices * nodes)
        terms = by_node.reshape(slices, nodes) + (self.to == EVERYWHERE).sum(1, keepdims=True)
        return per_byte * (self.cls.nbytes @ (needed * terms[:, self.node_of]))


def terms_held(before: tuple[GradientPlacement, ...], grid: Grid, world: int) -> tuple[Holders, np.ndarray, int]:
    """Which slices each rank has a term of, the term of each rank ([ranks]), how many there are."""
    term_of, count = np.full(world, -1), 0
    for one in before:
        mesh = one.dist.mesh
        ranks = np.array(mesh.ranks)
        if (term_of[ranks] >= 0).any():
            raise ReductionError(f"tensors of shape {list(one.shape)}", "two stages share a rank")
        axes = [name for axis, _ in one.dist.partial for name in axis.split(".")]
        term_of[ranks] = count + places(mesh, axes)
        count += math.prod(mesh.degree(axis) for axis in axes)
    return grid.holders(without_partial(before).copies, world), term_of, count


def without_partial(placed: tuple[GradientPlacement, ...]) -> PlacedParam:
    return PlacedParam(placed[0].shape, placed[0].dtype, tuple(replace(one.dist, partial=()) for one in placed))
