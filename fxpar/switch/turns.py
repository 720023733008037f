"""Who sends what to whom by a rule instead of a table: every rank works out its own transfers, and no rank all of them.

A table of all transfers has a row per tensor, slice and receiver: 6 billion from the home layout of a 70B model to
tp8 on 4,096 ranks. The rule:

    a receiver with holders of the slice on its node asks one of them
    else one receiver of the node, the *door*, asks any holder, and the others of the node ask the door (step 1)

Holders and doors take turns: whose turn it is follows from the number of the slice among those of its target piece, and
from the receiver. Terms of a sum have no doors: each receiver asks for each term that it does not hold itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxpar.switch.boxes import Holders
from fxpar.switch.problem import TensorClass


@dataclass(frozen=True, eq=False)
class Found:
    """The ranks that answer each of several questions: per copy `counts` of `ranks` from `starts` on, [copies, n]."""

    ranks: list[np.ndarray]
    starts: np.ndarray
    counts: np.ndarray

    @cached_property
    def total(self) -> np.ndarray:
        """[n]: how many ranks."""
        return self.counts.sum(0)

    def pick(self, turn: np.ndarray) -> np.ndarray:
        """[n]: the rank whose turn it is, modulo how many there are; -1 where there is none."""
        left = turn % np.maximum(self.total, 1)
        chosen = np.full(len(left), -1)
        for ranks, start, count in zip(self.ranks, self.starts, self.counts, strict=True):
            here = (left >= 0) & (left < count)
            chosen[here] = ranks[(start + left)[here]]
            left = left - count  # below zero once it has been found
        return chosen

    def each(self) -> tuple[np.ndarray, np.ndarray]:
        """(question, rank) of all answers."""
        questions, found = [], []
        for ranks, start, count in zip(self.ranks, self.starts, self.counts, strict=True):
            which = np.repeat(np.arange(len(count)), count)
            ahead = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
            questions.append(which)
            found.append(ranks[start[which] + ahead])
        return np.concatenate(questions), np.concatenate(found)


class Directory:
    """Looks up who has a slice (or one of its `terms`, if `term_of` [world] says which term a rank has), by node."""

    def __init__(
        self, holders: Holders, node_of: np.ndarray, term_of: np.ndarray | None = None, terms: int = 1
    ) -> None:
        self._piece, self._terms, self._nodes = holders.piece, terms, int(node_of[-1]) + 1
        self._codes: list[np.ndarray] = []
        self._ranks: list[np.ndarray] = []
        for has in holders.has:
            inside = np.flatnonzero(has >= 0)
            term = term_of[inside] if term_of is not None else 0
            code = (has[inside] * terms + term) * self._nodes + node_of[inside]
            order = code.argsort(kind="stable")
            self._codes.append(code[order])
            self._ranks.append(inside[order])

    def find(self, slices: np.ndarray, terms: np.ndarray | int = 0, nodes: np.ndarray | int | None = None) -> Found:
        """Who has each of `slices` [n]; with `nodes`, on that node only."""
        starts, counts = [], []
        for piece, code in zip(self._piece, self._codes, strict=True):
            low = (piece[slices] * self._terms + terms) * self._nodes
            low, width = (low, self._nodes) if nodes is None else (low + nodes, 1)
            start = np.searchsorted(code, low)
            starts.append(start)
            counts.append(np.searchsorted(code, low + width) - start)
        return Found(self._ranks, np.stack(starts), np.stack(counts))


@dataclass(frozen=True, eq=False)
class Rows:
    """Transfers of one tensor of a class, [n] each."""

    slices: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    step: np.ndarray
    terms: np.ndarray


@dataclass(frozen=True, eq=False)
class TransferRule:
    """The transfers of a class of tensors; of a sum, if `term_of` [world] is given, with the count of its terms."""

    cls: TensorClass
    node_of: np.ndarray
    term_of: np.ndarray | None = None
    terms: int = 1

    @cached_property
    def _before(self) -> Directory:
        return Directory(self.cls.before, self.node_of, self.term_of, self.terms)

    @cached_property
    def _after(self) -> Directory:
        return Directory(self.cls.after, self.node_of)

    @cached_property
    def _turn(self) -> np.ndarray:
        """[slices]: number of each slice among those of its target piece."""
        piece = self.cls.after.piece[0]
        order = piece.argsort(kind="stable")
        first = np.searchsorted(piece[order], piece[order])
        turn = np.empty(len(piece), np.int64)
        turn[order] = np.arange(len(piece)) - first
        return turn

    def source(self, slices: np.ndarray, terms: np.ndarray, receivers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sender, step) for receivers that have to get these slices, [n] each."""
        node, turn = self.node_of[receivers], self._turn[slices]
        near = self._before.find(slices, terms, node)
        asked, step = self._before.find(slices, terms).pick(node + turn), np.zeros(len(slices), np.int64)
        far = near.total == 0
        if self.term_of is None:
            door = self._after.find(slices, 0, node).pick(turn)
            step[far & (door != receivers)] = 1
            asked = np.where(door == receivers, asked, door)
        return np.where(far, asked, near.pick(receivers + turn)), step

    def receives(self, rank: int) -> Rows:
        """All that `rank` gets."""
        return self._received_by(np.array([rank]))[1]

    def sends(self, rank: int) -> Rows:
        """All that `rank` sends: of what it holds, and as a door."""
        return self._sent_by(np.array([rank]))[1]

    def _received_by(self, ranks: np.ndarray) -> tuple[np.ndarray, Rows]:
        """All that several ranks get, and which of them each row is of, [n]."""
        which, needed = np.nonzero(self.cls.after.of_all(ranks))
        which, slices = np.repeat(which, self.terms), np.repeat(needed, self.terms)
        terms = np.tile(np.arange(self.terms), len(needed))
        missing = ~self._has(slices, terms, ranks[which])
        which, slices, terms = which[missing], slices[missing], terms[missing]
        src, step = self.source(slices, terms, ranks[which])
        return which, Rows(slices, src, ranks[which], step, terms)

    def _sent_by(self, ranks: np.ndarray) -> tuple[np.ndarray, Rows]:
        """All that several ranks send, and which of them each row is of, [n]."""
        held = self.cls.before.of_all(ranks)
        which, slices = np.nonzero(held)
        asked, dst = self._after.find(slices).each()
        which, slices = which[asked], slices[asked]
        if self.term_of is None:
            doors, let_in = np.nonzero(self.cls.after.of_all(ranks) & ~held)
            asked, others = self._after.find(let_in, 0, self.node_of[ranks[doors]]).each()
            which, slices = np.concatenate([which, doors[asked]]), np.concatenate([slices, let_in[asked]])
            dst = np.concatenate([dst, others])
        of = ranks[which]
        terms = np.zeros(len(slices), np.int64) if self.term_of is None else self.term_of[of]
        src, step = self.source(slices, terms, dst)
        mine = (src == of) & (dst != of) & ~self._has(slices, terms, dst)
        return which[mine], Rows(slices[mine], src[mine], dst[mine], step[mine], terms[mine])

    def _has(self, slices: np.ndarray, terms: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        before = self.cls.before
        has = (before.piece[:, slices] == before.has[:, ranks]).any(0)
        return has if self.term_of is None else has & (self.term_of[ranks] == terms)

    def has_by_then(self, rows: Rows) -> np.ndarray:
        """[n]: does the sender of each transfer hold it from the start, or let it in one step before."""
        held = self._has(rows.slices, rows.terms, rows.src)
        src, step = self.source(rows.slices, rows.terms, rows.src)
        let_in = self.cls.after.piece[:, rows.slices] == self.cls.after.has[:, rows.src]
        return held | (let_in.any(0) & (rows.step == 1) & (step == 0) & self._has(rows.slices, rows.terms, src))

    @cached_property
    def received(self) -> np.ndarray:
        """[world]: bytes that every rank gets of one tensor; no rank may hold two copies before."""
        before, after, nbytes = self.cls.before, self.cls.after, self.cls.nbytes
        total = np.zeros(before.has.shape[1])
        if not len(nbytes):
            return total
        for piece, has in zip(after.piece, after.has, strict=True):
            needed = np.bincount(piece, nbytes, int(has.max()) + 1)
            total += np.where(has >= 0, needed[has], 0) * self.terms
            for other, had in zip(before.piece, before.has, strict=True):
                width = 1 + int(max(other.max(initial=0), had.max()))
                both, which = np.unique(piece * width + other, return_inverse=True)
                sizes = np.bincount(which, nbytes, len(both))
                asked = has * width + had
                at = np.minimum(np.searchsorted(both, asked), len(both) - 1)
                held = (has >= 0) & (had >= 0) & (both[at] == asked)
                total -= np.where(held, sizes[at], 0)
        return total

    @cached_property
    def crossing(self) -> float:
        """Bytes of one tensor that go between nodes, on all ranks; copies that share a node count as apart."""
        if not len(self.cls.nbytes):
            return 0.0
        nodes = int(self.node_of[-1]) + 1
        asking = [_by_node(has, self.node_of, nodes, self.term_of is None) for has in self.cls.after.has]
        answers = []
        for has in self.cls.before.has:
            terms = has if self.term_of is None else has * self.terms + self.term_of
            _, first = np.unique(terms * nodes + self.node_of, return_index=True)
            answers.append(_by_node(has[first], self.node_of[first], nodes, self.term_of is None))
        total = 0.0
        for piece, (code, count) in zip(self.cls.after.piece, asking, strict=True):
            needers = np.bincount(code // nodes, count, int(piece.max(initial=0)) + 1)
            total += float((self.cls.nbytes * needers[piece]).sum()) * self.terms
            for other, found in zip(self.cls.before.piece, answers, strict=True):
                total -= float((self.cls.nbytes * _met(piece, (code, count), other, found, nodes)).sum())
        return total

    def traffic(self, ranks: Sequence[int]) -> np.ndarray:
        """[ranks, steps, 4]: bytes of one tensor that each sends inside its node and between nodes, and receives."""
        found, of = np.zeros((len(ranks), 2, 4)), np.array(ranks)
        for column, (which, rows) in ((0, self._sent_by(of)), (2, self._received_by(of))):
            between = self.node_of[rows.src] != self.node_of[rows.dst]
            np.add.at(found, (which, rows.step, column + between), self.cls.nbytes[rows.slices])
        return found

    @cached_property
    def most(self) -> np.ndarray:
        """[steps]: bytes of one tensor that no rank exceeds in messages that it packs (once for all peers) and gets."""
        sent, got = self.cls.before.most(self.cls.nbytes), self.cls.after.most(self.cls.nbytes)
        if not self.received.any():
            return np.zeros(2)
        return np.array([sent + got * self.terms, 2 * got if self._may_relay else 0])

    @property
    def _may_relay(self) -> bool:
        """Whether several ranks of a node may need a slice that no rank there has."""
        nodes = int(self.node_of[-1]) + 1
        if self.term_of is not None or nodes == 1:
            return False
        alike = [int(_by_node(has, self.node_of, nodes, False)[1].max(initial=0)) for has in self.cls.after.has]
        return sum(alike) > 1


Counted = tuple[np.ndarray, np.ndarray]  # ascending piece * nodes + node, and how many there are


def _by_node(has: np.ndarray, node_of: np.ndarray, nodes: int, once: bool) -> Counted:
    """How many ranks have each piece on each node that has any; or 1."""
    code, count = np.unique((has * nodes + node_of)[has >= 0], return_counts=True)
    return code, np.ones_like(count) if once else count


def _met(piece: np.ndarray, ours: Counted, other: np.ndarray, theirs: Counted, nodes: int) -> np.ndarray:
    """[slices]: the sum over nodes of our count for the slice's piece times theirs for its other piece."""
    spans = []
    for of_slice, (code, _) in ((piece, ours), (other, theirs)):
        start = np.searchsorted(code, of_slice * nodes)
        spans.append((start, np.searchsorted(code, (of_slice + 1) * nodes) - start))
    if spans[0][1].sum() > spans[1][1].sum():  # go through the side with fewer nodes, look up the other
        piece, ours, other, theirs, spans = other, theirs, piece, ours, spans[::-1]
    start, width = spans[0]
    which = np.repeat(np.arange(len(piece)), width)
    at = start[which] + np.arange(len(which)) - np.repeat(np.cumsum(width) - width, width)
    asked = other[which] * nodes + ours[0][at] % nodes
    found = np.minimum(np.searchsorted(theirs[0], asked), max(len(theirs[0]) - 1, 0))
    hit = theirs[0][found] == asked
    return np.bincount(which[hit], (ours[1][at] * theirs[1][found])[hit], len(piece))
