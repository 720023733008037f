"""Plans of reductions: gradients, as the ranks of a strategy hold them, summed straight into another layout.

A gradient is a sum of *terms*: one for every coordinate of the partial axes of its placement (and, for a tied weight,
of every stage that has it). Ranks that differ only on axes which neither shard nor are partial hold the same term.
Each element of the target gets each term once: from the rank itself if it has it, else from a holder on the same node
that has sent least inside nodes so far, else from the holder that has sent least between nodes (the rule of HotSPa's
Algorithm 1, term by term). Terms are added in their order, so copies of a target on several ranks stay equal bit by
bit.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ReductionError, SwitchPlanError, nearest
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import Program
from fxpar.switch.boxes import Grid, Holders, places, refine
from fxpar.switch.by_turns import LISTED, TURNS, ByTurns, Leg
from fxpar.switch.layout import ParamLayout, PlacedParam
from fxpar.switch.planners.groups import local_groups, remote_groups
from fxpar.switch.predict import TransferPlan
from fxpar.switch.problem import SwitchProblem, TensorClass
from fxpar.switch.transfers import TERM_TRANSFER, TRANSFER, joined, rows
from fxpar.switch.turns import TransferRule
from fxpar.switch.waterfill import pick

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
    for part in program.placed:
        for out, stored in zip(part.outputs, part.stored_outputs, strict=True):
            if out.kind == "grad":
                shape = tuple(int(s) for s in stored.meta.shape)
                found[out.fqn][GradientPlacement(shape, stored.dist, stored.meta.dtype)] = None
    return {out.fqn: tuple(found[out.fqn]) for out in program.outputs if out.kind == "grad"}


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


@dataclass(frozen=True, eq=False)
class ReductionPlan(TransferPlan):
    """`transfers` (see TERM_TRANSFER) are in the order (tensor, slice, destination, term); own terms are not in it."""

    terms: tuple[TermClass, ...]
    sources: ParamLayout  # partial axes left out
    target: ParamLayout
    most = None  # what a rank sends is in the table

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly if tensors, slices, terms and transfers are."""
        digest = hashlib.sha256("\0".join(self.problem.tensors).encode())
        for terms in self.terms:
            digest.update(repr((terms.cls.boxes.shape, terms.cls.itemsize, terms.count)).encode())
            for array in (terms.cls.members, terms.cls.boxes, terms.term_of, terms.to):
                digest.update(b"" if array is None else np.ascontiguousarray(array, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.transfers).tobytes())
        return digest.hexdigest()[:16]

    def rows_of(self, rank: int) -> np.ndarray:
        """The transfers that `rank` sends or receives, and maybe others."""
        return self.transfers

    def verify(self) -> None:
        """Raise SwitchPlanError unless each element gets each term exactly once, from a rank that has it."""
        _verify(self)

    def to_json(self) -> dict[str, Any]:
        """Numbers, not the transfers; bytes are whole, times in seconds."""
        load = self.traffic
        return {
            "from": self.problem.source,
            "to": self.problem.target,
            "ranks": self.problem.world,
            "intra_node_bytes": self.intra_node_bytes,
            "inter_node_bytes": self.inter_node_bytes,
            "max_send_bytes": self.max_send_bytes,
            "transfers": len(self.transfers),
            "predicted_s": self.predicted_s,
            "fingerprint": self.fingerprint,
            "node_matrix": load.by_node.tolist(),
            "sent_bytes": (load.sent_inside + load.sent_between).tolist(),
            "received_bytes": (load.received_inside + load.received_between).tolist(),
        }


@dataclass(frozen=True, eq=False)
class ReductionByTurns(ByTurns):
    """A reduction of which no rank has all transfers; as a `ReductionPlan` for the ranks that carry it out."""

    terms: tuple[TermClass, ...]
    sources: ParamLayout
    target: ParamLayout


AnyReductionPlan = ReductionPlan | ReductionByTurns


def plan_reduction(
    sources: Placements, target: ParamLayout, cluster: ClusterSpec, name: str = "gradients"
) -> ReductionPlan:
    """Plan the sum of the gradients `sources` into `target` (its tensors are those of `sources`).

    Raises ReductionError (a gradient without target or the other way round, other shapes, partial axes that do not
    sum), LayoutError, ClusterError.
    """
    gradients = matched(sources, target, cluster, name)
    terms = tuple(_term_class(one, gradients.world) for one in gradients.alike)
    return reduction_of(gradients.layout, target, cluster, terms)


