"""One phase on the wire: post everything without waiting, then wait and unpack.

The order of all posts and waits follows from the plan, nothing waits before it has posted all of its phase, and
messages without content exist on neither side, so no rank can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxpar.errors import TransferError
from fxpar.torch_api.since_2_13 import all_gather_single

Task = Callable[[], object]  # a copy, an addition, or a check


@dataclass(eq=False)
class Parcel:
    """A buffer that goes to or comes from group rank `peer`; `tasks` pack it before or unpack it afterwards."""

    peer: int
    buffer: Tensor
    tasks: list[Task]


@dataclass(eq=False)
class PhaseOptions:
    """Options of all phases; `group` None is the default process group."""

    name: str
    world: int
    group: Any = None
    timeout: timedelta | None = None
    grouped: bool = False  # one grouped call per phase, as NCCL needs it

    def wait(self, work: Any, peers: Sequence[int]) -> None:
        """Wait for a transfer. Raises TransferError that names `peers`."""
        try:
            work.wait(self.timeout) if self.timeout else work.wait()
        except (RuntimeError, ValueError) as error:
            raise self.failed(peers, error) from error

    def failed(self, peers: Sequence[int], error: Exception) -> TransferError:
        return TransferError(self.name, ", ".join(map(str, peers)), error)


@dataclass(eq=False)
class PointToPoint:
    """One message per peer."""

    wire: PhaseOptions
    tag: int
    sends: list[Parcel]
    receives: list[Parcel]
    after: list[Task] = field(default_factory=list)  # once all has arrived
    _works: list[Any] = field(default_factory=list)

    def post(self) -> None:
        if self.wire.grouped:
            self._post_grouped()
            return
        group, tag = self.wire.group, self.tag
        works: list[Any] = []
        for parcel in (*self.receives, *self.sends):
            sending = len(works) >= len(self.receives)
            try:
                if sending:
                    for task in parcel.tasks:
                        task()
                    works.append(dist.isend(parcel.buffer, group=group, tag=tag, group_dst=parcel.peer))
                else:
                    works.append(dist.irecv(parcel.buffer, group=group, tag=tag, group_src=parcel.peer))
            except (RuntimeError, ValueError) as error:
                raise self.wire.failed([parcel.peer], error) from error
        self._works = works

    def _post_grouped(self) -> None:
        group, tag = self.wire.group, self.tag
        for parcel in self.sends:
            for task in parcel.tasks:
                task()
        ops = [dist.P2POp(dist.irecv, p.buffer, group=group, tag=tag, group_peer=p.peer) for p in self.receives]
        ops += [dist.P2POp(dist.isend, p.buffer, group=group, tag=tag, group_peer=p.peer) for p in self.sends]
        try:
            self._works = dist.batch_isend_irecv(ops) if ops else []
        except (RuntimeError, ValueError) as error:
            raise self.wire.failed(self.peers, error) from error

    def complete(self) -> None:
        if self.wire.grouped:  # the works are those of the whole batch
            for work in self._works:
                self.wire.wait(work, self.peers)
        for index, parcel in enumerate(self.receives):
            if not self.wire.grouped:
                self.wire.wait(self._works[index], [parcel.peer])
            for task in parcel.tasks:
                task()
        for task in self.after:
            task()
        if not self.wire.grouped:
            for work, parcel in zip(self._works[len(self.receives) :], self.sends, strict=True):
                self.wire.wait(work, [parcel.peer])
        self._works = []

    @property
    def peers(self) -> list[int]:
        return sorted({parcel.peer for parcel in (*self.sends, *self.receives)})


@dataclass(eq=False)
class AllToAll:
    """One all-to-all over the whole process group; splits are in bytes."""

    wire: PhaseOptions
    packed: Tensor
    received: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    pack: list[Task]
    unpack: list[Task]
    after: list[Task] = field(default_factory=list)
    _work: Any = None

    def post(self) -> None:
        for task in self.pack:
            task()
        try:
            self._work = dist.all_to_all_single(
                self.received,
                self.packed,
                self.receive_splits,
                self.send_splits,
                group=self.wire.group,
                async_op=True,
            )
        except (RuntimeError, ValueError) as error:
            raise self.wire.failed(self.peers, error) from error

    def complete(self) -> None:
        self.wire.wait(self._work, self.peers)
        self._work = None
        for task in (*self.unpack, *self.after):
            task()

    @property
    def peers(self) -> list[int]:
        splits = zip(self.send_splits, self.receive_splits, strict=True)
        return [peer for peer, sizes in enumerate(splits) if any(sizes)]


@dataclass(eq=False)
class Gathered:
    """One all-gather of a phase: `received` is [ranks, bytes]."""

    group: Any
    peers: list[int]
    packed: Tensor
    received: Tensor
    pack: list[Task]
    unpack: list[Task]


@dataclass(eq=False)
class AllGather:
    """The all-gathers that this rank takes part in, in the order of the plan."""

    wire: PhaseOptions
    parts: list[Gathered]
    _works: list[Any] = field(default_factory=list)

    def post(self) -> None:
        self._works = []
        for part in self.parts:
            for task in part.pack:
                task()
            try:
                work = all_gather_single(part.received, part.packed, group=part.group, async_op=True)
            except (RuntimeError, ValueError) as error:
                raise self.wire.failed(part.peers, error) from error
            self._works.append(work)

    def complete(self) -> None:
        for work, part in zip(self._works, self.parts, strict=True):
            self.wire.wait(work, part.peers)
            for task in part.unpack:
                task()
        self._works = []


PhaseOnWire = PointToPoint | AllToAll | AllGather


def run_pipeline(
    phases: Sequence[tuple[bool, PhaseOnWire]],
    beside: Callable[[int], object] = lambda _: None,
    completed: Callable[[int], object] = lambda _: None,
) -> None:
    """Post phase n+1 before completing phase n, unless it sends on what phase n brings (is blocking).

    `phases` are (blocking, phase) of those that this rank takes part in. `beside(n)` is called before phase n is
    posted, while the one before is on the wire, and once more after the last one (with their number). If it raises,
    what is under way is completed first: other ranks have posted it too. `completed` is called with the number of a
    phase that is complete; never before `beside(1)`.
    """
    under_way: deque[tuple[int, PhaseOnWire]] = deque()

    def complete() -> None:
        number, phase = under_way.popleft()
        phase.complete()
        completed(number)

    def between(number: int) -> None:
        try:
            beside(number)
        except BaseException:
            while under_way:
                complete()
            raise

    for number, (blocking, phase) in enumerate(phases):
        between(number)
        while blocking and under_way:
            complete()
        phase.post()
        under_way.append((number, phase))
        if len(under_way) > 1:
            complete()
    between(len(phases))
    while under_way:
        complete()
