"""`Reduction`: carries out a ReductionPlan on one rank: terms are packed, exchanged and added in order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import ReductionError
from fxpar.schedule.mini_batch import STAGING_BYTES
from fxpar.switch.reduction import AnyReductionPlan
from fxpar.transport.executions import resolve
from fxpar.transport.fingerprint import compare_fingerprints
from fxpar.transport.holding import Holding, Located
from fxpar.transport.messages import Message, Piece, messages
from fxpar.transport.options import ALONE_BYTES, SwitchCounts, TransportOptions
from fxpar.transport.packing import Letter, Packer, all_to_all, all_to_all_bytes, memory_of
from fxpar.transport.phases import TransferPhase, cut_phases, part_of
from fxpar.transport.reads import Segment
from fxpar.transport.staging import Arena, Staging, aligned, staging_on
from fxpar.transport.switch import SideStream, SwitchReport, device_of
from fxpar.transport.views import paired_views
from fxpar.transport.wire import AllToAll, Parcel, PhaseOnWire, PhaseOptions, PointToPoint, Task, run_pipeline

Own = tuple[Piece, tuple[int, ...]]  # a term held here, and where it starts in this rank's gradients
Arrived = tuple[int, Tensor, Tensor]  # term, view of the target, view of what is added


@dataclass(eq=False)
class _Phase:
    """What a phase sends and adds."""

    phase: TransferPhase
    sends: list[tuple[Message, list[list[Segment]]]]
    receives: list[Letter]
    own: list[Own]
    arrived: list[Arrived] = field(default_factory=list)


class Reduction:
    """Sums the gradients of a rank's strategy into the tensors of `target`.

    plan: see `plan_reduction`. The dtype on the wire is that of the placements; sums are in the dtype of the target.
    target: its tensors are written (padding is not touched) and must not share memory with the gradients.

    The other arguments are those of `Switch`. Gradients may be other tensors in every run. Construct and run the same
    reductions in the same order on all ranks. Raises HoldingError; `run` raises HoldingError, ReductionError,
    FingerprintError, TransferError, ChecksumError, and what looking up a gradient raises: then it has gone as far as
    there were gradients, and nothing is under way.
    """

    def __init__(
        self,
        plan: AnyReductionPlan,
        rank: int,
        target: Holding,
        *,
        group: Any = None,
        staging_bytes: int = STAGING_BYTES,
        checked: bool = False,
        merge: bool = True,
        bucketed: bool = False,
        timeout_s: float | None = None,
        staging: Staging | None = None,
        device: torch.device | str | None = None,
        name: str = "",
    ) -> None:
        self.plan, self.rank = plan, rank
        self._table = plan.rows_of(rank)
        device = torch.device(device) if device is not None else device_of((target,))
        way = resolve("p2p" if device.type != "cpu" else "auto", device, group)
        self.options = TransportOptions(way, staging_bytes, checked, add=True, merge=merge, bucketed=bucketed)
        self.name = name or f"reduction {plan.problem.source} -> {plan.problem.target}"
        self.counts = SwitchCounts()
        timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
        self._wire = PhaseOptions(self.name, dist.get_world_size(group), group, timeout, grouped=device.type == "cuda")
        self._sources = Located(Holding(plan.sources, _Everything()), rank)
        self._target = Located(target, rank)
        self._packer = Packer(self._target, self.options, self.name)
        self._dtypes = [plan.sources.params[fqn].dtype for fqn in plan.problem.tensors]
        self._accumulate = True
        self._direct: list[tuple[Parcel, Tensor]] = []  # parcels that may send from gradients, and their own memory
        self._stream = SideStream(device)
        self._cuts = list(self._cut())
        self._alone = self._without_messages()
        self.phases = self._on_wire(staging_on(device, staging))
        self._fingerprint = hashlib.sha256(f"{plan.fingerprint} {self.options}".encode()).digest()[:8]
        self._compared = False

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], accumulate: bool = True, *, compared: bool = False) -> SwitchReport:
        """Add the sum of all ranks' `sources` to the target, or with `accumulate=False` put it there. Gradients are
        looked up about in the order of the plan, when they are sent or added: looking one up may wait for it.

        The ranks' plans are compared in the first run, and in each that is to be `compared`: so say all ranks alike.
        """
        begun = time.perf_counter()
        if compared or not self._compared or self.options.checked:
            compare_fingerprints(self.name, self._fingerprint, self._wire, self._stream.device)
            self._compared = True
        self._sources.rebind(sources)
        self._accumulate = accumulate
        try:
            with self._stream:
                run_pipeline(self.phases, partial(self._bring, sources))
        finally:
            self._sources.rebind({})  # gradients may be freed now, wherever they were sent from
            for parcel, room in self._direct:
                parcel.buffer = room
        counts = self.counts
        wall_ms = (time.perf_counter() - begun) * 1e3
        return SwitchReport(wall_ms, counts.sent_bytes, counts.received_bytes, counts.copied_bytes, 0)

    def _bring(self, sources: Mapping[str, Tensor], number: int) -> None:
        """Before phase `number` is posted: its gradients, and the sums up to there that need no message."""
        alone = self._alone[number]
        self._bind(sources, (piece for piece, _ in alone))
        self._add([], alone)
        if number < len(self._cuts):
            one = self._cuts[number]
            self._bind(sources, (piece for message, _ in one.sends for piece in message.pieces))
            self._bind(sources, (piece for piece, _ in one.own))

    def _bind(self, sources: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Look up the gradients of these pieces, and check them before they are sent."""
        for fqn in dict.fromkeys(fqn for piece in pieces for fqn in piece.fqns):
            dtype = self.plan.sources.params[fqn].dtype
            if fqn not in sources:
                raise ReductionError(fqn, f"no gradient was given on rank {self.rank}")
            if sources[fqn].dtype != dtype:
                raise ReductionError(fqn, f"the gradient is {sources[fqn].dtype}, but was planned as {dtype}")
            self._sources.tensor(fqn)  # checks the shape

    def _cut(self) -> Iterator[_Phase]:
        problem, table = self.plan.problem, self._table
        self._tags = []
        for tag, phase in enumerate(self._phases()):
            together = self.options.execution == "a2a"  # all ranks take part in all phases, with a message per peer
            alone_bytes = None if together else ALONE_BYTES
            sent, received = messages(problem, table, phase, self.rank, self._dtypes, alone_bytes)
            if not sent and not received and not together:
                continue
            self._tags.append(tag)
            self.counts.sent_bytes += sum(message.nbytes for message in sent)
            self.counts.received_bytes += sum(message.nbytes for message in received)
            sends = [(message, [self._segments(piece) for piece in message.pieces]) for message in sent]
            rows = table[phase.rows]
            mine = np.unique(rows[rows["dst"] == self.rank][["tensor", "slice"]])
            own = list(self._own(mine["tensor"], mine["slice"], phase.part, phase.parts))
            yield _Phase(phase, sends, self._letters(received), own)

    def _phases(self) -> list[TransferPhase]:
        options = self.options
        return cut_phases(self.plan.problem, self._table, options.staging_bytes, self.plan.most, options.bucketed)

    def _letters(self, received: list[Message]) -> list[Letter]:
        letters = []
        for message in received:
            views = [self._packer.target_views(piece) for piece in message.pieces]
            letters.append(Letter(message.src, message, views, None, self.options.checked, True, self.name))
        return letters

    def _segments(self, piece: Piece) -> list[Segment]:
        """Where the rank's gradients have a piece; equal for all tensors of a class."""
        return [Segment(self._sources, self._sources.required(piece.fqns[0], piece.box), 0, piece.fqns)]

    def _own(self, tensors: np.ndarray, slices: np.ndarray, part: int, parts: int) -> Iterator[Own]:
        """The rank's own terms of these slices, as pieces, and where they start in its gradients."""
        problem = self.plan.problem
        classes = problem.class_of[tensors]
        for number in np.unique(classes).tolist():
            terms = self.plan.terms[number]
            own = terms.own(self.rank)
            for piece in np.unique(slices[classes == number]).tolist():
                if not own[piece]:
                    continue
                members = tensors[(classes == number) & (slices == piece)].tolist()
                fqns = tuple(problem.tensors[tensor] for tensor in members)
                ends = terms.cls.boxes[piece].tolist()
                box = part_of(tuple((start, stop) for start, stop in ends), part, parts)
                term = int(terms.term_of[self.rank])
                one = Piece(fqns, box, self._dtypes[members[0]], 0, number, piece, term)
                self.counts.copied_bytes += one.nbytes
                if one.numel:
                    yield one, self._sources.required(fqns[0], box)

    def _without_messages(self) -> list[list[Own]]:
        """Own terms of slices that no other rank has a term of (or none that is not held here), by the phase before
        which they are added, as their tensors come before its own; the last ones after all phases.
        """
        table, starts = self._table, [0]
        for one in self._cuts:
            tensors = table["tensor"][one.phase.rows]
            starts.append(int(tensors.min()) if len(tensors) else starts[-1])
        found: list[list[Own]] = [[] for _ in starts]
        rows = table[table["dst"] == self.rank]
        for number, terms in enumerate(self.plan.terms):
            mine = rows[self.plan.problem.class_of[rows["tensor"]] == number]
            needed = np.broadcast_to(terms.cls.after.of(self.rank), (len(terms.cls.members), len(terms.cls.nbytes)))
            arriving = np.zeros_like(needed)
            arriving[np.searchsorted(terms.cls.members, mine["tensor"]), mine["slice"]] = True
            member, piece = np.nonzero(needed & ~arriving)
            tensors = terms.cls.members[member]
            before = np.searchsorted(starts[1:], tensors, side="right")
            for phase in np.unique(before).tolist():
                found[phase] += self._own(tensors[before == phase], piece[before == phase], 0, 1)
        return found

    def _on_wire(self, staging: Staging) -> list[tuple[bool, PhaseOnWire]]:
        sizes = [self._size(one) for one in self._cuts]
        slots = [staging.slot(k, max(sizes[k::2], default=0)) for k in (0, 1)]
        self.counts.staging_bytes = sum(max(sizes[k::2], default=0) for k in (0, 1))
        wired: list[tuple[bool, PhaseOnWire]] = []
        for index, (one, tag) in enumerate(zip(self._cuts, self._tags, strict=True)):
            arena = Arena(slots[index % 2])
            together = self.options.execution == "a2a"
            wired.append((False, self._all_to_all(one, arena) if together else self._point_to_point(one, tag, arena)))
        return wired

    def _size(self, one: _Phase) -> int:
        """Bytes of staging that a phase needs."""
        received = [letter.nbytes for letter in one.receives]
        if self.options.execution == "a2a":
            return all_to_all_bytes([*(self._room(message) for message, _ in one.sends), *received])
        sent = {message.key: self._room(message) for message, _ in one.sends}
        return sum(map(aligned, (*sent.values(), *received)))

    def _room(self, message: Message) -> int:
        return self._letter(message, [[] for _ in message.pieces]).nbytes

    def _letter(self, message: Message, views: list) -> Letter:
        return Letter(message.dst, message, views, None, self.options.checked, True, self.name)

    def _point_to_point(self, one: _Phase, tag: int, arena: Arena) -> PointToPoint:
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        made: dict[bytes, Parcel] = {}
        for message, segments in one.sends:
            first = made.get(message.key)
            room = first.buffer if first else arena.take(self._room(message))
            parcel = Parcel(message.dst, room, [])
            if first is None:
                made[message.key] = parcel
                parcel.tasks.append(partial(self._pack, message, segments, parcel, room))
            else:
                parcel.tasks.append(partial(_share, parcel, first))
            sends.append(parcel)
            self._direct.append((parcel, room))
        for letter in one.receives:
            buffer = arena.take(letter.nbytes)
            receives.append(Parcel(letter.peer, buffer, self._arrive(one, letter, buffer)))
        return PointToPoint(self._wire, tag, sends, receives, [partial(self._add, one.arrived, one.own)])

    def _all_to_all(self, one: _Phase, arena: Arena) -> AllToAll:
        """Only for process groups that know nothing else; nothing is sent from where it lies."""
        sends = [
            (message.dst, self._room(message), partial(self._packing, message, segments))
            for message, segments in one.sends
        ]
        receives = [(letter.peer, letter.nbytes, partial(self._arrive, one, letter)) for letter in one.receives]
        phase = all_to_all(self._wire, sends, receives, arena)
        phase.after.append(partial(self._add, one.arrived, one.own))
        return phase

    def _packing(self, message: Message, segments: list[list[Segment]], room: Tensor) -> list[Task]:
        return [partial(self._pack, message, segments, None, room)]

    def _arrive(self, one: _Phase, letter: Letter, buffer: Tensor) -> list[Task]:
        """Note the terms that come with a message; the tasks are its checks."""
        tasks: list[Task] = []
        for piece, view, arrived, sums in letter.arrivals(buffer):
            one.arrived.append((piece.term, view, arrived))
            if self.options.checked:
                tasks.append(letter.check(piece, sums, arrived))
        return tasks

    def _pack(self, message: Message, segments: list[list[Segment]], parcel: Parcel | None, room: Tensor) -> None:
        """Put this run's gradients into a message; a parcel may also send them from where they are."""
        pieces = zip(message.pieces, segments, strict=True)
        views = [self._packer.views(piece, parts) for piece, parts in pieces]
        memory = memory_of(message, views) if parcel is not None and not self.options.checked else None
        if parcel is not None:
            parcel.buffer = room if memory is None else memory
        if memory is None:
            for task in self._letter(message, views).pack(room):
                task()

    def _add(self, arrived: list[Arrived], own: list[Own]) -> None:
        """All terms of some slices in ascending order, the rank's own in its place."""
        sums: list[Arrived] = [*arrived, *self._own_views(own)]
        sums.sort(key=lambda entry: entry[0])
        for term, target, value in sums:
            if term == 0 and not self._accumulate:
                target.copy_(value)
            else:
                target.add_(value)

    def _own_views(self, own: list[Own]) -> Iterator[Arrived]:
        for piece, start in own:
            at = self._target.required(piece.fqns[0], piece.box)
            pairs = paired_views(self._sources, self._target, piece.fqns, (start, at), piece.shape, self.options.merge)
            for value, target in pairs:
                yield piece.term, target, value


def _share(parcel: Parcel, first: Parcel) -> None:
    """Send what was packed for another peer."""
    parcel.buffer = first.buffer


class _Everything(Mapping[str, Tensor]):
    """Stands for the gradients before there are any: where slices lie can be asked, tensors cannot."""

    def __contains__(self, fqn: object) -> bool:
        return True

    def __getitem__(self, fqn: str) -> Tensor:
        raise KeyError(fqn)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
