"""`lower_teams`: each team's program is that of its strategy, on ranks of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpar.annotate.driver import annotate
from fxpar.errors import NotYetError, TeamsBufferError
from fxpar.graph_files import load_graph, save_graph
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, position_of
from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.lowering.driver import outline
from fxpar.memory import predict_memory
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


def test_a_graph_of_one_mesh_is_refused():
    with pytest.raises(NotYetError, match="of_team"):
        annotate(llama(2).graph, Strategy.parse(FORMATION))


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
