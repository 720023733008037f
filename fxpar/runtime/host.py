"""Copies between a GPU and its host that run beside its kernels, on a stream for each direction.

    to host     waits for what the kernels have done so far; the memory of the value is not given away before the copy
                has ended
    from host   waits for what the kernels have done so far, as it takes memory that they may have used, and for copies
                to the host that have begun; kernels wait for it where the value is first read

Host memory is pinned, from torch's own pool, which keeps a buffer until copies of it have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

own = torch.ops.fxpar


class Streams(Protocol):
    """What is asked of a device; streams and events have the methods of torch's."""

    def stream(self) -> Any:
        """A new one."""
        ...

    def kernels(self) -> Any:
        """The stream on which kernels run now."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Copies that are started within run on this stream."""
        ...

    def on_host(self, x: Tensor) -> Tensor:
        """Memory of the host for a tensor like x, with the strides of x."""
        ...

    def on_device(self, x: Tensor) -> Tensor:
        """Memory of the device likewise, that kernels may have used so far."""
        ...

    def keep(self, x: Tensor, stream: Any) -> None:
        """Let nobody else have the memory of x before what runs on the stream now has ended."""
        ...


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def kernels(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def on_host(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu", pin_memory=True)

    def on_device(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device=self.device)

    def keep(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        x.record_stream(stream)


class HostCopies:
    """The two streams of copies of a program: all its parts share them, as one sends what another one fetches."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._out, self._back = streams.stream(), streams.stream()

    def send(self, x: Tensor) -> Tensor:
        """Start to copy x to the host; only `fetch` may read the result."""
        self._out.wait_stream(self._streams.kernels())
        with self._streams.on(self._out):
            host = self._streams.on_host(x)
            host.copy_(x, non_blocking=True)
        self._streams.keep(x, self._out)
        return host

    def fetch(self, host: Tensor) -> tuple[Tensor, Any]:
        """Start to copy back; the tensor, and the event that it is there."""
        x = self._streams.on_device(host)
        self._back.wait_stream(self._streams.kernels())
        self._back.wait_stream(self._out)
        with self._streams.on(self._back):
            x.copy_(host, non_blocking=True)
        return x, self._back.record_event()

    def wait(self, fetched: tuple[Tensor, Any]) -> Tensor:
        """Let kernels wait for it."""
        x, there = fetched
        self._streams.kernels().wait_event(there)
        return x


def copy_beside_kernels(graph: fx.Graph, copies: HostCopies) -> None:
    """Let the copies of a part's graph run on streams of their own; each fetched value is waited for where it is first
    taken.
    """
    for node in graph.find_nodes(op="call_function", target=own.to_host.default):
        _call(node, copies.send)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=own.from_host.default):
        _call(node, copies.fetch)
        with graph.inserting_before(min(node.users, key=place.__getitem__)):
            wait = graph.call_function(copies.wait, (node,))
        node.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)


def _call(node: fx.Node, function: Callable[[Tensor], Any]) -> None:
    node.target, node.args, node.kwargs = function, node.args[:1], {}
