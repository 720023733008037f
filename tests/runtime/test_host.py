"""Copies beside kernels: what waits for what, and the same numbers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.runtime.host import HostCopies, copy_beside_kernels

aten, own = torch.ops.aten, torch.ops.fxpar


@dataclass(eq=False)
class Stream:
    """What has run on it, and what of others ended before what comes next."""

    name: str
    known: set[str] = field(default_factory=set)

    def run(self, work: str, log: dict[str, set[str]]) -> None:
        log[work] = set(self.known)
        self.known.add(work)

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known

    def record_event(self) -> frozenset[str]:
        return frozenset(self.known)

    def wait_event(self, event: frozenset[str]) -> None:
        self.known |= event


class FakeStreams:
    """Streams that remember: `before[work]` is what had ended when the work could begin."""

    def __init__(self) -> None:
        self.main, self.made = Stream("kernels"), 0
        self.before: dict[str, set[str]] = {}
        self.kept: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def stream(self) -> Stream:
        self.made += 1
        return Stream(("out", "back")[self.made - 1])

    def kernels(self) -> Stream:
        return self.main

    @contextmanager
    def on(self, stream: Stream) -> Any:
        yield
        copies = sum(work.startswith(stream.name) for work in self.before)
        stream.run(f"{stream.name}{copies}", self.before)

    def on_host(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def on_device(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(self, x: Tensor, stream: Stream) -> None:
        self.kept.append((str(x.shape[0]), stream.name))


def run(streams: FakeStreams, build: Any, *inputs: Tensor) -> list[Tensor]:
    """Run a graph in which `aten.sin` is a kernel that the main stream notes."""
    graph = fx.Graph()
    graph.output(build(graph, *(graph.placeholder(f"x{i}") for i in range(len(inputs)))))
    copy_beside_kernels(graph, HostCopies(streams))
    graph.lint()

    def kernel(x: Tensor) -> Tensor:
        streams.main.run(f"kernel{sum(w.startswith('kernel') for w in streams.before)}", streams.before)
        return aten.sin.default(x)

    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = kernel
    return fx.GraphModule(torch.nn.Module(), graph)(*inputs)


def sin(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.sin.default, (x,))


def send(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(own.to_host.default, (x,))


def fetch(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(own.from_host.default, (x,), {"device": torch.device("cpu")})


def two_blocks(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
    """Both blocks send what they make; the second one's comes back first, the first one's while kernels use that."""
    a = sin(graph, x)  # kernel0
    first = send(graph, a)
    b = sin(graph, a)  # kernel1
    second = send(graph, b)
    loss = sin(graph, b)  # kernel2
    b_back, a_back = fetch(graph, second), fetch(graph, first)
    one = sin(graph, b_back)  # kernel3
    return loss, one, sin(graph, a_back), b_back  # kernel4


def test_what_waits_for_what():
    streams = FakeStreams()
    x = torch.rand(3, 5).t()
    _, one, two, back = run(streams, two_blocks, x)
    assert torch.equal(back, x.sin().sin())
    assert torch.equal(one, x.sin().sin().sin())
    assert torch.equal(two, x.sin().sin())
    before = streams.before
    assert before["out0"] == {"kernel0"}
    assert before["out1"] == {"kernel0", "kernel1", "out0"}
    assert before["back0"] >= {"kernel2", "out1"}  # memory that kernels used, and what is there to be fetched
    # Kernels wait for no copy to the host, and for what they read alone: not for what comes for the next block.
    assert before["kernel2"] == {"kernel0", "kernel1"}
    assert "back0" in before["kernel3"]
    assert "back1" not in before["kernel3"]
    assert "back1" in before["kernel4"]
    assert streams.kept == [("5", "out"), ("5", "out")]


def test_strides_stay():
    streams = FakeStreams()
    copies = HostCopies(streams)
    x = torch.rand(3, 5).t()
    assert copies.send(x).stride() == copies.wait(copies.fetch(copies.send(x))).stride() == x.stride()


def test_what_a_part_hands_on_is_there():
    """A fetched value that another part reads: waited for at the end."""
    streams = FakeStreams()
    run(streams, lambda graph, x: (fetch(graph, x), x), torch.rand(2))
    assert "back0" in streams.main.known


def test_a_graph_without_copies_is_as_it_was():
    graph = fx.Graph()
    graph.output(sin(graph, graph.placeholder("x")))
    nodes = list(graph.nodes)
    copy_beside_kernels(graph, HostCopies(FakeStreams()))
    assert list(graph.nodes) == nodes
