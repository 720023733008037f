"""What fxpar predicts for this machine against what it takes: steps, switches, reductions, peak memory.

    OMP_NUM_THREADS=1 python benchmarks/bench_truth.py [--rounds 5] [--only dp4 cp4] [--tiny] [--json FILE]

4 gloo ranks measure the machine as `fxpar profile` does, then train the model of `make demo` under each strategy alone,
on mini-batches of 8,192 tokens in sequences of one length. All strategies and lengths take turns, round after round, so
that load hits all alike; a figure is the median over rounds. Nothing is fitted to the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.models import load
from fxpar.profiling.points import measured
from fxpar.profiling.record import described
from fxpar.profiling.trials import device_series, link_series
from fxpar.runtime.forked import run_forked

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
DEMO = {"layers": "3", "dim": "128", "heads": "4", "kv_heads": "2", "ffn": "352", "vocab": "4096"}
TINY = {"layers": "2", "dim": "16", "heads": "4", "kv_heads": "4", "ffn": "32", "vocab": "64"}
LENGTHS, TOKENS = (256, 1024, 2048), 8192
TINY_LENGTHS, TINY_TOKENS = (16, 32), 128
TARGETS = {"step": 0.15, "rank": 0.9, "switch": 0.3, "reduce": 0.3, "memory": 0.1}


@dataclass(frozen=True)
class Case:
    """A strategy on sequences of one length; seconds of a step and of its parts, as predicted and measured."""

    strategy: str
    length: int
    predicted_s: float
    measured_s: float
    predicted_parts_s: tuple[float, float, float]  # run, switch, reduce
    measured_parts_s: tuple[float, float, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Subject:
    """A model under one strategy on this rank."""

    def __init__(self, strategy: str, compiled: Any, options: dict[str, str], limit: int, cluster: ClusterSpec) -> None:
        model = load("llama", seed=1, options=options).model
        alone = replace(compiled, programs={strategy: compiled.programs[strategy]})
        self.model = fxpar.parallelize(
            model, strategies={limit: strategy}, compiled=alone, cluster=cluster, monitor=False
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, batch: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Seconds until all ranks have done it; seconds of run, switch and reduction on this rank."""
        dist.barrier()
        begun = time.perf_counter()
        report = self.model.train_step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        taken, (group,) = time.perf_counter() - begun, report.groups
        return taken, group.compute_s, group.switch_s, group.reduce_s

    def predicted(self, batch: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """The same as predicted, without the optimizer."""
        plan = self.model.plan(batch)
        engine = self.model.fxpar_session.engine
        (name,) = engine.names
        switch, reduce = engine.switching.predicted_s(name, []), engine.gradients.predicted_s(name)
        return plan.predicted_s, plan.groups[0].predicted_s, switch, reduce


def profiled(seconds: float) -> ClusterSpec:
    """This machine, as `fxpar profile` describes it."""
    device = torch.device("cpu")
    points = measured([*device_series(device), *link_series(device, 1)], device, seconds, lambda _: None)
    return described(points, device, 1, WORLD)


def work(compiled: Any, strategies: Sequence[str], args: argparse.Namespace) -> tuple[ClusterSpec, list[Case]]:
    """On one rank."""
    options, lengths, tokens = (TINY, TINY_LENGTHS, TINY_TOKENS) if args.tiny else (DEMO, LENGTHS, TOKENS)
    cluster = profiled(0.01 if args.tiny else 0.2)
    subjects = {name: Subject(name, compiled, options, max(lengths), cluster) for name in strategies}
    generator = torch.Generator().manual_seed(0)
    vocab = int(options["vocab"])
    batches = {
        length: [torch.randint(0, vocab, (length,), generator=generator) for _ in range(tokens // length)]
        for length in lengths
    }
    taken: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for turn in range(args.rounds + 1):
        for length, batch in batches.items():
            for name, subject in subjects.items():
                one = subject.step(batch)
                if turn:
                    taken.setdefault((name, length), []).append(one)
    found = []
    for (name, length), rows in taken.items():
        mine = torch.tensor([statistics.median(column) for column in zip(*rows, strict=True)], dtype=torch.float64)
        dist.all_reduce(mine)
        mean = (mine / WORLD).tolist()
        predicted = subjects[name].predicted(batches[length])
        optimizer = optimizer_s(subjects[name], cluster)
        found.append(Case(name, length, predicted[0] + optimizer, mean[0], tuple(predicted[1:]), tuple(mean[1:])))
    return cluster, found


def optimizer_s(subject: Subject, cluster: ClusterSpec) -> float:
    """As `fxpar plan` predicts it."""
    count = sum(p.numel() for p in subject.model.parameters()) / WORLD
    return count * 28 / float(cluster.sustained.bytes_per_s)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*ranks) if len(one) > 1 else 1.0


def report(cluster: ClusterSpec, cases: Sequence[Case]) -> dict[str, Any]:
    print(f"profile: {cluster.sustained}; {cluster.intra_gb_per_s:g} GB/s, {cluster.latency_us:g} µs")
    print(
        f"{'strategy':14} {'length':>6} {'predicted':>10} {'measured':>10} {'error':>7}   parts, predicted / measured ms"
    )
    for case in cases:
        parts = "  ".join(
            f"{name} {1e3 * a:.0f}/{1e3 * b:.0f}"
            for name, a, b in zip(
                ("run", "switch", "reduce"), case.predicted_parts_s, case.measured_parts_s, strict=True
            )
        )
        print(
            f"{case.strategy:14} {case.length:6,} {1e3 * case.predicted_s:10,.0f} {1e3 * case.measured_s:10,.0f} "
            f"{case.error:+7.1%}   {parts}"
        )
    error = statistics.mean(abs(case.error) for case in cases)
    found: dict[str, Any] = {"cluster": cluster.to_json(), "cases": [asdict(case) for case in cases], "step": error}
    print(f"mean error of a step {error:.1%} (target {TARGETS['step']:.0%})")
    for length in dict.fromkeys(case.length for case in cases):
        mine = [case for case in cases if case.length == length]
        rank = rank_correlation([c.predicted_s for c in mine], [c.measured_s for c in mine])
        found[f"rank {length}"] = rank
        print(f"rank correlation, sequences of {length:,}: {rank:.2f} (target {TARGETS['rank']})")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one round, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.rounds = 1 if args.tiny else args.rounds
    torch.set_num_threads(1)
    options = TINY if args.tiny else DEMO
    model = load("llama", seed=1, options=options).model
    limits = {max(TINY_LENGTHS if args.tiny else LENGTHS) + number: s for number, s in enumerate(args.only)}
    compiled = fxpar.compile_strategies(model, limits, fxpar.losses.causal_lm)
    cluster, cases = run_forked(WORLD, lambda _: work(compiled, args.only, args), timeout_s=3600)[0]
    found = report(cluster, cases)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
