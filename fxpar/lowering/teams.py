"""`lower_teams`: one logical graph, lowered for each of several strategies that run side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.errors import TeamsBufferError, TeamsGatherError
from fxpar.ir.axes import REPLICAS
from fxpar.ir.dist_config import DistConfig
from fxpar.ir.exec_graph import ExecGraph, Program, collective_kind
from fxpar.ir.graph import TOKENS, LogicalGraph
from fxpar.ir.node_meta import comm_of
from fxpar.ir.pass_base import GraphPass
from fxpar.ir.pipeline_graph import TeamsGraph
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import in_step, lowered_for, team_budget
from fxpar.lowering.pipeline import fields_of_blocks
from fxpar.passes.rematerialize import Rematerialize

_WAIT = torch.ops._c10d_functional.wait_tensor.default


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
        teams = [_without_reductions(team) for team in teams]
        _check_in_step(strategy, teams)
    timings: Counter[str] = Counter()
    for team in teams:
        timings.update(team.timings)
    whole = fields_of_blocks(logical, strategy, teams)
    return TeamsGraph(**whole, timings={**timings, **logical.timings}, teams=tuple(teams))


def _without_reductions(program: Program) -> Program:
    """With the loss of each replica alone: whose replicas stand where, only the sum over all teams knows."""
    if not isinstance(program, ExecGraph):
        return program
    for node in list(program.epilogue.graph.nodes):
        sums = collective_kind(node) == "all_reduce" and REPLICAS in comm_of(node)[0].split(".")
        if sums or (node.target is _WAIT and collective_kind(node.args[0]) is None):
            node.replace_all_uses_with(node.args[0])
            program.epilogue.graph.erase_node(node)
    return program


def _check_in_step(strategy: Strategy, teams: Sequence[Program]) -> None:
    """Teams in step make the same collectives with each other, in the same order, whatever they do in between; and
    parameters and gradients lie in one way. Raises TeamsGatherError.
    """
    first = teams[0]
    for number, team in enumerate(teams):
        own = strategy.of_team(number)
        common = _among_teams(team, own)
        if any(not isinstance(size, int) for call in common for size in call[-1]):
            raise TeamsGatherError(str(strategy), str(own), "sends tokens to other teams")
        if common != _among_teams(first, strategy.of_team(0)):
            raise TeamsGatherError(str(strategy), str(own), f"gathers otherwise than {str(strategy.teams[0])!r}")
        other = next((one for one, mine in zip(_stored(first), _stored(team), strict=True) if one != mine), None)
        if other is not None:
            raise TeamsGatherError(str(strategy), str(own), f"has other pieces of {other[0]!r} than the first team")


def _among_teams(program: Program, own: Strategy) -> list[tuple[Any, ...]]:
    """The collectives, in order, in which ranks of the team meet others: part, kind, process groups, dtype, shape."""
    mine = set(own.mesh.ranks)
    crossing: dict[str, Any] = {}
    for axis in program.axes():
        groups = program.mesh.groups(tuple(axis.split(".")))
        if any(mine & set(group) and not mine.issuperset(group) for group in groups):
            crossing[axis] = groups
    return [
        (one.part, one.kind, crossing[one.axis], one.sent.dtype, tuple(one.sent.shape))
        for one in program.communications()
        if one.axis in crossing
    ]


def _stored(program: Program) -> list[tuple[Any, ...]]:
    """By name which piece, and which term of a sum, each rank has of each parameter and gradient."""
    pairs = [*zip(program.inputs, program.stored_inputs, strict=True)]
    pairs += [*zip(program.outputs, program.stored_outputs, strict=True)]
    known: dict[Any, Any] = {}
    found = []
    for info, stored in pairs:
        if info.kind in ("param", "grad"):
            key = stored.dist, tuple(stored.meta.shape)
            if key not in known:
                known[key] = _pieces(*key)
            found.append((info.fqn, info.kind, stored.meta.dtype, known[key]))
    return found


def _pieces(dist: DistConfig, shape: tuple[int, ...]) -> tuple[Any, ...]:
    terms = tuple(axis for axis, _ in dist.partial)
    return tuple(
        (
            [dist.intervals(rank, dim, size) for dim, size in enumerate(shape)],
            [dist.mesh.index(rank, axis) for axis in terms],
        )
        for rank in dist.mesh.ranks
    )


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