def plan_large_reduction(
    sources: Placements,
    target: ParamLayout,
    cluster: ClusterSpec,
    name: str = "gradients",
    planner: str = "auto",
    listed: int = LISTED,
) -> AnyReductionPlan:
    """`plan_reduction`; but with planner "turns", or more than `listed` transfers, nobody gets the whole plan.

    Every rank then works out its own part of it, see `by_turns`.
    """
    gradients = matched(sources, target, cluster, name)
    terms = tuple(_term_class(one, gradients.world) for one in gradients.alike)
    problem = _problem(gradients.layout, target, cluster, terms)
    legs = tuple(Leg(TransferRule(one.cls, problem.node_of, one.term_of, one.count)) for one in terms)
    transfers = sum(len(one.rule.cls.members) * one.transfers for one in legs)
    if planner == TURNS or transfers > listed:
        return ReductionByTurns(problem, legs, terms, gradients.layout, target)
    return reduction_of(gradients.layout, target, cluster, terms)


def reduction_of(
    sources: ParamLayout, target: ParamLayout, cluster: ClusterSpec, terms: tuple[TermClass, ...]
) -> ReductionPlan:
    """The plan that brings these terms to who needs them."""
    problem = _problem(sources, target, cluster, terms)
    return ReductionPlan(terms, sources, target, problem=problem, transfers=_transfers(problem, terms))


def _problem(
    sources: ParamLayout, target: ParamLayout, cluster: ClusterSpec, terms: tuple[TermClass, ...]
) -> SwitchProblem:
    classes = tuple(one.cls for one in terms)
    world = max(sources.world, target.world)
    return SwitchProblem(cluster, sources.name, target.name, world, tuple(sources.params), classes)


@dataclass(frozen=True)
class Alike:
    """Tensors (by number) whose gradients and targets lie alike."""

    members: tuple[int, ...]
    before: tuple[GradientPlacement, ...]
    after: tuple[DistConfig, ...]


@dataclass(frozen=True)
class Matched:
    """Gradients, checked against their target. `layout` is that of the gradients, partial axes left out."""

    layout: ParamLayout
    alike: tuple[Alike, ...]

    @property
    def world(self) -> int:
        return self.layout.world


def matched(sources: Placements, target: ParamLayout, cluster: ClusterSpec, name: str) -> Matched:
    """Raises what `plan_reduction` raises."""
    placements = {fqn: _as_tuple(sources, fqn, target) for fqn in target.params if _known(fqn, sources)}
    for fqn in sources:
        if fqn not in target.params:
            raise ReductionError(fqn, f"layout {target.name!r} has no such parameter{nearest(fqn, target.params)}")
    plain = {fqn: _without_partial(placed) for fqn, placed in placements.items()}
    world = max([target.world, *(dist.mesh.last + 1 for p in plain.values() for dist in p.copies)])
    cluster.require(world)
    alike: dict[tuple, list[int]] = {}
    for number, (fqn, placed) in enumerate(placements.items()):
        key = (placed, target.params[fqn].copies)
        alike.setdefault(key, []).append(number)
    kinds = tuple(Alike(tuple(members), before, after) for (before, after), members in alike.items())
    return Matched(ParamLayout(name, world, plain), kinds)


def _known(fqn: str, sources: Placements) -> bool:
    if fqn not in sources:
        raise ReductionError(fqn, f"no gradient is given for it{nearest(fqn, sources)}")
    return True


def _as_tuple(sources: Placements, fqn: str, target: ParamLayout) -> tuple[GradientPlacement, ...]:
    given = sources[fqn]
    placed = (given,) if isinstance(given, GradientPlacement) else tuple(given)
    for one in placed:
        if one.shape != target.params[fqn].shape:
            expected = list(target.params[fqn].shape)
            raise ReductionError(fqn, f"the gradient is {list(one.shape)}, but the parameter {expected}")
        if one.dtype != placed[0].dtype:
            raise ReductionError(fqn, f"its stages hold gradients of {placed[0].dtype} and of {one.dtype}")
        for axis, op in one.dist.partial:
            if op != "sum":
                raise ReductionError(fqn, f"it is a partial {op} over axis {axis!r}; only sums can be reduced")
    return placed


def _without_partial(placed: tuple[GradientPlacement, ...]) -> PlacedParam:
    return PlacedParam(placed[0].shape, placed[0].dtype, tuple(replace(one.dist, partial=()) for one in placed))


def _term_class(alike: Alike, world: int) -> TermClass:
    plain = _without_partial(alike.before)
    grid = refine(plain.shape, (*plain.copies, *alike.after))
    held, term_of, count = terms_held(alike.before, grid, world)
    needed = grid.holders(alike.after, world)
    return TermClass(tensor_class(alike, grid, held, needed), term_of, count)


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
    return grid.holders(_without_partial(before).copies, world), term_of, count


