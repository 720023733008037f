"""Programs of several meshes: `PipelineGraph`, with one `StageProgram` per pipeline stage, and `TeamsGraph`.

Each stage has a mesh of its own (see `Strategy.mesh`). With several stages per rank (interleaved schedules) the stages
s, s + pp ... have the same one. Stages may differ in strategy (`Strategy.by_stage`): what goes between them is cut anew
on its way.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.ir.axes import STAGES
from fxpar.ir.exec_graph import ExecGraph, Part, Program, Stored, cut_part, loss_results, restricted
from fxpar.ir.graph import run_dims
from fxpar.ir.handover import Handover
from fxpar.ir.mesh import Mesh
from fxpar.ir.teams import in_step

_SIZE = torch.ops.aten.sym_size.int


@dataclass(kw_only=True)
class StageProgram(Program):
    """One stage on the ranks of its mesh (`strategy` is without pp). The parts are those of `fxpar.stages.StageParts`;
    `input_part` and `weight_part` are the backward in two halves.
    """

    index: int
    prologue: Part
    forward: Part
    backward: Part
    input_part: Part
    weight_part: Part
    epilogue: Part

    @property
    def parts(self) -> dict[str, Part]:
        names = ("prologue", "forward", "backward", "epilogue")
        return {name: getattr(self, name) for name in names}

    @functools.cached_property
    def loss(self) -> Part:
        """What the epilogue does for the loss and metrics, on the stage that gives them; in the order of `given`."""
        return restricted(self.epilogue, loss_results(self, self.epilogue))

    @functools.cached_property
    def early(self) -> Part | None:
        """What of the forward reads parameters, and of what is received only sizes: a tower of its own that runs while
        the stage before does. Its results are what `late` reads of it. None if there is no such work.
        """
        return None if self._halves is None else self._halves[0]

    @functools.cached_property
    def late(self) -> Part | None:
        """The forward without what `early` has done; its results are those of `forward`."""
        return None if self._halves is None else self._halves[1]

    @functools.cached_property
    def _halves(self) -> tuple[Part, Part] | None:
        sources = dict(zip(self.forward.graph.find_nodes(op="placeholder"), self.forward.sources, strict=True))
        kinds = {node: part if part == "prologue" else self.inputs[i].kind for node, (part, i) in sources.items()}
        calls = [node for node in self.forward.graph.nodes if node.op == "call_function"]

        def made_of(*wanted: str) -> set[fx.Node]:
            found = {node for node, kind in kinds.items() if kind in wanted}
            for node in calls:
                # The size of what is received is known before it is there.
                if node.target is not _SIZE and any(operand in found for operand in node.all_input_nodes):
                    found.add(node)
            return found

        came = made_of("received")
        work = made_of("batch") & made_of("param", "prologue") - came
        if not work or not came & set(calls):
            return None
        first = [node for node in calls if node not in came]
        rest, results = [node for node in calls if node in came], self.forward.results
        read = {operand for node in rest for operand in node.all_input_nodes} | set(results)
        handed = [node for node in first if node in read]
        place = {node: i for node, (part, i) in sources.items() if part == "input"}
        slots = {"prologue": {node: i for node, (part, i) in sources.items() if part == "prologue"}}
        slots["early"] = {node: i for i, node in enumerate(handed)}
        return cut_part(first, handed, place, slots), cut_part(rest, results, place, slots)

    def taken(self, kind: str) -> dict[str, Stored]:
        """How the inputs of a kind lie, by FQN, in order."""
        pairs = zip(self.inputs, self.stored_inputs, strict=True)
        return {info.fqn: stored for info, stored in pairs if info.kind == kind}

    def given(self, kind: str) -> dict[str, Stored]:
        """How the results of a kind lie, by FQN, in order."""
        pairs = zip(self.outputs, self.stored_outputs, strict=True)
        return {out.fqn: stored for out, stored in pairs if out.kind == kind}


@dataclass(kw_only=True)
class PipelineGraph(Program):
    """A training step in stages. `inputs` and `outputs` are those of the whole model; how they lie, each stage says."""

    stages: tuple[StageProgram, ...]
    cuts: tuple[str, ...]
    flops: tuple[int, ...] = ()
    terms: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameters on several stages -> those with terms

    def stages_of(self, rank: int) -> tuple[StageProgram, ...]:
        """The stages that a rank runs."""
        return tuple(stage for stage in self.stages if rank in stage.mesh)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that a small result of one stage goes to together: those at the place of `rank` in their stages;
        all ranks where stages have meshes of their own.
        """
        return self.mesh.ranks if self.strategy.by_stage else self.mesh.group_of(rank, (STAGES,))

    @property
    def placed(self) -> tuple[Program, ...]:
        return self.stages

    @property
    def parts(self) -> dict[str, Part]:
        return {f"stage{s.index}.{name}": part for s in self.stages for name, part in s.parts.items()}

    def collectives(self) -> dict[str, int]:
        """Number of collectives of each kind on all stages, and of values that go between stages (`send`)."""
        sends = {"send": len(self.handovers)} if self.handovers else {}
        return {**super().collectives(), **sends}

    def collective_bytes(self, sizes: dict[str, int] | None = None) -> int:
        """Bytes that a rank of the busiest stage sends per micro-batch, to its own stage and to others."""
        dims = run_dims(self, sizes)
        total: dict[Mesh, int] = defaultdict(int)
        for stage in self.stages:
            total[stage.mesh] += stage.collective_bytes(sizes)
        for each in self.handovers:
            total[self.stages[each.stage].mesh] += each.bytes_of_busiest(dims)
        return max(total.values())

    @functools.cached_property
    def handovers(self) -> tuple[Handover, ...]:
        """What goes between stages in a micro-batch."""
        return tuple(
            Handover(
                sent, fqn, stage.index, stage.index + step, given, self.stages[stage.index + step].taken(kind)[fqn]
            )
            for stage in self.stages
            for sent, kind, step in (("sent", "received", 1), ("sent_grad", "received_grad", -1))
            for fqn, given in stage.given(sent).items()
        )


