"""Two towers of unlike size, as CLIP has them, on 4 gloo ranks: side by side against one after the other.

    OMP_NUM_THREADS=1 python benchmarks/bench_towers.py [--steps 2] [--rounds 5] [--only paced] [--tiny] [--json OUT]

An image tower and a narrower text tower with a contrastive loss over one batch of pairs. A step is `train_step`:
weights come from home, forward and backward run, gradients go home; no optimizer. The ways, all on the same pairs:

    one after the other   each tower on all ranks, in the layout that is predicted to be the fastest
    data parallel         one strategy, which cuts the pairs over all ranks (features are gathered for the loss)
    side by side          each tower on ranks of its own, as `fxpar tasks plan` chooses

Paced, each kernel takes as long as it is priced on a device that waits for small kernels, as a GPU does for those of
CLIP at eight pairs; the two cores of this machine then do not decide, and what ranks send each other travels as ever.
Real, kernels take what they take. Figures are wall times of a step on the slowest rank, medians over rounds in which
the ways take turns, beside what was predicted. Loss and gradients of every way are compared with one device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from turns import accept, apart

import fxpar
from fxpar.cost.calls import node_costs
from fxpar.cost.cluster import ClusterSpec, usual_cluster
from fxpar.cost.device import Device
from fxpar.ir.exec_graph import Part, Program
from fxpar.ir.pipeline_graph import StageProgram, TrainGraph
from fxpar.runtime.bound import BoundGraph
from fxpar.runtime.forked import run_forked
from fxpar.runtime.pipeline import BoundPipeline
from fxpar.runtime.stage import BoundStage
from fxpar.runtime.task import CompiledModel
from fxpar.tasks import captured, plan_tasks
from fxpar.viz.inside import Inside
from fxpar.viz.step import Planned, StepGroup, predict_step

WORLD, COLOURS, VOCAB, FEATURES = 4, 48, 512, 64
ROWS = {"pixels": {0: "B"}, "ids": {0: "B"}}
AFTER, PARALLEL, BESIDE = "one after the other", "data parallel", "side by side"
# Each tower on all ranks: rules may give it another layout than the other one.
ON_ALL_RANKS = ("cp4", "tp4", "cp2.tp2", "cp4[image: tp4]", "cp4[text: tp4]", "tp4[image: cp4]")
PARALLEL_ROWS, ONE_EACH = "cp4", "dp4"
TOWERS = "cp3+zb_h1+cut(text) > cp1"  # of the tiny form
TARGET, TARGET_ERROR = 1.25, 0.15
TOLERANCE = 1e-5  # relative, float32
# A kernel takes 1 ms at least, and a product of the image tower several. So it is for CLIP ViT-B/16 at eight pairs on a
# GPU of 300 TFLOP/s, 2000 GB/s and 4 us per kernel; here kernels and device are smaller in the same proportion.
SLOW = Device(tflops=0.001, memory_gb_per_s=0.16, launch_us=1000)


@dataclass(frozen=True)
class Sizes:
    """Of the batch, and of the towers: (width, layers, tokens of a row)."""

    rows: int = 12
    image: tuple[int, int, int] = (64, 6, 16)
    text: tuple[int, int, int] = (32, 6, 8)
    device: Device = SLOW


TINY = Sizes(image=(16, 1, 4), text=(8, 1, 4), device=replace(SLOW, launch_us=200))


class Layer(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Tower(nn.Module):
    """`first` makes [B, T, D] of what there is to see, and layers a feature [B, FEATURES] of that."""

    def __init__(self, first: nn.Module, dim: int, layers: int) -> None:
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(Layer(dim) for _ in range(layers))
        self.last = nn.Linear(dim, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.last(x.mean(1)), dim=-1)


def make_model(sizes: Sizes) -> nn.Module:
    """The same weights in every way."""
    torch.manual_seed(0)
    (wide, deep, _), (narrow, layers, _) = sizes.image, sizes.text
    image = Tower(nn.Linear(COLOURS, wide), wide, deep)
    return nn.ModuleDict({"image": image, "text": Tower(nn.Embedding(VOCAB, narrow), narrow, layers)})


def contrast(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Every image against every text: a sum over rows."""
    images, texts = model["image"](batch["pixels"]), model["text"](batch["ids"])
    scores, right = 10 * images @ texts.T, torch.arange(images.shape[0])
    return (F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.T, right, reduction="sum")) / 2


