"""`lower_teams`: each team's program is that of its strategy, on ranks of its own."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fxpar.annotate.driver import annotate
from fxpar.errors import NotYetError, RematBudgetError, TeamsBufferError, TeamsGatherError
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, position_of
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.lowering.driver import outline
from fxpar.memory import predict_memory
from fxpar.memory.predict import memory_over_time
from fxpar.runtime.micro import replica_of
from fxpar.switch import layout_of
from fxpar.tracer import capture
from tests.captured import llama

FORMATION = "cp2 | pp2 | dp2"


@pytest.fixture(scope="module")
def program() -> TeamsGraph:
    found = lower(llama(2).graph, FORMATION, for_store=True)
    assert isinstance(found, TeamsGraph)
    return found


def test_teams_are_on_ranks_of_their_own(program):
    assert [team.mesh.ranks for team in program.teams] == [(0, 1), (2, 3), (4, 5)]
    assert isinstance(program.teams[1], PipelineGraph)
    assert [program.team_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [replica_of(program, rank) for rank in range(6)] == [0, 0, 1, 1, 2, 3]
    assert [position_of(program, rank) for rank in range(6)] == [0, 0, 0, 1, 0, 0]
    assert len(program.placed) == 4


def test_a_team_sends_what_its_strategy_sends(program):
    alone = [lower(llama(2).graph, text, for_store=True) for text in ("cp2", "pp2", "dp2")]
    assert [team.collective_bytes() for team in program.teams] == [one.collective_bytes() for one in alone]
    assert program.collective_bytes() == max(one.collective_bytes() for one in alone)
    assert program.node_count == sum(one.node_count for one in alone)


def test_an_outline_lies_alike(program):
    assert layout_of(outline(llama(2).graph, FORMATION)).params == layout_of(program).params


def test_a_file_holds_it(program, tmp_path):
    save_graph(tmp_path / "teams.fxpar", program)
    again = load_graph(tmp_path / "teams.fxpar")
    assert isinstance(again, TeamsGraph)
    assert again.fingerprint() == program.fingerprint()


def test_memory_is_that_of_the_fullest_team(program):
    """Of as many tokens per rank; what lies at home is shared by all ranks."""
    found = predict_memory(program, {"T": 128})
    alone = [
        predict_memory(lower(llama(2).graph, text, for_store=True), {"T": t}) for text, t in (("cp2", 128), ("dp2", 64))
    ]
    assert found.step_bytes >= max(one.step_bytes for one in alone)
    assert found.master_bytes < min(one.master_bytes for one in alone)


def test_a_budget_is_meant_at_the_tokens_of_the_team():
    """A single rank beside 4 has a quarter of their tokens, and recomputes what it would alone."""
    (alone,) = lower(llama(2).graph, "dp1+remat(150kB)", for_store=True, sizes={"T": 64}).notes
    beside = lower(llama(2).graph, "tp4 | dp1+remat(150kB)", for_store=True, sizes={"T": 256})
    assert alone.endswith("T = 64")
    assert alone in beside.notes


def test_a_budget_that_a_team_cannot_meet_names_the_team():
    with pytest.raises(RematBudgetError, match=r"under 'dp2\+remat\(1kB\)' on ranks 1 to 2 the backward"):
        lower(llama(2).graph, "dp1 | dp2+remat(1kB)", for_store=True)


def test_a_graph_of_one_mesh_is_refused():
    with pytest.raises(NotYetError, match="of_team"):
        annotate(llama(2).graph, Strategy.parse(FORMATION))


@pytest.mark.parametrize(
    ("formation", "why"),
    [
        (
            "cp2+zero3[*.ffn: tp2] | cp2+zero3",
            "'cp2+zero3' gathers or reduces in another way than 'cp2+zero3[*.ffn: tp2]'",
        ),
        ("cp2+zero3+remat(*.ffn) | dp2+zero3", "'dp2+zero3' gathers or reduces in another way"),  # what it reads first
        ("dp2+zero3 | tp2+zero3", "'tp2+zero3' has other tp and sp than 'dp2+zero3'"),
    ],
)
def test_teams_that_cannot_gather_together_are_refused(formation, why):
    with pytest.raises(TeamsGatherError, match=re.escape(why)):
        lower(llama(2).graph, formation, for_store=True)


def test_teams_in_step_lie_as_one_strategy_of_all_ranks(tmp_path):
    """Whatever each saves: the gathers of a layer and its reductions are in one order."""
    program = lower(llama(2).graph, "cp2+zero3+offload | dp2+zero3", for_store=True)
    one = lower(llama(2).graph, "dp4+zero3", for_store=True)
    assert isinstance(program, TeamsGraph)
    for fqn, param in layout_of(one).params.items():
        (ours,), (theirs,) = layout_of(program).params[fqn].copies, param.copies
        assert all(ours.boxes(rank, param.shape) == theirs.boxes(rank, param.shape) for rank in range(4)), fqn
    assert layout_of(outline(llama(2).graph, "cp2+zero3+offload | dp2+zero3")).params == layout_of(program).params
    assert [replica_of(program, rank) for rank in range(4)] == [0, 0, 1, 2]
    assert [list(program.beside(team)) for team in (0, 1)] == [[0, 1, 2]] * 2
    assert all(team.parts["epilogue"].is_empty for team in program.teams)  # the loss stays that of a replica
    save_graph(tmp_path / "teams.fxpar", program)
    assert load_graph(tmp_path / "teams.fxpar").fingerprint() == program.fingerprint()
    assert [one.ranks for one in memory_over_time(program, {"T": 64}).ranks] == [(0, 1), (2, 3)]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_written_buffers_are_refused():
    def loss(model: nn.Module, batch: dict) -> torch.Tensor:
        return model(batch["x"]).square().sum()

    logical = capture(Normed(), loss, {"x": torch.zeros(4, 8)})
    with pytest.raises(TeamsBufferError, match=r"'norm\.running_mean'"):
        lower(logical, "dp2 | dp1")