def side_by_side(program: Program, names: Callable[[Any], Sequence[str]], last_first: bool = False) -> list[str]:
    """Parameters so ordered that all ranks get on alike: the first share of what each rank's stages have, then the
    next. `names(stage)` are those of a stage, in order; of the stages of one rank the first one comes first, or the
    last one. What several stages have stands where the first of them needs it (`last_first`: where the last one has
    made it).
    """
    of_mesh: dict[Mesh, list[str]] = defaultdict(list)
    for stage in reversed(program.storing) if last_first else program.storing:
        of_mesh[stage.mesh] += names(stage)
    sizes = {info.fqn: info.meta.numel({}) for info in program.inputs if info.kind == "param"}
    at: dict[str, float] = {}
    for mine in of_mesh.values():
        whole, before = sum(sizes[fqn] for fqn in mine) or 1, 0
        for fqn in mine:
            share, before = (before + sizes[fqn] * last_first) / whole, before + sizes[fqn]
            at[fqn] = share if fqn not in at else (max if last_first else min)(at[fqn], share)
    return sorted(at, key=at.__getitem__)


def position_of(program: Program, rank: int) -> int:
    """The place of a rank in the pipeline (of its team); 0 without stages. Where these share ranks see
    `Strategy.places`.
    """
    if isinstance(program, TeamsGraph):
        return position_of(program.teams[program.team_of(rank)], rank)
    if places := program.strategy.places:
        mine = {stage for stage, placed in enumerate(program.placed) if rank in placed.mesh}
        return next(at for at in places[min(mine)] if {i for i, one in enumerate(places) if at in one} == mine)
    return next(place for place, placed in enumerate(program.placed) if rank in placed.mesh)


@dataclass(kw_only=True)
class TeamsGraph(Program):
    """Strategies side by side: one program of the whole model per team, on ranks of its own. Each runs micro-batches of
    its own, and gives a term of every gradient. `inputs` and `outputs` are those of the model; how they lie, each team
    says. In step (`fxpar.ir.teams.in_step`) the mesh of a program is all ranks, and its team's ranks alone run it.
    """

    teams: tuple[Program, ...]

    @property
    def placed(self) -> tuple[Program, ...]:
        return tuple(part for team in self.teams for part in team.placed)

    @property
    def parts(self) -> dict[str, Part]:
        return {f"team{i}.{name}": part for i, team in enumerate(self.teams) for name, part in team.parts.items()}

    def collectives(self) -> dict[str, int]:
        """Number of collectives of each kind in all teams."""
        return dict(sorted(sum((Counter(team.collectives()) for team in self.teams), Counter()).items()))

    def collective_bytes(self, sizes: dict[str, int] | None = None) -> int:
        """Bytes that a rank of the busiest team sends per micro-batch."""
        return max(team.collective_bytes(sizes) for team in self.teams)

    def team_of(self, rank: int) -> int:
        """The number of the team that a rank is in."""
        return next(i for i in range(len(self.teams)) if rank in self.mesh_of(i))

    def mesh_of(self, team: int) -> Mesh:
        """The ranks of a team."""
        return self.strategy.of_team(team).mesh

    def places_of(self, team: int) -> range:
        """The parts of a team among `placed`."""
        before = sum(len(one.placed) for one in self.teams[:team])
        return range(before, before + len(self.teams[team].placed))

    def replicas_of(self, team: int) -> range:
        """The data-parallel replicas of a team, as those of all teams are counted."""
        teams = self.strategy.teams
        before = sum(one.replicas for one in teams[:team])
        return range(before, before + teams[team].replicas)

    def beside(self, team: int) -> range:
        """The replicas that may wait for those of a team within a micro-batch."""
        return range(self.strategy.replicas) if in_step(self.strategy) else self.replicas_of(team)


TrainGraph = ExecGraph | PipelineGraph | TeamsGraph
"""What `lower` makes."""
