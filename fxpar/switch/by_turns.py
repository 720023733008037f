"""Plans by turns: for so many ranks that nobody can have the whole plan. See `turns`.

Such a plan knows its rule; `rows_of(rank)` are the transfers of one rank. Its times are those of the fullest of 16
ranks spread over the world; its bytes are exact.
Tensors that lie alike are planned once, and such a class is kept for later plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import SwitchPlanError
from fxpar.ir.dist_config import DistConfig
from fxpar.switch.problem import Alike, SwitchProblem, TensorClass, class_of_tensors
from fxpar.switch.transfers import TERM_TRANSFER
from fxpar.switch.turns import TransferRule

TURNS = "turns"  # the name of the planner
SAMPLE = 16  # ranks
LISTED = 1 << 20  # transfers; a plan of more takes seconds and gigabytes on every rank


@dataclass(frozen=True, eq=False)
class Leg:
    """The rule of a class of tensors, and what each of the sampled ranks moves of one: [ranks, steps, 4]."""

    rule: TransferRule

    @cached_property
    def sample(self) -> np.ndarray:
        return self.rule.traffic(sampled(len(self.rule.node_of)))

    @cached_property
    def transfers(self) -> int:
        """How many transfers of one tensor there are at most, on all ranks."""
        return int(self.rule.cls.after.counts.sum()) * self.rule.terms

    @cached_property
    def wrong(self) -> tuple[int, int, int, int] | None:
        """(slice, sender, receiver, step) of a transfer to a sampled rank from one that does not have it by then."""
        for rank in sampled(len(self.rule.node_of)):
            rows = self.rule.receives(rank)
            for row in np.flatnonzero(~self.rule.has_by_then(rows))[:1].tolist():
                return int(rows.slices[row]), int(rows.src[row]), rank, int(rows.step[row])
        return None

    @cached_property
    def has_owners(self) -> bool:
        """Whether each slice that is needed has a holder."""
        cls = self.rule.cls
        return not ((cls.after.counts > 0) & (cls.before.counts == 0)).any()


def sampled(world: int) -> list[int]:
    """The ranks that stand for all."""
    return sorted({index * (world - 1) // (SAMPLE - 1) for index in range(SAMPLE)})


@lru_cache(maxsize=512)
def leg(
    shape: tuple[int, ...],
    itemsize: int,
    before: tuple[DistConfig, ...],
    after: tuple[DistConfig, ...],
    world: int,
    devices_per_node: int,
) -> Leg:
    """The leg of tensors of this kind."""
    cls = class_of_tensors((), shape, itemsize, before, after, world)
    return Leg(TransferRule(cls, np.arange(world) // devices_per_node))


@dataclass(frozen=True, eq=False)
class ByTurns:
    """What plans by turns have in common; `legs` are those of the problem's classes."""

    problem: SwitchProblem
    legs: tuple[Leg, ...]

    @property
    def classes(self) -> Iterator[tuple[TensorClass, Leg]]:
        return zip(self.problem.classes, self.legs, strict=True)

    def rows_of(self, rank: int) -> np.ndarray:
        """All transfers that `rank` takes part in, in the order (step, tensor, slice, destination, term)."""
        parts = [np.empty(0, TERM_TRANSFER)]
        for cls, one in self.classes:
            for rows in (one.rule.sends(rank), one.rule.receives(rank)):
                table = np.empty((len(cls.members), len(rows.slices)), TERM_TRANSFER)
                table["tensor"] = cls.members[:, None]
                table["slice"], table["src"], table["dst"] = rows.slices, rows.src, rows.dst
                table["nbytes"], table["step"], table["term"] = cls.nbytes[rows.slices], rows.step, rows.terms
                parts.append(table.ravel())
        table = np.concatenate(parts)
        keys = ("term", "dst", "slice", "tensor", "step")
        return table[np.lexsort([table[key] for key in keys])]

    @cached_property
    def most(self) -> np.ndarray:
        """[tensors, steps]: bytes that no rank exceeds in its messages."""
        found = np.zeros((len(self.problem.tensors), 2))
        for cls, one in self.classes:
            found[cls.members] = one.rule.most
        return found[:, : self.steps] if len(found) else found

    @cached_property
    def steps(self) -> int:
        """Hops: 2 if slices are relayed."""
        return 2 if any(one.rule.most[1] for one in self.legs) else 1

    @cached_property
    def _sample(self) -> np.ndarray:
        """[ranks, steps, 4]: bytes that the sampled ranks send inside nodes and between them, and receive."""
        total = np.zeros((len(sampled(self.problem.world)), 2, 4))
        for cls, one in self.classes:
            total += len(cls.members) * one.sample
        return total

    @property
    def predicted_s(self) -> float:
        """Seconds on the cluster of the problem, of the fullest sampled rank."""
        return self.links_s

    @cached_property
    def links_s(self) -> float:
        """Seconds that the links of the problem's cluster need for the fullest sampled rank."""
        cluster = self.problem.cluster
        rates = [float(cluster.bytes_per_s(between)) for between in (False, True)]
        by_step = (self._sample / (2 * rates)).max((0, 2))
        return float(by_step.sum()) + float(cluster.latency_s) * int((by_step > 0).sum())

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that all ranks send."""
        return round(sum(len(cls.members) * one.rule.received.sum() for cls, one in self.classes))

    @cached_property
    def inter_node_bytes(self) -> int:
        """Bytes between nodes."""
        return round(sum(len(cls.members) * one.rule.crossing for cls, one in self.classes))

    @property
    def intra_node_bytes(self) -> int:
        return self.total_bytes - self.inter_node_bytes

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly if tensors, slices, holders and nodes are: the rule does the rest."""
        cluster = self.problem.cluster
        digest = hashlib.sha256(f"turns {self.problem.world} {cluster.devices_per_node}".encode())
        digest.update("\0".join(self.problem.tensors).encode())
        for cls, one in self.classes:
            term_of = one.rule.term_of
            arrays = [cls.members, cls.boxes, cls.before.piece, cls.before.has, cls.after.piece, cls.after.has]
            for array in (*arrays, *([] if term_of is None else [term_of])):
                digest.update(repr((array.shape, cls.itemsize, one.rule.terms)).encode())
                digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()[:16]

    def verify(self) -> None:
        """Raise SwitchPlanError unless the sampled ranks get everything from a rank that has it by then."""
        for cls, one in self.classes:
            if one.wrong is not None:
                piece, src, dst, step = one.wrong
                tensor = int(cls.members[0])
                why = f"comes from rank {src}, which does not hold it in step {step}"
                raise SwitchPlanError(self.problem.tensors[tensor], self.problem.box_text(tensor, piece), dst, why)


