"""What one message between two ranks contains, and in which order: both ends work it out from the plan alone.

Rows are ordered by item size (the largest first, so that nothing needs padding), dtype, class, slice, tensor. The same
slice of many tensors of a class is one *piece*: `[members, *box]` in the message, so that each end may move it with one
strided copy if the tensors stand at equal distances in its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxpar.switch.plan import Box
from fxpar.switch.problem import SwitchProblem
from fxpar.transport.phases import Phase, part_of


@dataclass(frozen=True)
class Piece:
    """One box (global indices) of several tensors: `[len(fqns), *box]` of `dtype` at `offset` bytes of a message."""

    fqns: tuple[str, ...]
    box: Box
    dtype: torch.dtype
    offset: int
    cls: int
    slice: int
    term: int = 0  # of a sum

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return len(self.fqns) * int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Message:
    """All that goes from `src` to `dst` in one phase; `key` is equal for messages with equal content from one rank."""

    src: int
    dst: int
    nbytes: int
    pieces: tuple[Piece, ...]
    key: bytes


def messages(
    problem: SwitchProblem, table: np.ndarray, phase: Phase, rank: int, dtypes: Sequence[torch.dtype]
) -> tuple[list[Message], list[Message]]:
    """(what `rank` sends, what it receives) in a phase; `dtypes` are those on the wire, by tensor number.

    Ranks send to their next neighbour first and receive from the previous one first, so that no rank is asked by all
    others at once.
    """
    rows = table[phase.rows]
    world = problem.world
    sent = _by_peer(problem, rows[rows["src"] == rank], "dst", phase, dtypes)
    received = _by_peer(problem, rows[rows["dst"] == rank], "src", phase, dtypes)
    sent.sort(key=lambda message: (message.dst - rank) % world)
    received.sort(key=lambda message: (rank - message.src) % world)
    return sent, received


def _by_peer(
    problem: SwitchProblem, rows: np.ndarray, peer: str, phase: Phase, dtypes: Sequence[torch.dtype]
) -> list[Message]:
    if not len(rows):
        return []
    kinds = {dtype: number for number, dtype in enumerate(sorted(set(dtypes), key=lambda d: (-d.itemsize, str(d))))}
    kind = np.array([kinds[dtype] for dtype in dtypes])[rows["tensor"]]
    cls = problem.class_of[rows["tensor"]]
    terms = rows["term"] if "term" in (rows.dtype.names or ()) else np.zeros(len(rows), np.int64)
    order = np.lexsort((rows["tensor"], terms, rows["slice"], cls, kind, rows[peer]))
    rows, groups = rows[order], np.stack([rows[peer], kind, cls, rows["slice"], terms], 1)[order]
    new = np.flatnonzero((groups[1:] != groups[:-1]).any(1)) + 1
    found: list[Message] = []
    pieces: list[Piece] = []
    starts = [0, *new.tolist(), len(rows)]
    first = 0
    for begin, end in itertools.pairwise(starts):
        offset = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
        tensors = rows["tensor"][begin:end].tolist()
        _, _, number, piece, term = groups[begin].tolist()
        box = tuple((start, stop) for start, stop in problem.classes[number].boxes[piece].tolist())
        fqns = tuple(problem.tensors[tensor] for tensor in tensors)
        one = Piece(fqns, part_of(box, phase.part, phase.parts), dtypes[tensors[0]], offset, number, piece, term)
        if one.numel:
            pieces.append(one)
        if end == len(rows) or groups[end, 0] != groups[begin, 0]:
            src, dst = int(rows["src"][begin]), int(rows["dst"][begin])
            key = np.stack([rows["tensor"], rows["slice"], terms[order]])[:, first:end].tobytes()
            if pieces:
                found.append(Message(src, dst, pieces[-1].offset + pieces[-1].nbytes, tuple(pieces), key))
            pieces, first = [], end
    return found


def wire_dtypes(problem: SwitchProblem, by_fqn: Mapping[str, torch.dtype]) -> list[torch.dtype]:
    """The dtype of every tensor of the problem on the wire."""
    return [by_fqn[fqn] for fqn in problem.tensors]
