"""The strategies that fxpar chooses for the run of `make demo`, against sets made by hand: seconds of the same steps.

    OMP_NUM_THREADS=1 python benchmarks/bench_plan.py [--rounds 8] [--tiny] [--json FILE]

4 gloo ranks measure the machine as `fxpar profile` does; `strategies = "auto"` chooses for it, as in `fxpar train`. All
sets then train the same mini-batches in turns, so that load hits all alike; a figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_truth import WORLD, points_now, profiled
from torch import Tensor

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.strategy import Strategy
from fxpar.runtime.forked import run_forked
from fxpar.search.plan_file import Plan
from fxpar.train.auto import search_plan
from fxpar.train.config import TrainConfig, parse_config
from fxpar.train.demo import DEMO
from fxpar.train.model import build_model
from fxpar.train.text import Prepared, make_loader, open_tokens, prepare

BY_HAND = {
    "one strategy, dp": {2048: "dp4"},
    "one strategy, tp": {2048: "dp2.tp2+sp"},
    "that of make demo": {256: "dp4", 1024: "dp2.pp2", 2048: "cp4"},
    "dp, then cp": {512: "dp4", 2048: "dp2.cp2"},
    "dp, then tp": {512: "dp4", 1024: "dp2.tp2+sp", 2048: "tp4+sp"},
    "dp, then ZeRO": {1024: "dp4", 2048: "dp4+zero3"},
}
TINY = """
[model]
name = "llama"
options = { layers = 1, dim = 16, heads = 4, kv_heads = 4, ffn = 32 }
[data]
source = "benchmarks"
glob = "*.py"
vocab = 300
max_length = 64
overlong = "truncate"
batch_tokens = 512
validation = 1
"""
TARGET = 1.05  # of the best set made by hand
CHOSEN = "chosen"
Strategies = dict[int, str]


def configured(tiny: bool) -> TrainConfig:
    """The run of `make demo`, or a tiny one on the text of the benchmarks."""
    text = TINY.replace("benchmarks", str(Path(__file__).parent)) if tiny else DEMO
    return parse_config(text, "bench_plan", "demo", ["strategies=auto", f"run.ranks={WORLD}"])


def mini_batches(config: TrainConfig, prepared: Prepared, count: int) -> list[list[Tensor]]:
    """The first ones that the run reads."""
    tokens, _ = open_tokens(prepared, config.data.validation)
    return list(islice(make_loader(tokens, config, prepared.vocab_size), count))


class Subject:
    """The model of the run under one set on this rank. Sets made by hand pack as many tokens as the chosen one may."""

    def __init__(
        self, config: TrainConfig, prepared: Prepared, strategies: Strategies, compiled: Any, **options: Any
    ) -> None:
        loaded = build_model(config, prepared.vocab_size, prepared.tokenizer)
        names = {str(Strategy.parse(text)) for text in strategies.values()}
        alone = replace(compiled, programs={name: compiled.programs[name] for name in names})
        options = {"strategies": strategies, "merge": False, **options}
        self.model: Any = fxpar.parallelize(loaded.model, loss=loaded.loss_fn, compiled=alone, monitor=False, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, batch: Sequence[Tensor]) -> float:
        """Wall seconds, until all ranks have done it."""
        dist.barrier()
        begun = time.perf_counter()
        self.model.train_step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - begun


def work(
    config: TrainConfig,
    prepared: Prepared,
    cluster: ClusterSpec,
    sets: Mapping[str, Strategies],
    budgets: Mapping[int, int],
    compiled: Any,
    batches: Sequence[Sequence[Tensor]],
) -> dict[str, dict[str, float]]:
    """On one rank: median seconds of a step by set, and what their mini-batches are predicted to take."""
    subjects = {
        name: Subject(
            config,
            prepared,
            strategies,
            compiled,
            cluster=cluster,
            **({"token_budget": dict(budgets)} if name == CHOSEN else {}),
        )
        for name, strategies in sets.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in sets}
    predicted: dict[str, list[float]] = {name: [] for name in sets}
    for turn, batch in enumerate(batches):
        for name, subject in subjects.items():
            seconds = subject.step(batch)
            if turn:  # the first one sets up
                taken[name].append(seconds)
                predicted[name].append(subject.model.plan(batch).predicted_s)
    return {
        name: {"measured_s": statistics.median(taken[name]), "predicted_s": statistics.median(predicted[name])}
        for name in sets
    }


def show(found: Mapping[str, Mapping[str, float]], sets: Mapping[str, Strategies]) -> dict[str, Any]:
    """Print a line per set, the fastest first."""
    best = min(one["measured_s"] for name, one in found.items() if name != CHOSEN)
    print(f"{'set':20} {'seconds':>8} {'of best':>8} {'predicted':>10}  strategies")
    for name, one in sorted(found.items(), key=lambda item: item[1]["measured_s"]):
        text = ", ".join(f"<={limit} {strategy}" for limit, strategy in sets[name].items())
        ratio = one["measured_s"] / best
        print(f"{name:20} {one['measured_s']:8.3f} {ratio:8.2f} {one['predicted_s']:10.3f}  {text}")
    ratio = found[CHOSEN]["measured_s"] / best
    print(f"the chosen set takes {ratio:.2f} of the time of the best made by hand (target <= {TARGET})")
    return {"sets": {name: {**found[name], "strategies": sets[name]} for name in found}, "ratio": ratio}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="mini-batches, behind one that sets up")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one round, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config, rounds = configured(args.tiny), 1 if args.tiny else args.rounds
    prepared = prepare(config.data, lambda _: None)
    trial = (0.01, 3) if args.tiny else (0.15, None)
    cluster = profiled([run_forked(WORLD, lambda _: points_now(*trial), timeout_s=600)[0]])
    begun = time.process_time()
    config = replace(config, engine=replace(config.engine, cluster=cluster.to_json()))
    plan: Plan = search_plan(config, prepared, torch.device("cpu"))
    print(f"{CHOSEN} in {time.process_time() - begun:.1f} CPU s, {plan.predicted_s:.3f} s a step predicted")
    sets = {CHOSEN: plan.strategies, **(dict(list(BY_HAND.items())[:2]) if args.tiny else BY_HAND)}
    every = {number + 1: text for number, text in enumerate(sorted({s for one in sets.values() for s in one.values()}))}
    loaded = build_model(config, prepared.vocab_size, prepared.tokenizer)
    compiled = fxpar.compile_strategies(loaded.model, every, loaded.loss_fn)
    batches = mini_batches(config, prepared, rounds + 1)
    found = run_forked(
        WORLD,
        lambda _: work(config, prepared, cluster, sets, plan.token_budgets, compiled, batches),
        timeout_s=3600,
    )[0]
    result = show(found, sets)
    if args.json:
        args.json.write_text(json.dumps({**result, "cluster": cluster.to_json()}, indent=1))


if __name__ == "__main__":
    main()
