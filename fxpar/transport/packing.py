"""Messages with their views: how each is packed from, or unpacked into, the tensors of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fxpar.transport.checksum import Where, compare, write_sums
from fxpar.transport.holding import Located
from fxpar.transport.messages import Message, Piece
from fxpar.transport.options import PhaseTraffic, TransportOptions
from fxpar.transport.reads import Segment
from fxpar.transport.staging import ALIGNMENT, CHUNK, Arena, aligned
from fxpar.transport.views import PieceView, slice_views
from fxpar.transport.wire import AllToAll, PhaseOptions, Task


@dataclass(eq=False)
class Letter:
    """A message to or from `peer`, with views of the tensors for each of its pieces.

    `direct` is the memory of the tensors, where that can be sent or received in without packing.
    """

    peer: int
    message: Message
    views: list[list[PieceView]]
    direct: Tensor | None
    checked: bool
    add: bool
    name: str

    @property
    def key(self) -> bytes:
        return self.message.key

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, checksums included."""
        if not self.checked:
            return self.message.nbytes
        return aligned(self.message.nbytes, 8) + 8 * sum(len(piece.fqns) for piece in self.message.pieces)

    def pack(self, buffer: Tensor) -> list[Task]:
        """Copies from the tensors to `buffer` (uint8, at least `nbytes`), and checksums of the tensors."""
        tasks: list[Task] = []
        for piece, views, sums in self._parts(buffer):
            region = region_of(buffer, piece)
            if len(views) == 1:
                tasks.append(partial(region.copy_, views[0].tensor))
            else:  # one call, and on a GPU one kernel for many tensors
                tasks.append(partial(torch.cat, [view.tensor for view in views], 0, out=region))
            if self.checked:
                for first, view in views:
                    tasks.append(partial(write_sums, sums[first : first + view.shape[0]], view, piece.dtype))
        return tasks

    def unpack(self, buffer: Tensor) -> list[Task]:
        """Copies (or additions) from `buffer` to the tensors, and comparisons of checksums."""
        tasks: list[Task] = []
        for piece, view, arrived, sums in self.arrivals(buffer):
            tasks.append(partial(view.add_ if self.add else view.copy_, arrived))
            if self.checked:
                # What was added to cannot be compared; then it is what came from the wire.
                tasks.append(self.check(piece, sums, arrived if self.add else view))
        return tasks

    def arrivals(self, buffer: Tensor) -> Iterator[tuple[Piece, Tensor, Tensor, Tensor]]:
        """(piece, cut down to the view's tensors; view; its part of `buffer`; checksums), view by view."""
        for piece, views, sums in self._parts(buffer):
            region = region_of(buffer, piece)
            for first, view in views:
                chosen = slice(first, first + view.shape[0])
                yield replace(piece, fqns=piece.fqns[chosen]), view, region[chosen], sums[chosen]

    def check(self, piece: Piece, sums: Tensor, view: Tensor) -> Task:
        """Compare `view` with the checksums that came with the message."""
        where = Where(self.name, piece.fqns, piece.box, self.message.src, self.message.dst)
        return partial(compare, sums, view, piece.dtype, where)

    def _parts(self, buffer: Tensor) -> list[tuple[Piece, list[PieceView], Tensor]]:
        """Pieces with their views and their places for checksums."""
        start = aligned(self.message.nbytes, 8)
        sums = buffer[start : self.nbytes].view(torch.int64) if self.checked else buffer
        found, at = [], 0
        for piece, views in zip(self.message.pieces, self.views, strict=True):
            found.append((piece, views, sums[at : at + len(piece.fqns)]))
            at += len(piece.fqns)
        return found


def region_of(buffer: Tensor, piece: Piece) -> Tensor:
    """The part of a message that a piece takes: `[members, *box]` in its dtype."""
    raw = buffer[piece.offset : piece.offset + piece.nbytes]
    return raw.view(piece.dtype).view(len(piece.fqns), *piece.shape)


