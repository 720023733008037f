"""What fxpar predicts for this machine against what it takes: steps, switches, reductions, peak memory.

    OMP_NUM_THREADS=1 python benchmarks/bench_truth.py [--rounds 5] [--modules] [--only dp4 cp4] [--tiny] [--json FILE]

4 gloo ranks measure the machine as `fxpar profile` does, then train the model of `make demo` under each strategy alone,
on mini-batches of 8,192 tokens in sequences of one length. All strategies and lengths take turns, round after round, so
that load hits all alike; a figure is the median over rounds. Nothing is fitted to the steps. With `--modules` they are
strategies whose modules or stages differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.models import load
from fxpar.profiling.points import Point, measured
from fxpar.profiling.record import described
from fxpar.profiling.trials import device_series, link_series
from fxpar.runtime.forked import run_forked
from fxpar.search.price import ADAM_BYTES
from fxpar.switch.terms import gradient_placements

WORLD = 4
STRATEGIES = (
    "dp4",
    "dp4+zero3",
    "dp4+remat",
    "dp2.tp2+sp",
    "dp2.cp2",
    "dp2.pp2",
    "tp4",
    "tp4+sp",
    "cp4",
    "cp2.tp2+sp",
    "pp2.tp2+sp",
    "pp2.cp2",
)
BY_MODULE = (
    "tp4+sp[*.attention: cp2.tp2]",
    "tp4+sp[*.attention: rows4]",
    "cp4[*.ffn: tp4+sp; head: tp4]",
    "dp2.tp2+sp[*.attention: rows2]",
    "dp4[layers.{0-1}: +remat; head: +zero3]",
    "tp2+sp > rows2",
)
DEMO = {"layers": "3", "dim": "128", "heads": "4", "kv_heads": "2", "ffn": "352", "vocab": "4096"}
TINY = {"layers": "2", "dim": "16", "heads": "4", "kv_heads": "4", "ffn": "32", "vocab": "64"}
LENGTHS, TOKENS = (256, 1024, 2048), 8192
TINY_LENGTHS, TINY_TOKENS = (16, 32), 128
TARGETS = {"step": 0.15, "rank": 0.9, "switch": 0.3, "reduce": 0.3, "memory": 0.1}


@dataclass(frozen=True)
class Seconds:
    """Of a step, and what it is made of; `busy`: CPU time of all ranks over cores, None as predicted."""

    step: float
    run: float
    switch: float
    reduce: float
    busy: float | None = None


@dataclass(frozen=True)
class Case:
    """A strategy on sequences of one length."""

    strategy: str
    length: int
    predicted: Seconds
    measured: Seconds

    def error(self, part: str) -> float:
        return getattr(self.predicted, part) / getattr(self.measured, part) - 1


class Subject:
    """A model under one strategy on this rank."""

    def __init__(self, strategy: str, compiled: Any, options: dict[str, str], limit: int, cluster: ClusterSpec) -> None:
        model = load("llama", seed=1, options=options).model
        alone = replace(compiled, programs={strategy: compiled.programs[strategy]})
        self.cluster = cluster
        self.model = fxpar.parallelize(
            model, strategies={limit: strategy}, compiled=alone, cluster=cluster, monitor=False
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, batch: Sequence[Tensor]) -> Seconds:
        """Of this rank; until all ranks have done it. The switch and the reduction are those of `borders`."""
        switch_s, reduce_s = self.borders()
        dist.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        report = self.model.train_step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        taken, (group,) = time.perf_counter() - begun, report.groups
        busy = (time.process_time() - cpu) * WORLD / min(WORLD, os.cpu_count() or 1)
        return Seconds(taken, group.compute_s, switch_s, reduce_s, busy)

    def borders(self) -> tuple[float, float]:
        """Of a switch from home and a reduction to it, alone: predictions count from when all ranks begin, and in a
        step an early rank has sent its part before the others.
        """
        engine, found = self.model.fxpar_session.engine, list[float]()
        (name,) = engine.names
        rank, terms = dist.get_rank(), gradient_placements(engine.gradients.programs[name])
        mine = {fqn: next((one for one in each if rank in one.dist.mesh), None) for fqn, each in terms.items()}
        grads = {fqn: torch.zeros(one.dist.local_shape(one.shape), dtype=one.dtype) for fqn, one in mine.items() if one}
        for work in (lambda: engine.switching.to(name, []), lambda: engine.gradients.add(name, grads)):
            dist.barrier()
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
        return found[0], found[1]

    def predicted(self, batch: Sequence[Tensor]) -> Seconds:
        """As `fxpar plan` predicts it."""
        plan, engine = self.model.plan(batch), self.model.fxpar_session.engine
        (name,) = engine.names
        moved = sum(p.numel() for p in self.model.parameters()) / WORLD * ADAM_BYTES
        optimizer_s = moved / float(self.cluster.sustained.bytes_per_s)
        switch, reduce = engine.switching.predicted_s(name, []), engine.gradients.predicted_s(name)
        return Seconds(plan.predicted_s + optimizer_s, plan.groups[0].predicted_s, switch, reduce)


def profiled(passes: Sequence[Sequence[Point]]) -> ClusterSpec:
    """This machine, from what `fxpar profile` measured several times: the median of each point that all have."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for one in passes:
        for point in one:
            found.setdefault((point.kind, point.of, point.size), []).append(point)
    points = [
        replace(same[0], seconds=statistics.median(point.seconds for point in same))
        for same in found.values()
        if len(same) == len(passes)
    ]
    return described(points, torch.device("cpu"), 1, WORLD)


