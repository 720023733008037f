"""How pipeline stages pass tensors: messages between two ranks, in order, in each direction on its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import TransferError
from fxpar.transport.groups import ProcessGroups


class PendingMessage(Protocol):
    """A message on its way."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Channels(Protocol):
    """Messages from rank to rank; those of one sender for one receiver arrive in the order in which they are sent.

    Neither call waits. A sent tensor must be left alone until its work is done.
    """

    def send(self, tensor: Tensor, to: int) -> PendingMessage: ...

    def receive(self, buffer: Tensor, source: int) -> PendingMessage: ...


@dataclass
class ProcessGroupChannels:
    """torch.distributed's isend and irecv, in one process group for all, or in one per (sender, receiver).

    gloo matches messages by sender, so one does. With NCCL the operations of a group run in order on one stream: each
    direction needs a group of its own, or two ranks that send to each other wait for ever.
    """

    shared: Any = None
    groups: Mapping[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls, pairs: Iterable[tuple[int, int]], groups: ProcessGroups, device: torch.device
    ) -> ProcessGroupChannels:
        """Channels for these (sender, receiver) pairs; all ranks call it alike."""
        if device.type == "cpu":
            return cls(groups.world())
        found = {}
        for sender, receiver in pairs:
            members = (min(sender, receiver), max(sender, receiver))
            found[sender, receiver] = groups.of(members, f"pipeline {'down' if sender < receiver else 'up'}")
        return cls(None, found)

    def send(self, tensor: Tensor, to: int) -> PendingMessage:
        return self._post(dist.isend, tensor, to, dist.get_rank(), to)

    def receive(self, buffer: Tensor, source: int) -> PendingMessage:
        return self._post(dist.irecv, buffer, source, source, dist.get_rank())

    def _post(self, call: Callable[..., Any], tensor: Tensor, peer: int, sender: int, receiver: int) -> PendingMessage:
        group = self.shared or self.groups[sender, receiver]
        try:
            return _Named(call(tensor, peer, group=group, tag=_TAG), peer)
        except (RuntimeError, ValueError) as error:
            raise TransferError("pipeline", str(peer), error) from error


_TAG = 7
_LOOK_S = 0.5  # how often a thread that waits looks whether another one has failed


@dataclass
class _Named:
    """Work whose failure names the other rank."""

    work: Any
    peer: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransferError("pipeline", str(self.peer), error) from error

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@dataclass
class ThreadWorld:
    """Queues between ranks that are threads of one process (`fxpar.torch_api.threaded`, which has no messages)."""

    timeout_s: float = 300.0
    queues: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=lambda: defaultdict(queue.Queue))
    lock: threading.Lock = field(default_factory=threading.Lock)

    failed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def ends_with_this(self) -> Iterator[None]:
        """If the block raises, no rank waits for this one any more."""
        try:
            yield
        except BaseException:
            self.failed.set()
            raise

    def of(self, sender: int, receiver: int) -> queue.Queue[Tensor]:
        """The queue between two ranks."""
        with self.lock:
            return self.queues[sender, receiver]


@dataclass
class ThreadChannels:
    """The channels of one such rank."""

    world: ThreadWorld
    rank: int

    def send(self, tensor: Tensor, to: int) -> PendingMessage:
        self.world.of(self.rank, to).put(tensor.clone())
        return _Done()

    def receive(self, buffer: Tensor, source: int) -> PendingMessage:
        return _FromQueue(buffer, self.world.of(source, self.rank), self.world, source)


class _Done:
    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


@dataclass
class _FromQueue:
    buffer: Tensor
    source: queue.Queue[Tensor]
    world: ThreadWorld
    rank: int

    def wait(self) -> None:
        found = self._get()
        if found.shape != self.buffer.shape or found.dtype != self.buffer.dtype:
            cause = f"{found.dtype} {list(found.shape)} has come instead of {list(self.buffer.shape)}"
            raise TransferError("pipeline", str(self.rank), cause)
        self.buffer.copy_(found)

    def _get(self) -> Tensor:
        ends = time.monotonic() + self.world.timeout_s
        while time.monotonic() < ends:
            try:
                return self.source.get(timeout=min(_LOOK_S, self.world.timeout_s))
            except queue.Empty:
                if self.world.failed.is_set():
                    raise TransferError("pipeline", str(self.rank), "a rank has failed") from None
        raise TransferError("pipeline", str(self.rank), f"nothing within {self.world.timeout_s:.0f} s")

    def is_completed(self) -> bool:
        return not self.source.empty()
