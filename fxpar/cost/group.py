"""What a micro-batch costs, in three numbers per program: the sum over its calls."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from fxpar.cost.calls import NOMINAL_TOKENS, exposed_costs, handed_on_s
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.group_cost import Cost, GroupCost, TeamsCost
from fxpar.cost.polynomial import Polynomial
from fxpar.ir.exec_graph import Program
from fxpar.ir.mesh import Mesh
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph, TrainGraph
from fxpar.ir.strategy import Strategy
from fxpar.schedule import Action, Costs, schedule, simulate
from fxpar.schedule.mini_batch import FORWARD

_KEPT: dict[int, dict[ClusterSpec, Cost]] = {}  # by the identity of programs, as long as they live


def kept_cost(program: TrainGraph, cluster: ClusterSpec) -> Cost:
    """`program_cost` of a program that no pass changes any more, worked out once for as long as the program lives:
    sessions are opened again with the same ones. Raises as that does.
    """
    if id(program) not in _KEPT:
        _KEPT[id(program)] = {}
        weakref.finalize(program, _KEPT.pop, id(program))
    known = _KEPT[id(program)]
    if cluster not in known:
        known[cluster] = program_cost(program, cluster)
    return known[cluster]


def program_cost(program: TrainGraph, cluster: ClusterSpec) -> Cost:
    """`group_cost`, of teams side by side that of each. Raises as that does."""
    if isinstance(program, TeamsGraph):
        return TeamsCost(tuple(group_cost(team, cluster) for team in program.teams))
    return group_cost(program, cluster)


def group_cost(program: Program, cluster: ClusterSpec) -> GroupCost:
    """Predicted cost of one micro-batch of `program` on `cluster`, whose calls add up (`fxpar.cost.calls`); nothing
    runs, all ranks find the same. Of a pipeline it is that of the slowest ranks, with all of their stages and what
    these hand on; a replica takes longer by the bubble.

    Raises ClusterError for a cluster with fewer devices than ranks.
    """
    found = rank_costs(program, cluster).values()
    if program.strategy.places:  # a micro-batch goes through all stages before the next one
        whole = sum(found, Polynomial())
        return GroupCost(float(whole.c0), float(whole.c1), float(whole.c2), shared_by=cluster.sustained.shared_by)
    return of_strategy(found, program.strategy, cluster)


def of_strategy(positions: Iterable[Polynomial], strategy: Strategy, cluster: ClusterSpec) -> GroupCost:
    """From the seconds of each position of a pipeline, or of all ranks."""
    found, plan, shared_by = list(positions), strategy.pipeline, cluster.sustained.shared_by
    counted = max(found, key=lambda one: one.at(NOMINAL_TOKENS))
    if shared_by > 1:
        mean = sum(found, Polynomial()) * Fraction(1, len(found))
        alone = counted * (1 / Fraction(shared_by))
        counted = max(mean, alone, key=lambda one: one.at(NOMINAL_TOKENS))
    numbers = float(counted.c0), float(counted.c1), float(counted.c2)
    return GroupCost(*numbers, strategy.pipeline_size, plan.virtual, plan.schedule, shared_by)


def simulated_s(positions: Sequence[Polynomial], kind: str, runs: Sequence[Sequence[int]]) -> float:
    """Seconds of a pipeline whose positions take as long as they do, where `GroupCost` takes all for the slowest: a
    schedule of this kind, simulated, for micro-batches of sequences with these lengths. One stage per position.
    """
    seconds = [[float(one.over(lengths)) for lengths in runs] for one in positions]

    def part(share: float) -> Callable[[Action], float]:
        return lambda action: share * seconds[action.stage][action.micro_batch]

    costs = Costs(forward_ms=part(FORWARD), backward_ms=part(1 - FORWARD))
    return simulate(schedule(kind, len(positions), len(runs)), costs).makespan_ms if runs else 0.0


def rank_costs(program: Program, cluster: ClusterSpec) -> dict[Mesh, Polynomial]:
    """Seconds of a micro-batch on the ranks of each mesh of `program`: of a pipeline one per position, with all of its
    stages and what these hand on. Raises ClusterError for a cluster with fewer devices than ranks.
    """
    cluster.require(program.strategy.world)
    if not isinstance(program, PipelineGraph):
        return {program.mesh: _total(program, cluster)}
    totals: dict[Mesh, Polynomial] = {}
    for stage in program.stages:
        sent = (handed_on_s(program, stage.index, kind, cluster) for kind in ("sent", "sent_grad"))
        mine = sum(sent, _total(stage, cluster))
        totals[stage.mesh] = totals.get(stage.mesh, Polynomial()) + mine
    return totals


def _total(program: Program, cluster: ClusterSpec) -> Polynomial:
    """Seconds of all calls of a micro-batch. Those that share an object, of which there are many, are added once."""
    found = exposed_costs(program, cluster)
    counts = Counter(map(id, found))
    return sum((one * counts[key] for key, one in {id(one): one for one in found}.items()), Polynomial())