def points_now(seconds: float, most: int | None) -> list[Point]:
    """What `fxpar profile` measures, at most so many points of a kind; about so many seconds for each."""
    device = torch.device("cpu")
    series = [islice(one, most) for one in (*device_series(device), *link_series(device, 1))]
    return measured(series, device, seconds, lambda _: None)


def work(
    compiled: Any, strategies: Sequence[str], args: argparse.Namespace
) -> tuple[ClusterSpec, list[Case], dict[str, tuple[int, int]]]:
    """On one rank: all strategies and lengths in turns, `fxpar profile` before, between and behind them; by strategy
    the bytes, predicted and measured, that a step of the longest sequences takes above what stays, on the fullest rank.
    """
    options, lengths, tokens = (TINY, TINY_LENGTHS, TINY_TOKENS) if args.tiny else (DEMO, LENGTHS, TOKENS)
    seconds, most, draw = *((0.01, 3) if args.tiny else (0.15, None)), torch.Generator().manual_seed(0)
    passes = [points_now(seconds, most)]

    def opened() -> dict[str, Subject]:
        cluster = profiled(passes)
        return {name: Subject(name, compiled, options, max(lengths), cluster) for name in strategies}

    batches = {n: torch.randint(0, int(options["vocab"]), (tokens // n, n), generator=draw) for n in lengths}
    subjects, taken = opened(), dict[tuple[str, int], list[Seconds]]()
    for turn in range(args.rounds + 1):
        for length, batch in batches.items():
            for name, subject in subjects.items():
                one = subject.step(list(batch))
                if turn:
                    taken.setdefault((name, length), []).append(one)
        if turn in (args.rounds // 2, args.rounds):
            passes.append(points_now(seconds, most))
    subjects, memory = opened(), dict[str, tuple[int, int]]()  # predictions by all of the profile
    longest = 2 * list(batches[max(lengths)])  # two micro-batches or more under each: gradients add up, as predicted
    for name, subject in subjects.items():
        subject.step(longest)  # what stays is there
        peak = torch.tensor(least_peak_bytes(lambda: subject.model.train_step(longest)))  # noqa: B023 (runs at once)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        report = subject.model.memory
        memory[name] = report.activation_bytes + report.gradient_bytes, int(peak)
    cases = [
        Case(name, length, subjects[name].predicted(list(batches[length])), _over_ranks(rows))
        for (name, length), rows in taken.items()
    ]
    return profiled(passes), cases, memory


def _over_ranks(rows: Sequence[Seconds]) -> Seconds:
    """The median over rounds of the mean over ranks; of a switch and a reduction, which all ranks begin together, the
    last rank to end counts.
    """
    mine = torch.tensor([astuple(one) for one in rows], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(ranks, mine)
    by_rank = torch.stack(ranks)
    found = by_rank.mean(0)
    found[:, 2:4] = by_rank.max(0).values[:, 2:4]
    return Seconds(*found.quantile(0.5, 0).tolist())


def least_peak_bytes(run: Callable[[], object], runs: int = 3) -> int:
    """The least `peak_bytes` of some runs: what it may get wrong only adds to it."""
    return min(peak_bytes(run) for _ in range(runs))


def peak_bytes(run: Callable[[], object]) -> int:
    """By how much what the process has allocated rises at most, from the events of torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((one for one in events if one.get("name") == "[memory]"), key=lambda one: one["ts"])
    return most_bytes((one["args"]["Addr"], one["args"]["Bytes"]) for one in memory)


def most_bytes(events: Iterable[tuple[int, int]]) -> int:
    """The most bytes that live at one time, above those before; an event is an address and the bytes that are allocated
    there, or minus those that are freed.

    torch's profiler does not see what another thread frees, as gloo's do with the tensors of a message that ends late.
    So its own running total is not used: who is given memory that another tensor has shows that this one is gone.
    """
    starts, ends, total, most = list[int](), list[int](), 0, 0  # of live tensors, ascending
    for start, nbytes in events:
        gone = slice(bisect_right(ends, start), bisect_left(starts, start + abs(nbytes)))
        if nbytes < 0 and gone.start == gone.stop:
            total += nbytes  # it was there before
            continue
        total -= sum(ends[gone]) - sum(starts[gone])
        starts[gone], ends[gone] = ([start], [start + nbytes]) if nbytes > 0 else ([], [])
        total += max(nbytes, 0)
        most = max(most, total)
    return most


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*ranks) if len(one) > 1 else 1.0


def report(cluster: ClusterSpec, cases: Sequence[Case], memory: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Print a line per case, and how far off predictions are."""
    print(f"profile: {cluster.sustained}; {cluster.intra_gb_per_s:g} GB/s, {cluster.latency_us:g} µs")
    wide = max(14, *(len(case.strategy) for case in cases))
    print("ms, predicted / measured; busy: CPU time of all ranks over cores")
    title = f"{'strategy':{wide}} {'length':>6} {'step':>13} {'error':>7} {'busy':>6}"
    print(f"{title} {'run':>13} {'switch':>9} {'reduce':>9}")
    for case in cases:
        pairs = [
            f"{1e3 * getattr(case.predicted, part):,.0f} / {1e3 * getattr(case.measured, part):,.0f}"
            for part in ("step", "run", "switch", "reduce")
        ]
        busy = 1e3 * (case.measured.busy or 0.0)
        print(
            f"{case.strategy:{wide}} {case.length:6,} {pairs[0]:>13} {case.error('step'):+7.1%} {busy:6,.0f} "
            f"{pairs[1]:>13} {pairs[2]:>9} {pairs[3]:>9}"
        )
    found: dict[str, Any] = {"cluster": cluster.to_json(), "cases": [asdict(case) for case in cases]}
    for part in ("step", "switch", "reduce"):
        moving = [case for case in cases if case.predicted.switch > 0]  # ZeRO-3 moves weights in its runs
        found[part] = statistics.mean(abs(case.error(part)) for case in (cases if part == "step" else moving) or cases)
        print(f"mean error of a {part}: {found[part]:.1%} (target {TARGETS[part]:.0%})")
    for length in dict.fromkeys(case.length for case in cases):
        mine = [case for case in cases if case.length == length]
        found[f"rank {length}"] = rank_correlation(
            [case.predicted.step for case in mine], [case.measured.step for case in mine]
        )
        print(f"rank correlation at {length:,} tokens: {found[f'rank {length}']:.2f} (target {TARGETS['rank']})")
    print("peak of a step above what stays, MB, predicted / measured:")
    for name, (predicted, taken) in memory.items():
        print(f"{name:{wide}} {predicted / 1e6:6.1f} / {taken / 1e6:6.1f} {predicted / taken - 1:+7.1%}")
    found["memory"] = max(abs(predicted / taken - 1) for predicted, taken in memory.values())
    print(f"largest error of a peak: {found['memory']:.1%} (target {TARGETS['memory']:.0%})")
    return found | {"memory_bytes": memory}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modules", action="store_true", help="strategies whose modules or stages differ")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one round, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.rounds = 1 if args.tiny else args.rounds
    args.only = args.only or list(BY_MODULE if args.modules else STRATEGIES)
    torch.set_num_threads(1)
    options = TINY if args.tiny else DEMO
    model = load("llama", seed=1, options=options).model
    limits = {max(TINY_LENGTHS if args.tiny else LENGTHS) + number: s for number, s in enumerate(args.only)}
    compiled = fxpar.compile_strategies(model, limits, fxpar.losses.causal_lm)
    cluster, cases, memory = run_forked(WORLD, lambda _: work(compiled, args.only, args), timeout_s=3600)[0]
    found = report(cluster, cases, memory)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
