"""Small programs, predicted steps, and steps that look as if ranks had recorded them."""

from __future__ import annotations

import functools
from typing import Any

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.runtime.spans import RunSpan
from fxpar.schedule.mini_batch import MiniBatchSchedule
from fxpar.viz.inside import Inside
from fxpar.viz.step import Planned, StepGroup, StepTimeline, measured_step, predict_step
from fxpar.viz.timeline import ShownStep
from fxpar.viz.viewed import Viewed
from tests.captured import llama

CLUSTER = ClusterSpec(1, 4, 100.0, 10.0, 10.0, device=Device(10.0, 1000.0, 4.0))
STRATEGIES = ("dp2.tp2+sp", "pp2.dp2", "dp4+zero2")


@functools.cache
def program(strategy: str) -> TrainGraph:
    return lower(llama(layers=2).graph, strategy, for_store=True)


@functools.cache
def inside(strategy: str) -> Inside:
    return Inside(program(strategy), CLUSTER)


def views(*strategies: str, tokens: int = 256, micro_batches: int = 3) -> list[Viewed]:
    sizes = {"T": tokens}
    return [
        Viewed(s, program(s), llama(layers=2).graph, program(s), CLUSTER, sizes, micro_batches)
        for s in strategies or STRATEGIES
    ]


def planned(strategy: str, *replicas: Any, switch_ms: float = 0.5, reduce_ms: float = 0.25) -> Planned:
    group = StepGroup("≤ 512", strategy, tuple(tuple(map(tuple, replica)) for replica in replicas), 1000, 2000)
    return Planned(group, inside(strategy), switch_ms, reduce_ms)


@functools.cache
def step_groups() -> list[Planned]:
    """Three groups on four ranks: unequal replicas, a pipeline, and one in lock step with an idle replica."""
    return [
        planned("dp2.tp2+sp", [[100, 20], [64]], [[90]]),
        planned("pp2.dp2", [[300], [200], [100]], [[250], [50]], switch_ms=0.0),
        planned("dp4+zero2", [[64], [64]], [[128]], [[60]], []),
    ]


def predicted(order: MiniBatchSchedule | None = None) -> StepTimeline:
    return predict_step(step_groups(), 4, optimizer_ms=0.125, order=order)


def shown_step(step: int = 7) -> ShownStep:
    """The prediction, and measured spans that are twice as long."""
    timeline = predicted()
    programs = [program(group.strategy) for group in timeline.groups]
    lane_of = {rank: lane for lane, found in enumerate(timeline.lanes) for rank in found.ranks}
    ranks = [
        [
            RunSpan(span.kind, span.group, 2 * span.start_ms, 2 * span.end_ms, span.micro_batch, span.stage)  # type: ignore[arg-type]
            for span in timeline.spans
            if span.lane == lane_of[rank]
        ]
        for rank in range(4)
    ]
    return ShownStep(f"Step {step}, the last one", timeline, measured_step(timeline.groups, ranks, programs))


def metrics(steps: int = 5) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl: two groups, of which the second runs in every second step."""
    lines = []
    for step in range(1, steps + 1):
        group = {
            "limit": 256,
            "strategy": "dp4",
            "sequences": 6,
            "tokens": 600,
            "longest": 250,
            "micro_batches": 2,
            "wall_s": 0.5,
            "switch_s": 0.0625,
            "switch_bytes": 1000,
            "reduce_s": 0.125,
            "reduce_bytes": 500,
            "predicted_s": 0.25,
            "predicted_switch_s": 0.03125,
            "predicted_reduce_s": 0.0625,
            "lengths": [[128, 4], [256, 2]],
        }
        long = {**group, "limit": 1024, "strategy": "cp4", "sequences": 1, "tokens": 1000, "lengths": [[1024, 1]]}
        groups = [group, long] if step % 2 else [group]
        lines.append(
            {
                "step": step,
                "loss": 8.0 - step / 4 if step != 2 else None,
                "sequences": sum(g["sequences"] for g in groups),
                "tokens": sum(g["tokens"] for g in groups),
                "valid_tokens": sum(g["tokens"] - g["sequences"] for g in groups),
                "lr": 1e-3 * step,
                "grad_norm": 1.5,
                "skipped": step == 2,
                "wall_s": 1.5,
                "cpu_s": 4.0,
                "engine_s": 1.2,
                "optimizer_s": 0.25,
                "groups": groups,
                "validation_loss": 7.5 if step == steps else None,
                "tokens_per_s": 400.0 + step,
            }
        )
    return lines


COMPARISON = {
    "strategy": "cp4",
    "steps": 4,
    "hot_s": 4.0,
    "static_s": 6.0,
    "hot_tokens_per_s": 900.0,
    "static_tokens_per_s": 600.0,
    "hot_cpu_ms": 16000.0,
    "static_cpu_ms": 24000.0,
    "loss_diff": 1e-6,
    "loss_diff_step": 3,
    "tolerance": 1e-3,
    "speedup": 1.5,
    "agrees": True,
}
