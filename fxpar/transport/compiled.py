"""From a plan and the tensors of one rank to phases that are ready to run: all views, offsets and buffers prepared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from fxpar.errors import ExecutionError
from fxpar.switch import AnySwitchPlan
from fxpar.switch.collectives import Collective
from fxpar.transport.checksum import Where, compare_copy
from fxpar.transport.executions import choose
from fxpar.transport.groups import ProcessGroups
from fxpar.transport.holding import Located
from fxpar.transport.messages import messages
from fxpar.transport.options import ALONE_BYTES, PhaseTraffic, SwitchCounts, TransportOptions
from fxpar.transport.packing import Packer, Sealed, all_to_all, all_to_all_bytes
from fxpar.transport.phases import TransferPhase, cut_phases, part_of
from fxpar.transport.reads import Reader
from fxpar.transport.staging import CHUNK, Arena, Staging, aligned
from fxpar.transport.views import paired_views
from fxpar.transport.wire import AllGather, Gathered, Parcel, PhaseOnWire, PhaseOptions, PointToPoint, Task


@dataclass(eq=False)
class CompiledSwitch:
    """`snapshots` are (copy, original); `phases` are (does it send on what the one before brings, phase). Of the
    tensors `arriving[n]` nothing comes after phase n; all others are there once the `copies` are made.
    """

    snapshots: list[tuple[Tensor, Tensor]]
    phases: list[tuple[bool, PhaseOnWire]]
    copies: list[Task]
    counts: SwitchCounts
    arriving: list[list[str]]


@dataclass(frozen=True, eq=False)
class Local:
    """A phase that this rank takes part in, before its views are made; `tag` is its number among all phases."""

    phase: TransferPhase
    execution: str
    tag: int
    traffic: list[PhaseTraffic]


class Compiler:
    """Compiles a plan for one rank. The same calls must be made on all ranks (sub process groups are created)."""

    def __init__(
        self,
        plan: AnySwitchPlan,
        sources: Sequence[Located],
        target: Located,
        options: TransportOptions,
        name: str,
    ) -> None:
        self.problem = problem = plan.problem
        self.target, self.rank = target, target.rank
        self.table, self.most = plan.rows_of(self.rank), plan.most
        self.options, self.name = options, name
        self.reader = Reader(problem, sources, target)
        params = target.layout.params
        self.dtypes = [params[fqn].dtype for fqn in problem.tensors]
        self.counts = SwitchCounts()

    def compile(self, wire: PhaseOptions, groups: ProcessGroups, staging: Staging) -> CompiledSwitch:
        """All that a run needs. Raises HoldingError, ExecutionError."""
        locals_ = self._locals(groups)
        copied = list(self.reader.copies(self.dtypes))
        written = {
            fqn for local in locals_ for t in local.traffic for m in t.receives for p in m.pieces for fqn in p.fqns
        }
        written.update(fqn for _, segments in copied for segment in segments for fqn in segment.fqns)
        snapshots = self.reader.snapshots(sorted(written))
        packer = Packer(self.target, self.options, self.name)
        sealed = [[packer.seal(traffic) for traffic in local.traffic] for local in locals_]
        sizes = [self._size(local, parts) for local, parts in zip(locals_, sealed, strict=True)]
        slots = [staging.slot(k, max(sizes[k::2], default=0)) for k in (0, 1)]
        self.counts.staging_bytes = sum(max(sizes[k::2], default=0) for k in (0, 1))
        phases = []
        for index, (local, parts) in enumerate(zip(locals_, sealed, strict=True)):
            onto = self._on_wire(local, parts, Arena(slots[index % 2]), wire, groups)
            before = locals_[index - 1].phase if index else None
            blocking = before is not None and before.bucket == local.phase.bucket
            phases.append((blocking, onto))
        return CompiledSwitch(snapshots, phases, self._copies(copied), self.counts, _arriving(locals_))

    def _locals(self, groups: ProcessGroups) -> list[Local]:
        found = []
        for tag, phase in enumerate(self._phases()):
            execution, collectives = self._choose(phase)
            traffic = []
            if execution == "all_gather":
                for one in collectives:
                    groups.of_places(one.ranks)
                    if self.rank in one.ranks:
                        rows = phase.rows[one.transfers]
                        part = TransferPhase(phase.step, phase.bucket, rows, phase.part, phase.parts)
                        traffic.append(self._traffic(part, one.ranks))
            else:
                traffic = [self._traffic(phase, alone_bytes=ALONE_BYTES if execution == "p2p" else None)]
            if execution == "a2a" or any(t.sends or t.receives for t in traffic):
                found.append(Local(phase, execution, tag, traffic))
                self.counts.executions.append(execution)
        return found

    def _phases(self) -> list[TransferPhase]:
        return cut_phases(self.problem, self.table, self.options.staging_bytes, self.most, self.options.bucketed)

    def _choose(self, phase: TransferPhase) -> tuple[str, list[Collective]]:
        """How a phase runs. All-gathers are found in plans that are whole."""
        way = self.options.execution
        if self.most is None:
            return choose(self.problem, self.table, phase, way)
        if way == "all_gather":
            raise ExecutionError(way, "no rank has the whole plan, as it is by turns; use 'auto' or 'p2p'")
        return ("p2p" if way == "gather" else way), []

    def _traffic(
        self, phase: TransferPhase, ranks: tuple[int, ...] = (), alone_bytes: int | None = None
    ) -> PhaseTraffic:
        sent, received = messages(self.problem, self.table, phase, self.rank, self.dtypes, alone_bytes)
        self.counts.sent_bytes += sum(message.nbytes for message in sent)
        self.counts.received_bytes += sum(message.nbytes for message in received)
        room = 0
        if ranks:
            sent = sent[:1]  # all others get the same
            room = self._room(phase)
        reads = [(m, [self.reader.segments(piece, phase.step > 0) for piece in m.pieces]) for m in sent]
        return PhaseTraffic(reads, received, ranks, aligned(room, CHUNK))

    def _room(self, phase: TransferPhase) -> int:
        """Bytes of the largest contribution to an all-gather; parts of slices need not be equally large."""
        rows = self.table[phase.rows]
        rows = rows[rows["dst"] == np.where(rows["src"] == rows["src"].min(), rows["src"].max(), rows["src"].min())]
        sizes = np.zeros(self.problem.world, np.int64)
        kinds = self.problem.class_of[rows["tensor"]]
        for number, piece, src in zip(kinds.tolist(), rows["slice"].tolist(), rows["src"].tolist(), strict=True):
            cls = self.problem.classes[number]
            ends = cls.boxes[piece].tolist()
            box = part_of(tuple((start, stop) for start, stop in ends), phase.part, phase.parts)
            sizes[src] += cls.itemsize * math.prod(stop - start for start, stop in box)
        trailer = 8 * int(np.bincount(rows["src"]).max()) + 8 if self.options.checked else 0
        return int(sizes.max()) + trailer

    def _size(self, local: Local, sealed: list[Sealed]) -> int:
        """Bytes of staging that a phase needs."""
        if local.execution == "p2p":
            return sum(aligned(s.nbytes) for part in sealed for s in part.buffers())
        if local.execution == "a2a":
            return all_to_all_bytes(s.nbytes for part in sealed for s in (*part.sends, *part.receives))
        return sum(aligned(t.room * len(t.ranks)) for t in local.traffic)

    def _on_wire(
        self, local: Local, sealed: list[Sealed], arena: Arena, wire: PhaseOptions, groups: ProcessGroups
    ) -> PhaseOnWire:
        if local.execution == "p2p":
            return self._point_to_point(local, sealed[0], arena, wire)
        if local.execution == "a2a":
            sends = [(one.peer, one.nbytes, one.pack) for one in sealed[0].sends]
            receives = [(one.peer, one.nbytes, one.unpack) for one in sealed[0].receives]
            return all_to_all(wire, sends, receives, arena)
        parts = []
        for traffic, part in zip(local.traffic, sealed, strict=True):
            received = arena.take(traffic.room * len(traffic.ranks))
            rows = received.view(len(traffic.ranks), traffic.room)
            packed = rows[traffic.ranks.index(self.rank)]  # in place: its own part is nobody's message
            unpack = [task for s in part.receives for task in s.unpack(rows[traffic.ranks.index(s.peer)])]
            pack = part.sends[0].pack(packed) if part.sends else []
            parts.append(Gathered(groups.of_places(traffic.ranks), list(traffic.ranks), packed, received, pack, unpack))
        return AllGather(wire, parts)

    def _point_to_point(self, local: Local, sealed: Sealed, arena: Arena, wire: PhaseOptions) -> PointToPoint:
        sends, receives, made = [], [], {}
        for one in sealed.sends:
            buffer, tasks = one.direct, []
            if buffer is None:
                if one.key not in made:
                    made[one.key] = arena.take(one.nbytes)
                    tasks = one.pack(made[one.key])
                buffer = made[one.key]
            sends.append(Parcel(one.peer, buffer, tasks))
        for one in sealed.receives:
            buffer = one.direct if one.direct is not None else arena.take(one.nbytes)
            tasks = one.unpack(buffer) if one.direct is None else []
            receives.append(Parcel(one.peer, buffer, tasks))
        return PointToPoint(wire, local.tag, sends, receives)

    def _copies(self, copied: list) -> list[Task]:
        """Copies of slices that the rank holds and needs at different places."""
        tasks: list[Task] = []
        for piece, segments in copied:
            moved = sum(len(segment.fqns) for segment in segments)
            each = piece.nbytes // len(piece.fqns)
            self.counts.copied_bytes += moved * each
            self.counts.skipped_bytes += (len(piece.fqns) - moved) * each
            for segment in segments:
                at = self.target.required(segment.fqns[0], piece.box)
                pairs = paired_views(
                    segment.holding, self.target, segment.fqns, (segment.start, at), piece.shape, self.options.merge
                )
                fqns = iter(segment.fqns)
                for src, dst in pairs:
                    tasks.append(partial(dst.add_ if self.options.add else dst.copy_, src))
                    if self.options.checked and not self.options.add:
                        names = [next(fqns) for _ in range(src.shape[0])]
                        where = Where(self.name, names, piece.box, self.rank, self.rank)
                        tasks.append(partial(compare_copy, src, dst, where))
        return tasks


def _arriving(locals_: Sequence[Local]) -> list[list[str]]:
    """Of each phase the tensors that are received in no later one."""
    last = {
        fqn: number
        for number, local in enumerate(locals_)
        for traffic in local.traffic
        for message in traffic.receives
        for piece in message.pieces
        for fqn in piece.fqns
    }
    found: list[list[str]] = [[] for _ in locals_]
    for fqn, number in last.items():
        found[number].append(fqn)
    return found