def make_batch(sizes: Sizes) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    pixels = torch.randn(sizes.rows, sizes.image[2], COLOURS, generator=made)
    return {"pixels": pixels, "ids": torch.randint(0, VOCAB, (sizes.rows, sizes.text[2]), generator=made)}


# ------------------------------------------------------------------------------------------------------------- paced
class _Pacing:
    """Kernels take the seconds that are given by part and name, or longer if they do."""

    _parts: Mapping[str, Part] = {}
    _seconds: Mapping[tuple[str, str], float] = {}
    _due = 0.0

    def pace(self, parts: Mapping[str, Part], seconds: Mapping[tuple[str, str], float]) -> None:
        self._parts, self._seconds = parts, seconds
        self._compiled.clear()  # type: ignore[attr-defined]

    def call(self, name: str, operands: list[Any], **how: Any) -> list[Any]:
        self._arrived()  # a part starts now
        found = super().call(name, operands, **how)  # type: ignore[misc]
        self._wait(0.0)
        return found

    def finish_graph(self, graph: fx.Graph, part: Part) -> None:
        super().finish_graph(graph, part)  # type: ignore[misc]
        name = next((name for name, one in self._parts.items() if one is part), "")
        left = {node: seconds for (of, node), seconds in self._seconds.items() if of == name}
        for node in list(graph.nodes):
            seconds = left.pop(node.name, 0.0)
            waited = node.target == torch.ops._c10d_functional.wait_tensor.default
            if seconds or waited:
                with graph.inserting_after(node):
                    graph.call_function(self._arrived if waited else self._work, () if waited else (seconds,))
        with graph.inserting_before(graph.output_node()):  # what has another name now
            graph.call_function(self._work, (sum(left.values()),))

    def _arrived(self) -> None:
        """Kernels behind a transfer start when it has ended."""
        self._due = max(self._due, time.perf_counter())

    def _work(self, seconds: float) -> None:
        self._due += seconds
        self._wait(1e-3)

    def _wait(self, least: float) -> None:
        left = self._due - time.perf_counter()
        if left > least:
            time.sleep(left)


class _PacedGraph(_Pacing, BoundGraph): ...


class _PacedStage(_Pacing, BoundStage): ...


def pace(engine: Any, cluster: ClusterSpec, rows: int) -> None:
    """Let the kernels of an engine's programs take what they are priced."""
    for name, bound in list(engine.bound.items()):
        if isinstance(bound, BoundPipeline):
            for index, stage in bound.stages.items():
                bound.stages[index] = _paced(_PacedStage, stage, cluster, rows)
        else:
            engine.bound[name] = _paced(_PacedGraph, bound, cluster, rows)


def _paced(kind: Any, bound: Any, cluster: ClusterSpec, rows: int) -> Any:
    found = kind(bound.program, bound.rank, bound._groups)
    parts = _parts(bound.program)
    costs = node_costs(bound.program, cluster, parts=parts)
    found.pace(parts, {(cost.part, cost.name): float(cost.seconds.at(rows)) for cost in costs if not cost.axis})
    return found


def _parts(program: Program) -> dict[str, Part]:
    """All that may run, by name."""
    if not isinstance(program, StageProgram):
        return dict(program.parts)
    names = ("prologue", "forward", "early", "late", "backward", "input_part", "weight_part", "epilogue")
    return {name: part for name in names if (part := getattr(program, name)) is not None}


