"""Which tensor a slice is read from, and which reads must be taken before anything is written.

Source and target tensors may share memory. If they do in the good way (every element that both hold is at one address)
nothing needs to be done. If a target is written over a source that is still to be read, that source tensor is first
copied to a *snapshot* and read there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fxpar.errors import HoldingError
from fxpar.switch.plan import Box
from fxpar.switch.problem import SwitchProblem
from fxpar.transport.checksum import text_of
from fxpar.transport.holding import Located
from fxpar.transport.messages import Piece
from fxpar.transport.views import extent, same_memory


@dataclass(frozen=True, eq=False)
class Segment:
    """Tensors `fqns` of a piece, from its member `first` on, are read from one holding at local `start`."""

    holding: Located
    start: tuple[int, ...]
    first: int
    fqns: tuple[str, ...]


@dataclass(eq=False)
class Reader:
    """Chooses the tensors that slices are read from, and remembers them."""

    problem: SwitchProblem
    sources: Sequence[Located]
    target: Located
    seen: dict[tuple[int, str], Located] = field(default_factory=dict)

    def segments(self, piece: Piece, relayed: bool) -> list[Segment]:
        """Where a rank reads what it sends. What was received in an earlier step (`relayed`) is in the target."""
        candidates = (*self.sources, self.target) if relayed else tuple(self.sources)
        found: list[Segment] = []
        chosen = [self._choose(fqn, piece, candidates) for fqn in piece.fqns]
        first = 0
        for index in range(1, len(chosen) + 1):
            if index == len(chosen) or chosen[index] != chosen[first]:
                holding, start = chosen[first]
                found.append(Segment(holding, start, first, piece.fqns[first:index]))
                first = index
        for segment in found:
            self.remember(segment)
        return found

    def remember(self, segment: Segment) -> None:
        if segment.holding is not self.target:
            for fqn in segment.fqns:
                self.seen[id(segment.holding), fqn] = segment.holding

    def _choose(self, fqn: str, piece: Piece, candidates: Sequence[Located]) -> tuple[Located, tuple[int, ...]]:
        """The first holding that has the slice in the dtype of the wire, else the first that has it."""
        found = None
        for holding in candidates:
            start = holding.start(fqn, piece.box)
            if start is not None:
                if holding.tensor(fqn).dtype == piece.dtype:
                    return holding, start
                found = found or (holding, start)
        if found is None:
            names = ", ".join(repr(holding.layout.name) for holding in candidates)
            raise HoldingError(
                names, fqn, f"{text_of(piece.box)} must be sent by rank {self.target.rank}, which does not have it"
            )
        return found

    def copies(self, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Piece, list[Segment]]]:
        """Slices that the rank holds and needs, with the tensors that must be copied (those in place are left out)."""
        problem, rank = self.problem, self.target.rank
        for number, cls in enumerate(problem.classes):
            fqns = tuple(problem.tensors[tensor] for tensor in cls.members.tolist())
            dtype = dtypes[int(cls.members[0])]
            for index in np.flatnonzero(cls.stays(rank)).tolist():
                box = tuple((start, stop) for start, stop in cls.boxes[index].tolist())
                piece = Piece(fqns, box, dtype, 0, number, index)
                yield piece, self._copied(piece)

    def _copied(self, piece: Piece) -> list[Segment]:
        found: list[Segment] = []
        for index, fqn in enumerate(piece.fqns):
            at = self.target.required(fqn, piece.box)
            if self._in_place(fqn, piece.box, at):
                continue
            holding, start = self._choose(fqn, piece, self.sources)
            last = found[-1] if found else None
            if last and last.holding is holding and last.start == start and last.first + len(last.fqns) == index:
                found[-1] = Segment(holding, start, last.first, (*last.fqns, fqn))
            else:
                found.append(Segment(holding, start, index, (fqn,)))
        for segment in found:
            self.remember(segment)
        return found

    def _in_place(self, fqn: str, box: Box, at: tuple[int, ...]) -> bool:
        for holding in self.sources:
            start = holding.start(fqn, box)
            if start is not None and same_memory(holding, self.target, fqn, start, at):
                return True
        return False

    def snapshots(self, written: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Replace every source tensor that a write may change before it is read; the pairs (copy, original)."""
        taken = []
        extents = np.array([extent(self.target, fqn) for fqn in written], np.int64).reshape(-1, 2)
        for (_, fqn), holding in self.seen.items():
            low, high = extent(holding, fqn)
            hit = np.flatnonzero((extents[:, 0] < high) & (extents[:, 1] > low))
            if all(written[other] == fqn and self._agrees(holding, fqn) for other in hit.tolist()):
                continue
            original = holding.tensor(fqn)
            copy = torch.empty(original.shape, dtype=original.dtype, device=original.device)
            holding.replace(fqn, copy)
            taken.append((copy, original))
        return taken

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {fqn: number for number, fqn in enumerate(self.problem.tensors)}

    def _agrees(self, holding: Located, fqn: str) -> bool:
        """Is all that the source holds of a tensor part of the target, each element at its address there?"""
        cls = self.problem.classes[self.problem.class_of[self._numbers[fqn]]]
        found = False
        for box, needed in zip(cls.boxes.tolist(), cls.after.of(self.target.rank).tolist(), strict=True):
            box = tuple((low, high) for low, high in box)
            start = holding.start(fqn, box)
            if start is None:
                continue
            at = self.target.start(fqn, box) if needed else None
            if at is None or not same_memory(holding, self.target, fqn, start, at):
                return False
            found = True
        return found
