"""What a strategy takes on the fullest rank: state that stays, and the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.exec_graph import ExecGraph, Program
from fxpar.ir.graph import TOKENS, run_dims, run_sizes
from fxpar.ir.pipeline_graph import PipelineGraph, TeamsGraph
from fxpar.ir.sent import tokens_of
from fxpar.ir.strategy import Strategy
from fxpar.ir.teams import in_step, team_budgets
from fxpar.memory.liveness import ONE_THREAD, body_series
from fxpar.memory.parts import accumulating_graph
from fxpar.memory.pipeline import pipeline_over_time
from fxpar.memory.prediction import MemoryOverTime, MemoryPrediction, RankMemory
from fxpar.memory.series import Peak, Series
from fxpar.memory.state import home_bytes, sums_bytes
from fxpar.memory.workspace import Conditions
from fxpar.schedule.mini_batch import STAGING_BYTES, staged_bytes
from fxpar.switch.layout import layout_of


def steady_micro_batches(strategy: Strategy) -> int:
    """So many that more of them take no more memory: gradients add up, and a pipeline (but GPipe) has been full."""
    return 2 * strategy.pipeline_size


def predict_memory(
    program: Program,
    sizes: Mapping[str, int] | None = None,
    *,
    micro_batches: int | None = None,
    staging_bytes: int = STAGING_BYTES,
    conditions: Conditions = ONE_THREAD,
    cluster: ClusterSpec | None = None,
) -> MemoryPrediction:
    """Predict from a program that was lowered for a store (`lower(..., for_store=True)`), optimizer AdamW.

    `sizes` are the dynamic dims of a replica's micro-batch by name (the captured example's where missing), rounded up
    as the runtime pads them. `micro_batches` of 2 or more (default 1): later ones add to what the first has left.
    Pipeline stages keep several of them, as the schedule says; the default is then one per rank of the pp axis. On a
    `cluster` of several nodes gradients may be added up inside of each node first (by default it is one node).

    Raises DimNameError for a name that is no dynamic dim, MicroBatchCountError for a number that a schedule cannot run,
    ClusterError for a cluster with fewer devices than ranks.
    """
    return memory_over_time(
        program,
        sizes,
        micro_batches=micro_batches,
        staging_bytes=staging_bytes,
        conditions=conditions,
        cluster=cluster,
    ).prediction


def memory_over_time(
    program: Program,
    sizes: Mapping[str, int] | None = None,
    *,
    micro_batches: int | None = None,
    staging_bytes: int = STAGING_BYTES,
    conditions: Conditions = ONE_THREAD,
    cluster: ClusterSpec | None = None,
    positions: Sequence[int] | None = None,
    brief: bool = False,
) -> MemoryOverTime:
    """The prediction with all moments that it is the maximum of; arguments and errors as in `predict_memory`. Of a
    pipeline only ranks at `positions` are looked at (None: at all), and with `brief` moments are only those that may be
    the maximum.
    """
    whole, dims = run_sizes(program, sizes), run_dims(program, sizes)
    sums = 0
    if cluster is not None:
        cluster.require(program.strategy.world)
        sums = sums_bytes(program, cluster, staging_bytes)
    if isinstance(program, TeamsGraph):
        asked = {"micro_batches": micro_batches, "staging_bytes": staging_bytes, "conditions": conditions}
        return _teams_over_time(program, whole, sums, **asked)
    if isinstance(program, PipelineGraph):
        asked = micro_batches, staging_bytes, conditions, sums, positions, brief
        return pipeline_over_time(program, whole, dims, *asked)
    assert isinstance(program, ExecGraph)
    layout, count = layout_of(program), micro_batches or 1
    masters, optimizer, gradients = home_bytes(program)
    grads = [s for o, s in zip(program.outputs, program.stored_outputs, strict=True) if o.kind == "grad"]
    series = program_series(program, dims, micro_batches=count, conditions=conditions)
    found = MemoryPrediction(
        strategy=str(program.strategy),
        sizes=whole,
        micro_batches=count,
        master_bytes=masters,
        optimizer_bytes=optimizer,
        weight_bytes=layout.max_bytes(),
        home_gradient_bytes=gradients,
        gradient_bytes=sum(s.local.numel(dims) * s.local.dtype.itemsize for s in grads),
        staging_bytes=staged_bytes(layout.max_bytes(), staging_bytes) if program.strategy.world > 1 else 0,
        body=series.peak,
        sums_bytes=sums,
        tokens=tokens_of(program.inputs, dims),
    )
    return MemoryOverTime(found, (RankMemory((program.mesh.ranks[0], program.mesh.last), found, series),))


def _teams_over_time(program: TeamsGraph, sizes: Mapping[str, int], sums: int, **asked: Any) -> MemoryOverTime:
    """All teams, and the prediction for the fullest one. `sizes` are those of the largest team's micro-batches; others
    have as many tokens per rank. What lies at home is shared out among the ranks of all, and messages go among them.
    """
    masters, optimizer, gradients = home_bytes(program)
    weights = layout_of(program).max_bytes()
    home = {"master_bytes": masters, "optimizer_bytes": optimizer, "home_gradient_bytes": gradients, "sums_bytes": sums}
    home["staging_bytes"] = staged_bytes(weights, asked["staging_bytes"])
    budgets = team_budgets(program.strategy, sizes.get(TOKENS, 0))
    ranks: list[RankMemory] = []
    for number, (team, tokens) in enumerate(zip(program.teams, budgets, strict=True)):
        mine = {**sizes, TOKENS: tokens} if TOKENS in sizes else sizes
        found = memory_over_time(team, mine, **asked)
        here = found.ranks
        if in_step(program.strategy):  # the program's ranks are all, and those of the team run it
            mesh = program.mesh_of(number)
            here = tuple(replace(one, ranks=(mesh.ranks[0], mesh.last)) for one in here)
        ranks += [replace(one, prediction=replace(one.prediction, **home)) for one in here]
    fullest = max((one.prediction for one in ranks), key=lambda prediction: prediction.peak_bytes)
    return MemoryOverTime(replace(fullest, strategy=str(program.strategy)), tuple(ranks))


def program_peak(
    program: ExecGraph,
    dims: Mapping[sympy.Symbol, int],
    *,
    micro_batches: int = 1,
    conditions: Conditions = ONE_THREAD,
) -> Peak:
    """The peak of the program's body on the fullest rank: of the first and the last place on each mesh axis."""
    return program_series(program, dims, micro_batches=micro_batches, conditions=conditions).peak


def program_series(
    program: ExecGraph,
    dims: Mapping[sympy.Symbol, int],
    *,
    micro_batches: int = 1,
    conditions: Conditions = ONE_THREAD,
) -> Series:
    """What that rank holds at each call of the body; with several micro-batches in the later ones, which add up."""
    kept = tuple(i for i, node in enumerate(program.body.results) if "buffer" in node.meta)
    graph = program.body.graph if micro_batches == 1 else accumulating_graph(program.body.graph, kept)
    last = {axis: degree - 1 for axis, degree in program.strategy.axes}
    places = [{}, last] if program.strategy.world > 1 else [{}]
    return body_series(graph, dims, places, conditions, fixed=micro_batches > 1)
