"""Towers of one model as stages: each begins with its own, and waits for the one before it only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.cost.cluster import usual_cluster
from fxpar.errors import NotYetError
from fxpar.ir.handover import Handover
from fxpar.runtime.pipeline import BoundPipeline, _Group, plan_pipeline
from fxpar.schedule import Action, Wait, with_transfers
from fxpar.viz.inside import Inside


class Two(nn.Module):
    """Two towers, and a layer on what both have made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.over = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.one(x))
        return self.over(seen + torch.tanh(self.other(y)))


def program(strategy: str, model: nn.Module | None = None) -> Any:
    example = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    task = fxpar.Task(lambda model, batch: model(batch["x"], batch["y"]).sum(), example, strategies={8: strategy})
    return fxpar.compile_task(model or Two(), task).programs[strategy]


def ops(part: Any) -> list[str]:
    """The modules of products."""
    return [node.meta["fqn"] for node in part.graph.nodes if "mm" in str(node.target)]


def test_a_stage_begins_with_what_is_its_own():
    first, second = program("tp1+zb_h1+cut(other) > tp1").stages
    assert first.early is first.late is None
    assert (ops(second.early), ops(second.late)) == (["other"], ["over"])
    assert len(second.late.results) == len(second.forward.results)
    # Half of the backward is all that the other stage waits for: none of it is of this tower.
    assert "other" not in ops(second.input_part)
    assert "other" in ops(second.weight_part)


def test_a_tower_is_predicted_to_run_beside_the_other():
    """All of the second stage but the layer on what both have made."""
    inside = Inside(program("tp1+zb_h1+cut(other) > tp1"), usual_cluster(2))
    early, there_ms = inside.early_ms(1, (4,)), inside.send_ms(0, "activation", (4,))
    assert inside.early_ms(0, (4,)) == 0.0
    late = {node.name for node in inside.program.stages[1].late.graph.nodes if node.op == "call_function"}
    late_ms = sum(ms for name, ms in inside.node_ms(1, "forward", (4,)).items() if name in late)
    assert 0.0 < early == pytest.approx(inside.ms(1, "forward", (4,)) - late_ms)
    first, second = inside.timeline(plan_pipeline(inside.program, 1), (4,)).spans
    assert second[0].start_ms == pytest.approx(first[0].end_ms + there_ms - early)


def test_a_stage_that_reads_nothing_but_what_comes_begins_with_nothing():
    """A weight that is transposed before is no work."""
    _, second = program("tp1+cut(over) > tp1").stages
    assert second.early is second.late is None


class Told(BoundPipeline):
    """Says what it would do."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def _begin(self, transfer: Any, group: _Group) -> None:
        self.seen.append(f"begin {transfer.micro_batch}")

    def _wait(self, transfer: Any, group: _Group) -> None:
        self.seen.append(f"wait {transfer.micro_batch}")

    def _receive(self, transfer: Any, group: _Group) -> None:
        self.seen.append(f"receive {transfer.micro_batch}")

    def _act(self, action: Action, plan: Any, group: _Group) -> None:
        self.seen.append(str(action))

    def _send(self, step: Any, group: _Group) -> None:
        self.seen.append("send")


def test_it_begins_before_it_waits():
    two = program("tp1+zb_h1+cut(other) > tp1")
    plan = plan_pipeline(two, 2)
    steps = with_transfers(plan)[1]
    assert any(isinstance(step, Wait) for step in steps)
    told = Told([])
    told._run_steps(steps, plan, _Group(()))
    at = {what: place for place, what in enumerate(told.seen)}
    for number in range(2):
        assert at[f"receive {number}"] < at[f"begin {number}"] < at[f"wait {number}"] < at[f"F{number}@1"]


def test_a_rank_has_one_layout_of_a_parameter():
    tied = Two()
    tied.over.weight = tied.one.weight
    assert len(program("tp1+cut(other|over) > tp1 > tp2@0").stages) == 3
    with pytest.raises(NotYetError, match=r"'one.weight' on stages 0 and 2 of .*, which share ranks, is not supported"):
        program("tp1+cut(other|over) > tp1 > tp2@0", tied)


def test_what_goes_between_towers_is_their_features():
    sent = program("tp1+zb_h1+cut(other) > tp1").handovers
    assert [(each.kind, each.stage, each.to) for each in sent] == [("sent", 0, 1), ("sent_grad", 1, 0)]
    assert all(isinstance(each, Handover) for each in sent)
