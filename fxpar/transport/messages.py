"""What one message between two ranks contains, and in which order: both ends work it out from the plan alone.

Rows are ordered by item size (the largest first, so that nothing needs padding), dtype, class, slice, tensor. The same
slice of many tensors of a class is one *piece*: `[members, *box]` in the message, so that each end may move it with one
strided copy if the tensors stand at equal distances in its memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fxpar.switch.plan import Box
from fxpar.switch.problem import SwitchProblem
from fxpar.transport.phases import TransferPhase, part_of


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
        return tuple([stop - start for start, stop in self.box])

    @property
    def numel(self) -> int:
        return len(self.fqns) * math.prod(self.shape)

    def at(self, offset: int) -> Piece:
        """The piece elsewhere in a message. There are millions of pieces, and `replace` is slow."""
        return Piece(self.fqns, self.box, self.dtype, offset, self.cls, self.slice, self.term)

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
    problem: SwitchProblem,
    table: np.ndarray,
    phase: TransferPhase,
    rank: int,
    dtypes: Sequence[torch.dtype],
    alone_bytes: int | None = None,
) -> tuple[list[Message], list[Message]]:
    """(what `rank` sends, what it receives) in a phase; `dtypes` are those on the wire, by tensor number.

    Slices of at least `alone_bytes` are messages of their own: such a message costs less than packing the slice does,
    which is then often superfluous. All others for one peer are one message; with None there is never another one.

    Ranks send to their next neighbour first and receive from the previous one first, so that no rank is asked by all
    others at once.
    """
    rows = table[phase.rows]
    world = problem.world
    sent = _by_peer(problem, rows[rows["src"] == rank], "dst", phase, dtypes, alone_bytes)
    received = _by_peer(problem, rows[rows["dst"] == rank], "src", phase, dtypes, alone_bytes)
    sent.sort(key=lambda message: (message.dst - rank) % world)
    received.sort(key=lambda message: (rank - message.src) % world)
    return sent, received


Labelled = tuple[Piece, bytes]  # a piece, and bytes that name its tensors, slice and term


def _by_peer(
    problem: SwitchProblem,
    rows: np.ndarray,
    peer: str,
    phase: TransferPhase,
    dtypes: Sequence[torch.dtype],
    alone_bytes: int | None,
) -> list[Message]:
    """Messages by peer; those with a single large slice come last."""
    together: dict[tuple[int, int], list[Labelled]] = {}
    alone: list[Message] = []
    for ends, piece, label in _pieces(problem, rows, peer, phase, dtypes):
        if alone_bytes is None or piece.nbytes < alone_bytes * len(piece.fqns):
            together.setdefault(ends, []).append((piece, label.tobytes()))
            continue
        for member, fqn in enumerate(piece.fqns):
            one = replace(piece, fqns=(fqn,))
            alone.append(_message(ends, [(one, label[:, member].tobytes())]))
    return [*(_message(ends, pieces) for ends, pieces in together.items()), *alone]


def _pieces(
    problem: SwitchProblem, rows: np.ndarray, peer: str, phase: TransferPhase, dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[tuple[int, int], Piece, np.ndarray]]:
    """((source, destination), piece, [tensor, slice, term] of its rows), in the order in which messages have them."""
    if not len(rows):
        return
    kinds = {dtype: number for number, dtype in enumerate(sorted(set(dtypes), key=lambda d: (-d.itemsize, str(d))))}
    kind = np.array([kinds[dtype] for dtype in dtypes])[rows["tensor"]]
    cls = problem.class_of[rows["tensor"]]
    terms = rows["term"] if "term" in (rows.dtype.names or ()) else np.zeros(len(rows), np.int64)
    order = np.lexsort((rows["tensor"], terms, rows["slice"], cls, kind, rows[peer]))
    rows, groups = rows[order], np.stack([rows[peer], kind, cls, rows["slice"], terms], 1)[order]
    labels = np.stack([rows["tensor"], rows["slice"], terms[order]])
    new = np.flatnonzero((groups[1:] != groups[:-1]).any(1)) + 1
    for begin, end in itertools.pairwise([0, *new.tolist(), len(rows)]):
        tensors = rows["tensor"][begin:end].tolist()
        _, _, number, index, term = groups[begin].tolist()
        box = tuple((start, stop) for start, stop in problem.classes[number].boxes[index].tolist())
        box = part_of(box, phase.part, phase.parts)
        piece = Piece(
            tuple(problem.tensors[tensor] for tensor in tensors), box, dtypes[tensors[0]], 0, number, index, term
        )
        if piece.numel:
            yield (int(rows["src"][begin]), int(rows["dst"][begin])), piece, labels[:, begin:end]


def _message(ends: tuple[int, int], labelled: Sequence[Labelled]) -> Message:
    """One message with the pieces one behind the other."""
    offset, pieces = 0, []
    for piece, _ in labelled:
        pieces.append(piece.at(offset))
        offset += piece.nbytes
    return Message(*ends, offset, tuple(pieces), b"".join(label for _, label in labelled))
