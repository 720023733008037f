"""A program on this rank of an initialised process group, whatever its kind."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import ExecGraph, Program
from fxpar.ir.graph import run_dims
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, TrainGraph
from fxpar.runtime.bound import BoundGraph, bind
from fxpar.runtime.channels import Channels, ProcessGroupChannels
from fxpar.runtime.pipeline import BoundPipeline
from fxpar.runtime.runner import Backend
from fxpar.runtime.teams import BoundElsewhere, BoundTeam
from fxpar.transport.groups import ProcessGroups

Bound = BoundGraph | BoundPipeline | BoundTeam | BoundElsewhere


def bind_here(
    program: TrainGraph,
    process_groups: ProcessGroups,
    *,
    device: torch.device | None = None,
    compile: Backend = "eager",
    channels: Channels | None = None,
) -> Bound:
    """`program` for the calling rank, with all process groups that it needs; all ranks call it alike.

    `channels` carry what pipeline stages send; by default torch.distributed's messages.
    """
    teams = program.teams if isinstance(program, TeamsGraph) else (program,)
    found = [_bind(team, process_groups, device, compile, channels) for team in teams]
    rank = dist.get_rank()
    mine = None
    if rank in program.mesh:
        mine = found[program.team_of(rank) if isinstance(program, TeamsGraph) else 0]
    if mine is None:
        return BoundElsewhere(program, rank)
    if not isinstance(program, TeamsGraph):
        return mine
    return BoundTeam(program, mine, process_groups.of(program.mesh.ranks))


def _bind(
    program: Program,
    process_groups: ProcessGroups,
    device: torch.device | None,
    compile: Backend,
    channels: Channels | None,
) -> BoundGraph | BoundPipeline | None:
    """None on a rank that does not run it, which may have to make its process groups all the same."""
    rank = dist.get_rank()
    if isinstance(program, ExecGraph):
        names = process_groups.names(program.mesh, program.axes())
        return bind(program, rank, names, compile=compile) if rank in program.mesh else None
    assert isinstance(program, PipelineGraph)
    of_stages = {stage.index: process_groups.names(stage.mesh, stage.axes()) for stage in program.stages}
    is_grid = not program.strategy.by_stage
    columns = process_groups.to_make(program.mesh, (STAGES,)) if is_grid else [program.mesh.ranks]
    made = {column: process_groups.of(column) for column in columns}
    if channels is None:
        pairs = [pair for column in columns for pair in _neighbours(column)] if is_grid else _pairs(program)
        channels = ProcessGroupChannels.make(pairs, process_groups, device or torch.device("cpu"))
    if rank not in program.mesh:
        return None
    return BoundPipeline(program, rank, of_stages, channels, made[program.column_of(rank)], compile)


def _pairs(program: PipelineGraph) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages between stages that are no grid; they are the same at any length."""
    dims = run_dims(program)
    found = (
        (each.source, each.target)
        for handover in program.handovers
        for replica in range(program.strategy.replicas)
        for each in handover.messages(dims, replica)
        if each.source != each.target
    )
    return list(dict.fromkeys(found))


def _neighbours(column: tuple[int, ...]) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages in a column: the last stage's rank has the first one's behind it too, which
    interleaved schedules use.
    """
    following = [*column[1:], column[0]]
    pairs = dict.fromkeys(zip(column, following, strict=True))
    pairs |= dict.fromkeys(zip(following, column, strict=True))
    return list(pairs)