# ----------------------------------------------------------------------------------------------------------- measuring
@dataclass(frozen=True)
class Way:
    """A strategy of the task, captured and lowered before ranks are forked."""

    strategy: str
    compiled: CompiledModel

    @property
    def program(self) -> TrainGraph:
        return self.compiled.programs[self.strategy]


def compiled(sizes: Sizes, strategies: Sequence[str]) -> dict[str, Way]:
    """By strategy; captured once."""
    numbered = {number + 1: strategy for number, strategy in enumerate(strategies)}  # the limits say nothing
    found = fxpar.compile_task(make_model(sizes), _task(sizes, numbered))
    return {name: Way(name, replace(found, programs={name: one})) for name, one in found.programs.items()}


def _task(sizes: Sizes, strategies: Mapping[int, str], **more: Any) -> fxpar.Task:
    return fxpar.Task(contrast, make_batch(sizes), strategies=strategies, dynamic=ROWS, **more)


def cluster_of(device: Device | None) -> ClusterSpec:
    """All ranks on one node, of this machine's kind unless it says another device."""
    usual = usual_cluster(WORLD, WORLD, "cpu")
    return usual if device is None else replace(usual, device=device)


def planned(sizes: Sizes, cluster: ClusterSpec) -> tuple[str, float]:
    """The strategy of the shortest step that a run can follow, and its predicted ms."""
    step = captured(make_model(sizes), fxpar.Task(contrast, make_batch(sizes), dynamic=ROWS))
    found = plan_tasks({"pairs": step}, cluster).runs
    assert found is not None
    return found.runs[0].option.strategy, found.ms


def fastest(ways: Sequence[Way], cluster: ClusterSpec, rows: int) -> Way:
    """The one whose step is predicted to be the shortest, weights and gradients aside."""
    return min(ways, key=lambda way: step_ms(way.program, cluster, rows))


