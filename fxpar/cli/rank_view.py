"""A program as one rank runs it: its stages, and its process groups and coordinates in place of tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fxpar.errors import UnknownRankError
from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import Part, Program, substitute_tokens
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, position_of

P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class RankView:
    """Where a rank stands: its coordinate on each axis and its process groups, by axes joined by '.'."""

    rank: int
    coordinate: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    stages: tuple[int, ...] = ()

    def lines(self) -> list[str]:
        """Text for the head of a dump."""
        place = ", ".join(f"{axis} {at}" for axis, at in self.coordinate.items())
        stages = f", pipeline stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"
        found = [f"as rank {self.rank}: {place or 'alone'}{stages if self.stages else ''}"]
        return found + [f"process group @{axis}: ranks {_ranks(ranks)}" for axis, ranks in self.groups.items()]

    def to_json(self) -> dict[str, Any]:
        groups = {axis: list(ranks) for axis, ranks in self.groups.items()}
        return {"rank": self.rank, "coordinate": self.coordinate, "groups": groups, "stages": list(self.stages)}


def as_rank(program: Program, rank: int) -> tuple[Program, RankView]:
    """The program with this rank's groups and coordinates; of a pipeline with its stages only.

    Raises UnknownRankError for a rank that the strategy has not.
    """
    world = program.strategy.world
    if not 0 <= rank < world:
        raise UnknownRankError(rank, str(program.strategy), world)
    if not isinstance(program, PipelineGraph):
        view = _view(program, rank)
        return _bound(program, view), view
    mine = program.stages_of(rank)
    views = [_view(stage, rank) for stage in mine]
    groups = {axis: ranks for view in views for axis, ranks in view.groups.items()}
    stages = tuple(_bound(stage, view) for stage, view in zip(mine, views, strict=True))
    coordinate = {STAGES: position_of(program, rank), **views[0].coordinate}
    view = RankView(rank, coordinate, groups, tuple(stage.index for stage in mine))
    return _only_stages(program, stages), view


def _only_stages(program: PipelineGraph, stages: tuple[StageProgram, ...]) -> PipelineGraph:
    """All stages as they are but for these."""
    new = {stage.index: stage for stage in stages}
    return replace(program, stages=tuple(new.get(stage.index, stage) for stage in program.stages))


def _view(program: Program, rank: int) -> RankView:
    groups = {axis: program.mesh.group_of(rank, tuple(axis.split("."))) for axis in program.axes()}
    return RankView(rank, program.mesh.coordinate(rank), groups)


def _bound(program: P, view: RankView) -> P:
    groups = {axis: f"ranks {_ranks(ranks)}" for axis, ranks in view.groups.items()}
    mesh = program.mesh
    indices: dict[str, Any] = {axis: mesh.index(view.rank, axis) for axis in _joined_axes(program, mesh)}
    parts = {f.name: getattr(program, f.name) for f in fields(program) if f.type == "Part"}
    return replace(
        program, **{n: Part(substitute_tokens(p.graph, groups, indices), p.sources) for n, p in parts.items()}
    )


def _joined_axes(program: Program, mesh: Mesh) -> set[str]:
    """Axes and joint axes whose position the graphs ask for."""
    words = {
        argument[1:]
        for part in program.parts.values()
        for node in part.graph.nodes
        for argument in node.args
        if isinstance(argument, str) and argument[:1] == "#"
    }
    return words | set(mesh.names)


def _ranks(ranks: tuple[int, ...]) -> str:
    """`0-7` for neighbours, `0, 4, 8` for others."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