@dataclass(frozen=True, eq=False)
class SwitchByTurns(ByTurns):
    """A switch of which no rank has all transfers; as a `SwitchPlan` for the ranks that carry it out."""

    planner: str
    plan_cpu_s: float = 0.0
    chosen: str = TURNS


def transfers_at_most(alike: Alike, world: int, cluster: ClusterSpec) -> int:
    """How many transfers a switch from the first source alone takes, what ranks hold already counted too."""
    return sum(
        len(members) * leg(shape, itemsize, before[0], after, world, cluster.devices_per_node).transfers
        for (shape, itemsize, before, after), members in alike.items()
    )


def switch_by_turns(
    alike: Alike, tensors: tuple[str, ...], names: tuple[str, str], world: int, cluster: ClusterSpec
) -> tuple[SwitchProblem, tuple[Leg, ...]]:
    """Problem and legs: each class comes from the one source that is cheapest for it, between nodes first.

    A source that lacks a slice is taken only if all do.
    """
    legs, classes = [], []
    for (shape, itemsize, before, after), members in alike.items():
        found = [leg(shape, itemsize, copies, after, world, cluster.devices_per_node) for copies in before]
        best = min(found, key=_cost)
        legs.append(best)
        classes.append(replace(best.rule.cls, members=np.array(members)))
    return SwitchProblem(cluster, *names, world, tensors, tuple(classes)), tuple(legs)


def _cost(one: Leg) -> tuple[bool, float, float]:
    if not one.has_owners:
        return True, 0.0, 0.0
    return False, one.rule.crossing, float(one.rule.received.sum())
