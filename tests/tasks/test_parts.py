"""Parts of a graph: every call in one, none that needs another in turns."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest
import torch
from torch import nn

from fxpar.tasks.layers import Forward
from fxpar.tasks.parts import modules_of, parts_of
from fxpar.tracer import capture
from tests.tasks.towers import TASKS, Layer, step


@pytest.mark.parametrize("task", TASKS)
def test_every_call_is_in_one_part_and_they_can_run_in_order(task):
    forward = step(task).forward
    parts, edges = parts_of(forward)
    calls = [node for part in parts for node in part.all_calls]
    assert len(calls) == len(set(calls)) == len(forward.calls)
    assert all(a < b for a, b in edges)
    owner = {node: i for i, part in enumerate(parts) for node in part.all_calls}
    needed = {(owner[one], owner[node]) for node in forward.calls for one in forward.reads[node]}
    assert {(a, b) for a, b in needed if a != b} == edges
    TopologicalSorter({b: [a for a, c in edges if c == b] for _, b in edges}).prepare()


def test_what_is_cheap_joins_its_neighbour():
    parts, edges = parts_of(step("caption").forward)
    image, lm = parts
    assert edges == {(0, 1)}
    assert modules_of(image.before, image.layers) == ("image.patches",)
    assert "words" in modules_of(lm.before, lm.layers)
    assert modules_of(lm.behind, lm.layers) == ("head", "")


def test_what_joins_two_towers_stays_a_part_of_its_own():
    parts, edges = parts_of(step("tapped").forward)
    (loss,) = (i for i, part in enumerate(parts) if not part.layers)
    assert {a for a, b in edges if b == loss} == {0, 2}  # alpha and beta, delta
    assert modules_of(parts[loss].before, ()) == ("",)


class Turns(nn.Module):
    """Two modules that need each other in turns: neither can run as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(16), Layer(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.two(self.one(x)))


def test_modules_that_need_each_other_in_turns_are_not_both_whole():
    batch = {"x": torch.ones(4, 8)}
    graph = capture(Turns(), lambda model, batch: model(batch["x"]).square().sum(), batch, dynamic=None)
    parts, edges = parts_of(Forward.of(graph))
    assert all(a < b for a, b in edges)
    assert (("one",),) not in [part.layers for part in parts]
