"""Plans of reductions: gradients, as the ranks of a strategy hold them, summed straight into another layout.

Each element of the target gets each term (see `terms`) once: from the rank itself if it has it, else from a holder on
the same node that has sent least inside nodes so far, else from the holder that has sent least between nodes (the rule
of HotSPa's Algorithm 1, term by term). Terms are added in their order, so copies of a target on several ranks stay
equal bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ReductionError, SwitchPlanError, nearest
from fxpar.ir.dist_config import DistConfig
from fxpar.switch.boxes import Grid, Holders, refine
from fxpar.switch.by_turns import LISTED, TURNS, ByTurns, Leg
from fxpar.switch.layout import ParamLayout
from fxpar.switch.planners.groups import local_groups, remote_groups
from fxpar.switch.predict import TransferPlan, adding_seconds
from fxpar.switch.problem import SwitchProblem, TensorClass
from fxpar.switch.terms import GradientPlacement, Placements, TermClass, terms_held, without_partial
from fxpar.switch.transfers import TERM_TRANSFER, TRANSFER, joined, rows
from fxpar.switch.turns import TransferRule
from fxpar.switch.waterfill import pick


@dataclass(frozen=True, eq=False)
class ReductionPlan(TransferPlan):
    """`transfers` (see TERM_TRANSFER) are in the order (tensor, slice, destination, term); own terms are not in it."""

    terms: tuple[TermClass, ...]
    sources: ParamLayout  # partial axes left out
    target: ParamLayout
    most = None  # what a rank sends is in the table

    @cached_property
    def predicted_s(self) -> float:
        """Seconds on the cluster of the problem: what travels, and what is added."""
        adding = np.zeros(self.problem.world)
        for one in self.terms:
            adding += len(one.cls.members) * one.adding_bytes(_itemsize(self.target, self.problem, one.cls))
        return adding_seconds(self.problem.cluster, self.links_s, float(adding.max()))

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

    @cached_property
    def predicted_s(self) -> float:
        """Seconds on the cluster of the problem, of the fullest sampled rank; with what the fullest rank adds."""
        adding = 0.0
        for cls, one in self.classes:
            per_byte = 1 + 2 * _itemsize(self.target, self.problem, cls) / cls.itemsize
            adding += per_byte * len(cls.members) * one.rule.terms * cls.after.most(cls.nbytes)
        return adding_seconds(self.problem.cluster, self.links_s, adding)


def _itemsize(target: ParamLayout, problem: SwitchProblem, cls: TensorClass) -> int:
    """Bytes of an element of these tensors' sums."""
    return target.params[problem.tensors[cls.members[0]]].dtype.itemsize


AnyReductionPlan = ReductionPlan | ReductionByTurns


def plan_reduction(
    sources: Placements,
    target: ParamLayout,
    cluster: ClusterSpec,
    name: str = "gradients",
    planner: str = "auto",
    listed: int = LISTED,
) -> AnyReductionPlan:
    """Plan the sum of the gradients `sources` into `target` (its tensors are those of `sources`). With planner "turns",
    or more than `listed` transfers, nobody gets the whole plan: every rank works out its own part, see `by_turns`.

    Raises ReductionError (a gradient without target or the other way round, other shapes, partial axes that do not
    sum), LayoutError, ClusterError.
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
    plain = {fqn: without_partial(placed) for fqn, placed in placements.items()}
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


def _term_class(alike: Alike, world: int) -> TermClass:
    plain = without_partial(alike.before)
    grid = refine(plain.shape, (*plain.copies, *alike.after))
    held, term_of, count = terms_held(alike.before, grid, world)
    needed = grid.holders(alike.after, world)
    return TermClass(tensor_class(alike, grid, held, needed), term_of, count)


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