def step_ms(program: TrainGraph, cluster: ClusterSpec, rows: int, batches: int = 1, moved_s: float = 0.0) -> float:
    """Predicted, as a run's report predicts it; `moved_s` is for weights and gradients."""
    replicas = program.strategy.replicas
    group = StepGroup("", str(program.strategy), (((rows,),) * (batches // replicas),) * replicas)
    planned = Planned(group, Inside(program, cluster), 1e3 * moved_s)
    return predict_step([planned], WORLD).end_ms


def measure(
    ways: Sequence[Way], sizes: Sizes, device: Device | None, steps: int, rounds: int
) -> dict[str, dict[str, float]]:
    """On one rank: wall ms of a step, median over rounds, and those predicted, by strategy; all kernels paced on
    `device`, if there is one.
    """
    cluster, batch = cluster_of(device), make_batch(sizes)
    runs, found = {}, {}
    for name, way in {way.strategy: way for way in ways}.items():
        task = _task(sizes, {sizes.rows: way.strategy}, compiled=way.compiled)
        model = fxpar.parallelize(make_model(sizes), tasks={"pairs": task}, cluster=cluster, monitor=False)
        engine, run = model.fxpar_session.engine, partial(model.train_step, {"pairs": [batch]})
        if device is not None:
            pace(engine, cluster, sizes.rows)
        run()  # connects ranks, compiles
        for parameter in model.parameters():
            parameter.grad = None
        _check(name, run().loss, model, sizes)
        (full,) = engine.names
        moved_s = engine.switching.predicted_s(full, []) + engine.gradients.predicted_s(full)
        found[name] = {"predicted_ms": step_ms(way.program, cluster, sizes.rows, moved_s=moved_s)}
        runs[name] = run
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                run()
            dist.barrier()
            taken[name].append(1e3 * (time.perf_counter() - begun) / steps)
    return {name: {"measured_ms": statistics.median(taken[name]), **one} for name, one in found.items()}


def _check(name: str, loss: float, model: Any, sizes: Sizes) -> None:
    """Raises SystemExit if a step is not that of one device."""
    plain, batch = make_model(sizes), make_batch(sizes)
    expected = contrast(plain, batch) / sizes.rows
    expected.backward()
    accept(f"the loss of {name}", abs(loss / float(expected.detach()) - 1), TOLERANCE)
    for (fqn, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        accept(f"{name}: the gradient of {fqn}", apart(mine.grad.full_tensor(), theirs.grad), 10 * TOLERANCE)


def show(kind: str, found: Mapping[str, Mapping[str, float]]) -> bool:
    """Print a line per way; are all targets met?"""
    print(f"{kind:22}{'measured':>12}{'predicted':>12}{'error':>8}  strategy")
    for name, one in found.items():
        measured, predicted = one["measured_ms"], one["predicted_ms"]
        error = predicted / measured - 1
        print(f"{name:22}{measured:9.1f} ms{predicted:9.1f} ms{error:8.1%}  {one['strategy']}")
    good = True
    for other in (AFTER, PARALLEL):
        gain, expected = (found[other][key] / found[BESIDE][key] for key in ("measured_ms", "predicted_ms"))
        error = expected / gain - 1
        print(f"{BESIDE}: {gain:.2f} times as fast as {other}, predicted {expected:.2f} ({error:+.1%})")
        good &= gain >= TARGET and abs(error) <= TARGET_ERROR
    return good


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("paced", "real"))
    parser.add_argument("--tiny", action="store_true", help="tiny towers, one step, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = TINY if args.tiny else Sizes()
    if args.tiny:
        args.steps = args.rounds = 1
    everywhere = [PARALLEL_ROWS] if args.tiny else ON_ALL_RANKS
    kinds = [args.only] if args.only else ["paced"] if args.tiny else ["paced", "real"]
    devices = {kind: sizes.device if kind == "paced" else None for kind in kinds}
    plans = {} if args.tiny else {kind: planned(sizes, cluster_of(device)) for kind, device in devices.items()}
    towers = {kind: plans[kind][0] if kind in plans else TOWERS for kind in devices}
    lowered = compiled(sizes, list(dict.fromkeys([*everywhere, *towers.values(), ONE_EACH])))
    found: dict[str, Any] = {"load1": os.getloadavg()[0]}
    for kind, device in devices.items():
        ways = {
            AFTER: fastest([lowered[one] for one in everywhere], cluster_of(device), sizes.rows),
            PARALLEL: lowered[PARALLEL_ROWS],
            BESIDE: lowered[towers[kind]],
        }
        work = partial(measure, list(ways.values()), sizes, device, args.steps, args.rounds)
        taken = run_forked(WORLD, lambda _, work=work: work(), timeout_s=1200)[0]
        found[kind] = {name: {"strategy": way.strategy, **taken[way.strategy]} for name, way in ways.items()}
        good = show(kind, found[kind])
        if kind in plans:
            print(f"fxpar tasks plan says {plans[kind][1]:.1f} ms for {BESIDE}")
        if kind == "paced":
            print(f"targets: {TARGET} times as fast or more, predicted within {TARGET_ERROR:.0%}: {good}")
            each, beside = (
                step_ms(lowered[one].program, cluster_of(device), sizes.rows, WORLD) for one in (ONE_EACH, towers[kind])
            )
            print(f"of {WORLD} batches, {ONE_EACH} is predicted to take {each:.0f} ms, {towers[kind]} {beside:.0f} ms")
    (wide, deep, patches), (narrow, layers, words) = sizes.image, sizes.text
    print(
        f"{sizes.rows} pairs; image tower {deep} layers of width {wide}, {patches} patches; text tower {layers} layers "
        f"of width {narrow}, {words} tokens; {WORLD} ranks, load {found['load1']:.1f}, torch {torch.__version__}"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
