"""What a strategy with pipeline stages takes: every pipeline rank runs its schedule on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from fxpar.ir.exec_graph import Stored
from fxpar.ir.pipeline_graph import PipelineGraph, StageProgram, position_of
from fxpar.ir.sent import tokens_of
from fxpar.memory.prediction import MemoryOverTime, MemoryPrediction, RankMemory, StageMemory
from fxpar.memory.state import home_bytes
from fxpar.memory.walk import RankPeak, rank_peak
from fxpar.memory.workspace import Conditions
from fxpar.schedule import Schedule, schedule, simulate
from fxpar.schedule.mini_batch import staged_bytes
from fxpar.switch.layout import layout_of


def pipeline_over_time(
    program: PipelineGraph,
    sizes: Mapping[str, int],
    dims: Mapping[sympy.Symbol, int],
    micro_batches: int | None,
    staging_bytes: int,
    conditions: Conditions,
    sums_bytes: int = 0,
    positions: Sequence[int] | None = None,
    brief: bool = False,
) -> MemoryOverTime:
    """All pipeline ranks (or those at `positions`), and the prediction for the fullest one with all their stages, and
    the most that any of them keeps on its host; `micro_batches` per replica, by default one per pipeline rank. `sizes`
    are padded; `brief` as in `rank_peak`. Raises MicroBatchCountError.
    """
    ranks = program.strategy.pipeline_size
    plan = schedule_of(program, micro_batches or ranks)
    layout, in_flight = layout_of(program), simulate(plan).peak_saved
    masters, optimizer, gradients = home_bytes(program)
    found: list[RankMemory] = []
    stages: list[StageMemory] = []
    for position in range(plan.ranks) if positions is None else positions:
        peak = pipeline_peak(program, plan, position, dims, conditions, brief)
        mine = [stage for stage in program.stages if position in plan.ranks_of(stage.index)]
        place = [rank for rank in mine[0].mesh.ranks if position_of(program, rank) == position]
        weights = layout.bytes_of_rank(place[0])
        here = MemoryPrediction(
            strategy=str(program.strategy),
            sizes=sizes,
            micro_batches=plan.micro_batches,
            master_bytes=masters,
            optimizer_bytes=optimizer,
            weight_bytes=weights,
            home_gradient_bytes=gradients,
            gradient_bytes=sum(_bytes(stage.given("grad"), dims) for stage in mine),
            staging_bytes=staged_bytes(layout.max_bytes(), staging_bytes),  # alike on all ranks
            body=peak.whole,
            schedule=str(plan),
            sums_bytes=sums_bytes,
            tokens=tokens_of(program.inputs, dims),
        )
        lines = [_stage_memory(program, stage, in_flight[stage.index], peak, dims) for stage in mine]
        stages += [replace(line, rank_peak_bytes=here.peak_bytes) for line in lines]
        found.append(RankMemory((place[0], place[-1]), here, peak.series))
    fullest = max((rank.prediction for rank in found), key=lambda prediction: prediction.peak_bytes)
    host = max(rank.prediction.body.host_bytes for rank in found)
    fullest = replace(fullest, body=replace(fullest.body, host_bytes=host))
    by_stage: dict[int, StageMemory] = {}  # where ranks share a stage, that of the fullest
    for line in sorted(stages, key=lambda stage: (stage.stage, stage.rank_peak_bytes)):
        by_stage[line.stage] = line
    whole = replace(fullest, stages=tuple(by_stage.values()))
    return MemoryOverTime(whole, tuple(found))


def equal_positions(stages: int) -> tuple[int, ...]:
    """Where ranks of a pipeline hold most whose stages between the first and the last are all alike: of those the
    second has most micro-batches under way.
    """
    return tuple(sorted({0, min(1, stages - 1), stages - 1}))


def schedule_of(program: PipelineGraph, micro_batches: int) -> Schedule:
    """The schedule of the program's strategy. Raises MicroBatchCountError."""
    strategy = program.strategy
    pipeline = strategy.pipeline
    return schedule(
        pipeline.schedule, strategy.pipeline_size, micro_batches, virtual=pipeline.virtual, places=strategy.places
    )


def pipeline_peak(
    program: PipelineGraph,
    plan: Schedule,
    position: int,
    dims: Mapping[sympy.Symbol, int],
    conditions: Conditions,
    brief: bool = False,
) -> RankPeak:
    """The peak of the ranks at `position` of the pipeline: of the first and the last place on each axis of a stage.
    `brief` as in `rank_peak`.
    """
    mesh = next(stage.mesh for stage in program.stages if position in plan.ranks_of(stage.index))
    last = {axis: degree - 1 for axis, degree in mesh.axes}
    places: list[dict[str, int]] = [{}, last] if mesh.size > 1 else [{}]
    return rank_peak(program, plan, position, dims, places, conditions, brief)


def _stage_memory(
    program: PipelineGraph, stage: StageProgram, in_flight: int, peak: RankPeak, dims: Mapping[sympy.Symbol, int]
) -> StageMemory:
    """The line of a stage, but for what its ranks hold beside it."""
    index, ranks = stage.index, stage.mesh.ranks
    return StageMemory(
        stage=index,
        ranks=(ranks[0], ranks[-1]),
        begins=program.cuts[index - 1] if index else "",
        weight_bytes=_bytes(stage.taken("param"), dims),
        gradient_bytes=_bytes(stage.given("grad"), dims),
        saved_bytes=peak.saved_bytes[index],
        in_flight=in_flight,
        received_bytes=_bytes(stage.taken("received"), dims) + _bytes(stage.taken("received_grad"), dims),
        sent_bytes=_bytes(stage.given("sent"), dims) + _bytes(stage.given("sent_grad"), dims),
        peak=peak.stages[index],
    )


def _bytes(tensors: Mapping[str, Stored], dims: Mapping[sympy.Symbol, int]) -> int:
    return sum(stored.local.numel(dims) * stored.local.dtype.itemsize for stored in tensors.values())
