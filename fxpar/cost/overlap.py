"""What of a transfer a rank waits for: its calls, played through on a stream of kernels and one for each kind of link.

The model is Galvatron's for the reduction of gradients (Miao et al. 2022, "Galvatron", 3.4), taken for all transfers:
while a kernel and a transfer run at the same time, both are slower by a factor that is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

Link = Literal["inside", "between", "host"]
"""Inside of a node, between nodes, to the host and back. A fetch from the host waits for copies to it that have begun
(`fxpar.runtime.host`), so both ways are one queue.
"""

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def exposed_s(
    nodes: Iterable[fx.Node],
    seconds: Mapping[fx.Node, float],
    link_of: Callable[[fx.Node], Link | None],
    slowdown: float,
) -> dict[fx.Node, float]:
    """By how much each transfer (`link_of` names its link) makes its rank later, over the calls of a part in program
    order: how long kernels wait for it, and are slower beside it. `seconds`: of each kernel and transfer, alone. What
    it returns and the kernels' own seconds add up to the time of the part.

    A transfer starts when its link is free. Who reads its result waits for it: a kernel, a wait, the end of the part, a
    transfer on another link; views hand it on. Of several, the first of the program is waited for first: all ranks find
    the same.
    """
    streams = _Streams(slowdown)
    awaited: dict[fx.Node, set[fx.Node]] = {}  # of each value the transfers that must have ended
    for node in nodes:
        link = link_of(node)
        reads = set().union(*(awaited.get(one, ()) for one in node.all_input_nodes))
        if link is None and node not in seconds and node.op == "call_function" and node.target is not _WAIT:
            awaited[node] = reads
            continue
        for one in sorted(reads):
            if link is None or link != streams.links[one]:
                streams.wait(one)
        if link is not None:
            streams.start(node, link, seconds[node])
            awaited[node] = {node}
        elif node in seconds:
            streams.compute(seconds[node])
    return streams.exposed


@dataclass
class _Streams:
    """A device at one point of its program. Links work side by side, each does one transfer after the other."""

    slowdown: float
    links: dict[fx.Node, Link] = field(default_factory=dict)
    exposed: dict[fx.Node, float] = field(default_factory=dict)
    left: dict[fx.Node, float] = field(default_factory=dict)  # seconds, of those that have not ended
    queues: dict[Link, deque[fx.Node]] = field(default_factory=dict)

    def start(self, node: fx.Node, link: Link, seconds: float) -> None:
        self.links[node], self.exposed[node] = link, 0.0
        if seconds > 0:
            self.left[node] = seconds
            self.queues.setdefault(link, deque()).append(node)

    def compute(self, seconds: float) -> None:
        """Run a kernel."""
        while seconds > 0 and (running := self._running()):
            step = min(seconds, min(self.left[one] for one in running))
            seconds -= step
            for one in running:
                self.exposed[one] += step * (self.slowdown - 1) / len(running)
            self._pass(running, step)

    def wait(self, node: fx.Node) -> None:
        """Until a transfer has ended."""
        while node in self.left:
            running = self._running()
            step = min(self.left[one] for one in running)
            self.exposed[node] += step
            self._pass(running, step)

    def _running(self) -> list[fx.Node]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _pass(self, running: Iterable[fx.Node], step: float) -> None:
        for one in running:
            self.left[one] -= step
            if self.left[one] <= 0:
                del self.left[one]
                self.queues[self.links[one]].popleft()


__all__ = ["Link", "exposed_s"]