@dataclass(eq=False)
class Sealed:
    """The letters of a phase."""

    sends: list[Letter]
    receives: list[Letter]

    def buffers(self) -> list[Letter]:
        """Letters that need staging; what several peers get alike needs it once."""
        sent = {letter.key: letter for letter in self.sends if letter.direct is None}
        return [*sent.values(), *(letter for letter in self.receives if letter.direct is None)]


@dataclass(eq=False)
class Packer:
    """Makes letters out of messages."""

    target: Located
    options: TransportOptions
    name: str

    def seal(self, traffic: PhaseTraffic) -> Sealed:
        sends = []
        packed: dict[bytes, list[list[PieceView]]] = {}
        for message, segments in traffic.sends:
            if message.key not in packed:
                packed[message.key] = [
                    self.views(piece, parts) for piece, parts in zip(message.pieces, segments, strict=True)
                ]
            sends.append(self._letter(message.dst, message, packed[message.key], not traffic.ranks))
        receives = []
        for message in traffic.receives:
            views = [self.target_views(piece) for piece in message.pieces]
            receives.append(self._letter(message.src, message, views, not traffic.ranks and not self.options.add))
        return Sealed(sends, receives)

    def _letter(self, peer: int, message: Message, views: list[list[PieceView]], direct_ok: bool) -> Letter:
        options = self.options
        direct = None
        if direct_ok and not options.checked and options.execution != "a2a":
            direct = memory_of(message, views)
        return Letter(peer, message, views, direct, options.checked, options.add, self.name)

    def views(self, piece: Piece, segments: Sequence[Segment]) -> list[PieceView]:
        """Views of the tensors of a piece, segment by segment."""
        found = []
        for segment in segments:
            for view in slice_views(segment.holding, segment.fqns, segment.start, piece.shape, self.options.merge):
                found.append(PieceView(segment.first + view.first, view.tensor))
        return found

    def target_views(self, piece: Piece) -> list[PieceView]:
        """Views of the target for a piece that arrives, or is added at home."""
        return self.views(piece, self._targets(piece))

    def _targets(self, piece: Piece) -> list[Segment]:
        """Where the tensors of an arriving piece lie in the target."""
        found: list[Segment] = []
        starts = [self.target.required(fqn, piece.box) for fqn in piece.fqns]
        first = 0
        for index in range(1, len(starts) + 1):
            if index == len(starts) or starts[index] != starts[first]:
                found.append(Segment(self.target, starts[first], first, piece.fqns[first:index]))
                first = index
        return found


def memory_of(message: Message, views: list[list[PieceView]]) -> Tensor | None:
    """The bytes of the tensors, if a message is one contiguous run of them in the dtype of the wire."""
    if len(message.pieces) != 1 or len(views[0]) != 1:
        return None
    tensor = views[0][0].tensor
    if tensor.dtype != message.pieces[0].dtype or not tensor.is_contiguous():
        return None
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


Maker = Callable[[Tensor], list[Task]]  # what to do with a part of a buffer


def all_to_all(
    wire: PhaseOptions,
    sends: Iterable[tuple[int, int, Maker]],
    receives: Iterable[tuple[int, int, Maker]],
    arena: Arena,
) -> AllToAll:
    """One all-to-all of messages given as (peer, bytes, what packs or unpacks them), one per peer at most."""
    splits: list[list[int]] = []
    buffers: list[Tensor] = []
    tasks: list[list[Task]] = []
    for parts in (list(sends), list(receives)):
        sizes = [0] * wire.world
        for peer, nbytes, _ in parts:
            sizes[peer] = aligned(nbytes, CHUNK)
        whole = arena.take(sum(sizes))
        by_peer = whole.split(sizes)
        tasks.append([task for peer, _, make in parts for task in make(by_peer[peer])])
        splits.append(sizes)
        buffers.append(whole)
    return AllToAll(wire, buffers[0], buffers[1], splits[0], splits[1], tasks[0], tasks[1])


def all_to_all_bytes(sizes: Iterable[int]) -> int:
    """Staging that messages of these sizes need, both ways together."""
    return ALIGNMENT + sum(aligned(nbytes, CHUNK) for nbytes in sizes)
