"""`lower_teams`: one logical graph, lowered for each of several strategies that run side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.errors import TeamsBufferError
from fxpar.ir.exec_graph import Program
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TeamsGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import in_step, lowered_for, team_budget
from fxpar.lowering.in_step import in_step_programs
from fxpar.lowering.pipeline import fields_of_blocks
from fxpar.passes.rematerialize import Rematerialize


def lower_teams(logical: LogicalGraph, strategy: Strategy, lower: Callable[[Strategy], Program]) -> TeamsGraph:
    """The program of each team, by `lower`, on its own ranks. Their gradients are terms of a sum, which the way home
    adds up; nothing goes from team to team in a micro-batch, unless they run in step (`fxpar.ir.teams.in_step`).

    Raises TeamsBufferError for a step that writes buffers, TeamsGatherError, and the errors of `lower`.
    """
    written = [out.fqn for out in logical.outputs if out.kind == "buffer"]
    if written:
        raise TeamsBufferError(str(strategy), written)
    teams = [lower(lowered_for(strategy, number)) for number in range(len(strategy.teams))]
    if in_step(strategy):
        teams = in_step_programs(strategy, teams)
    timings: Counter[str] = Counter()
    for team in teams:
        timings.update(team.timings)
    whole = fields_of_blocks(logical, strategy, teams)
    return TeamsGraph(**whole, timings={**timings, **logical.timings}, teams=tuple(teams))


def ladder_of_team(ladder: Sequence[GraphPass], strategy: Strategy, team: Strategy) -> list[GraphPass]:
    """The passes for one of the teams: a budget for saved activations is meant at its own micro-batches, where that of
    the largest team has the tokens that the pass was given.
    """

    def of_team(step: GraphPass) -> GraphPass:
        if not isinstance(step, Rematerialize):
            return step
        sizes = ((name, team_budget(strategy, team, n) if name == TOKENS else n) for name, n in step.sizes)
        return replace(step, sizes=tuple(sizes))

    return [of_team(step) for step in ladder]