def tensor_class(alike: Alike, grid: Grid, held: Holders, needed: Holders) -> TensorClass:
    """The class of these tensors, cut by `grid`."""
    itemsize = alike.before[0].dtype.itemsize
    return TensorClass(np.array(alike.members), grid.shape, itemsize, grid.boxes, grid.numel * itemsize, held, needed)


def _transfers(problem: SwitchProblem, classes: Sequence[TermClass]) -> np.ndarray:
    """Big slices first, so that small ones even out the loads."""
    sent_inside, sent_between = np.zeros(problem.world, np.int64), np.zeros(problem.world, np.int64)
    parts = []
    for terms in sorted(classes, key=lambda one: -int(one.cls.nbytes.max(initial=0))):
        for number in range(terms.count):
            one = terms.term(number)
            made = [*_served(problem, one, local_groups, sent_inside)]
            made += _served(problem, one, remote_groups, sent_between)
            for table in made:
                full = np.zeros(len(table), TERM_TRANSFER)
                for field in TRANSFER.names or ():
                    full[field] = table[field]
                full["term"] = number
                parts.append(full)
    table = joined(parts) if parts else np.empty(0, TERM_TRANSFER)
    return table[np.lexsort((table["term"], table["dst"], table["slice"], table["tensor"]))]


def _served(problem: SwitchProblem, cls: TensorClass, make: Any, sent: np.ndarray) -> Iterator[np.ndarray]:
    """Receivers choose the least loaded holder, tensor after tensor."""
    for groups in make(problem, cls):
        count, nbytes = groups.receivers.shape[1], cls.nbytes[groups.slices]
        picks = pick(sent[groups.holders], nbytes, len(cls.members) * count)
        chosen = np.take_along_axis(groups.holders, picks, 1)
        np.add.at(sent, chosen, nbytes[:, None])
        src = chosen.reshape(-1, len(cls.members), count).transpose(1, 0, 2)
        yield rows(cls, groups.slices, src, np.broadcast_to(groups.receivers, src.shape), 0)


def _verify(plan: ReductionPlan) -> None:
    problem, table = plan.problem, plan.transfers
    limits = {"tensor": len(problem.tensors), "src": problem.world, "dst": problem.world}
    for name, limit in limits.items():
        for row in table[(table[name] < 0) | (table[name] >= limit)][:1]:
            raise SwitchPlanError(f"tensor {row['tensor']}", "", int(row["dst"]), f"has {name} {row[name]} of {limit}")
    number = problem.class_of[table["tensor"]] if len(table) else np.empty(0, np.int64)
    for index, terms in enumerate(plan.terms):
        _verify_class(problem, terms, table[number == index])


def _verify_class(problem: SwitchProblem, terms: TermClass, table: np.ndarray) -> None:
    cls = terms.cls
    slices = len(cls.nbytes)

    def fail(row: Any, why: str) -> None:
        raise SwitchPlanError(
            problem.tensors[row["tensor"]], problem.box_text(row["tensor"], row["slice"]), int(row["dst"]), why
        )

    for name, limit in (("slice", slices), ("term", terms.count)):
        for row in table[(table[name] < 0) | (table[name] >= limit)][:1]:
            fqn = problem.tensors[row["tensor"]]
            raise SwitchPlanError(fqn, "", int(row["dst"]), f"has {name} {row[name]}, which does not exist")
    for row in table[table["nbytes"] != cls.nbytes[table["slice"]]][:1]:
        fail(row, f"is said to have {row['nbytes']} bytes")
    has = cls.held[table["slice"], table["src"]] & (terms.term_of[table["src"]] == table["term"])
    for row in table[~has][:1]:
        fail(row, f"gets term {row['term']} from rank {row['src']}, which does not hold it")
    place = np.searchsorted(cls.members, table["tensor"])
    for number in range(terms.count):
        mine = table["term"] == number
        arrivals = np.zeros((len(cls.members), slices, problem.world), np.int64)
        np.add.at(arrivals, (place[mine], table["slice"][mine], table["dst"][mine]), 1)
        wrong = np.argwhere(arrivals != terms.term(number).missing)
        for member, piece, rank in wrong[:1].tolist():
            row = {"tensor": int(cls.members[member]), "slice": piece, "dst": rank}
            times = int(arrivals[member, piece, rank])
            fail(row, f"gets term {number} {times} times in messages" if times else f"never gets term {number}")
