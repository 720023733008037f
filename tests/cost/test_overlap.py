"""What of transfers is exposed, by hand and against a clock that ticks in small steps."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpar.cost.calls import node_costs
from fxpar.cost.group import group_cost
from fxpar.cost.overlap import exposed_s
from fxpar.errors import ClusterError
from tests.cost.programs import DEVICE, NODE, program
from tests.repeat import examples

WAIT = torch.ops._c10d_functional.wait_tensor.default


class Story:
    """Calls of a part; each is a kernel or a transfer of so many seconds, or takes none."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.seconds: dict[fx.Node, float] = {}
        self.links: dict[fx.Node, Any] = {}
        self.first = self.graph.placeholder("x")

    def kernel(self, seconds: float, *reads: fx.Node) -> fx.Node:
        node = self.graph.call_function(operator.add, reads or (self.first,))
        self.seconds[node] = seconds
        return node

    def transfer(self, seconds: float, link: str = "inside", reads: fx.Node | None = None) -> fx.Node:
        node = self.kernel(seconds, *([reads] if reads else []))
        self.links[node] = link
        return node

    def wait(self, transfer: fx.Node) -> fx.Node:
        return self.graph.call_function(WAIT, (transfer,))

    def view(self, node: fx.Node) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, 0))

    def exposed(self, slowdown: float = 1.0) -> list[float]:
        found = exposed_s(self.graph.nodes, self.seconds, self.links.get, slowdown)
        return [pytest.approx(found[node]) for node in self.links]


def test_what_is_waited_for_at_once_is_exposed_whole():
    story = Story()
    story.wait(story.transfer(2.0))
    story.kernel(5.0)
    assert story.exposed() == [2.0]


def test_kernels_hide_a_transfer_and_go_slower_beside_it():
    story = Story()
    sent = story.transfer(2.0)
    story.kernel(5.0)
    story.wait(sent)
    assert story.exposed() == [0.0]
    assert story.exposed(1.25) == [0.5]  # two seconds beside each other take 2.5


def test_of_several_transfers_the_first_is_waited_for_first():
    """Else ranks, each a process of its own, would price the same program apart, and plan other mini-batches."""
    story = Story()
    sent = [story.transfer(float(one + 1), ("host", "inside", "between")[one % 3]) for one in range(60)]
    story.kernel(1.0, *reversed(sent))
    ended, found = [0.0, 0.0, 0.0], [0.0]
    for one in range(60):
        ended[one % 3] += one + 1
        found.append(max(found[-1], ended[one % 3]))
    assert story.exposed() == [after - before for before, after in itertools.pairwise(found)]


def test_a_link_does_one_transfer_after_the_other_and_two_links_work_at_the_same_time():
    for link, exposed in (("inside", [0.0, 3.0]), ("between", [0.0, 1.0])):
        story = Story()
        first, second = story.transfer(2.0), story.transfer(4.0, link)
        story.kernel(3.0)
        story.wait(first)
        story.wait(second)
        assert story.exposed() == exposed


def test_a_kernel_waits_for_what_views_show_it():
    story = Story()
    fetched = story.transfer(4.0, "host")
    seen = story.view(story.view(fetched))
    story.kernel(1.0)
    story.kernel(1.0, seen)
    assert story.exposed() == [3.0]


def test_a_fetch_queues_behind_its_copy_and_blocks_nobody():
    story = Story()
    copied = story.transfer(4.0, "host")
    fetched = story.transfer(4.0, "host", copied)
    story.kernel(6.0)
    story.kernel(1.0, fetched)
    assert story.exposed() == [0.0, 2.0]


@settings(max_examples=examples(60))
@given(st.data())
def test_the_sum_is_what_a_clock_says(data: st.DataObject):
    """Whole seconds, so a clock of one second steps is exact; no slowdown."""
    story, begun, total = Story(), [], 0
    queues: dict[str, list[list[int]]] = {"inside": [], "between": []}
    for what in data.draw(st.lists(st.sampled_from(["kernel", "send", "wait"]), max_size=20)):
        seconds = data.draw(st.integers(1, 4))
        if what == "send":
            link = data.draw(st.sampled_from(["inside", "between"]))
            queues[link].append(left := [seconds])
            begun.append((story.transfer(seconds, link), left))
            continue
        if what == "kernel":
            story.kernel(seconds)
            ticks = seconds
        elif begun:
            node, left = data.draw(st.sampled_from(begun))
            story.wait(node)
            ticks = 10**6
        else:
            continue
        while ticks and (what == "kernel" or left[0]):
            ticks, total = ticks - 1, total + 1
            for queue in queues.values():
                head = next((one for one in queue if one[0]), None)
                if head:
                    head[0] -= 1
    kernels = sum(s for node, s in story.seconds.items() if node not in story.links)
    found = exposed_s(story.graph.nodes, story.seconds, story.links.get, 1.0)
    assert kernels + sum(found.values()) == pytest.approx(total)


def test_a_device_without_a_figure_takes_turns():
    """All seconds of a collective count, as on a CPU, whose cores do the transfers."""
    assert DEVICE.overlap_slowdown is None
    assert all(cost.exposed == cost.seconds for cost in node_costs(program("cp4"), NODE))


@pytest.mark.parametrize("strategy", ["dp4+zero3", "cp4", "ring4"])
def test_overlap_makes_a_micro_batch_shorter_and_never_shorter_than_its_kernels(strategy: str):
    beside = replace(NODE, device=replace(DEVICE, overlap_slowdown=1.0))
    lowered = program(strategy)
    kernels = sum(float(cost.seconds.at(4096)) for cost in node_costs(lowered, NODE) if not cost.axis)
    alone, together = (group_cost(lowered, one).seconds([4096]) for one in (NODE, beside))
    assert kernels <= together < alone


def test_a_factor_below_one_is_no_slowdown():
    with pytest.raises(ClusterError, match=r"overlap_slowdown = 0.5 is a factor: it must be >= 1"):
        replace(DEVICE, overlap_slowdown=0.5)
    assert replace(DEVICE, overlap_slowdown=1).overlap_slowdown == Fraction(1)
