"""What the engine adds to its graphs, switches and reductions: planning, packing, bookkeeping.

    OMP_NUM_THREADS=1 python benchmarks/bench_engine.py [--steps 8] [--tiny] [--json FILE]

4 gloo ranks train a small Llama on sequences of long-tailed lengths under three strategies. CPU milliseconds are summed
over ranks; "parts" are the calls of BoundGraph, Switch and Reduction, timed one by one in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fxpar
from fxpar.models import load
from fxpar.runtime.forked import run_forked

STRATEGIES = {256: "dp4", 1024: "dp2.tp2+sp", 4096: "cp4"}
OPTIONS = {"layers": "4", "dim": "256", "heads": "8", "kv_heads": "4", "ffn": "704", "vocab": "4096"}
TINY = {"layers": "1", "dim": "32", "heads": "4", "kv_heads": "4", "ffn": "64", "vocab": "4096"}
TOKENS, TINY_TOKENS = 12_000, 1_500  # of a mini-batch


def mini_batch(seed: int, tokens: int) -> list[torch.Tensor]:
    """Log-normal lengths, as text has them."""
    generator = torch.Generator().manual_seed(seed)
    found, total = [], 0
    while total < tokens:
        length = int(torch.empty(1).log_normal_(5.0, 1.1, generator=generator).clamp(8, 4000))
        found.append(torch.randint(0, 4096, (length,), generator=generator))
        total += length
    return found


class Clock:
    """CPU and wall seconds inside of wrapped methods."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0

    def wrap(self, owner: object, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args, **kwargs):
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.cpu_s += time.process_time() - cpu
                self.wall_s += time.perf_counter() - wall

        setattr(owner, name, timed)


def run(model: torch.nn.Module, batches: list[list[torch.Tensor]], compiled) -> dict[str, float]:
    """Of one rank, per step after two that compile switches and reductions."""
    model = fxpar.parallelize(model, strategies=STRATEGIES, compiled=compiled, merge=False, overlap=False)
    steps = len(batches) - 2
    for batch in batches[:2]:
        model.train_step(batch)
    clock, engine = Clock(), model._session().engine
    for bound in engine.bound.values():
        for name in ("prepare", "run", "skip", "finish"):
            clock.wrap(bound, name)
    clock.wrap(engine.switching, "to")
    clock.wrap(engine.gradients, "add")
    cpu, wall = time.process_time(), time.perf_counter()
    for batch in batches[2:]:
        model.train_step(batch)
    return {
        "step_cpu_ms": (time.process_time() - cpu) / steps * 1e3,
        "step_wall_ms": (time.perf_counter() - wall) / steps * 1e3,
        "parts_cpu_ms": clock.cpu_s / steps * 1e3,
        "parts_wall_ms": clock.wall_s / steps * 1e3,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="one layer, one short step, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    options, steps, tokens = (TINY, 1, TINY_TOKENS) if args.tiny else (OPTIONS, args.steps, TOKENS)
    model = load("llama", seed=1, options=options).model
    batches = [mini_batch(seed, tokens) for seed in range(steps + 2)]
    compiled = fxpar.compile_strategies(model, STRATEGIES, fxpar.losses.causal_lm)
    ranks = run_forked(4, lambda _: run(model, batches, compiled), timeout_s=3600)
    total = {key: sum(r[key] for r in ranks) for key in ranks[0]}
    overhead = total["step_cpu_ms"] / total["parts_cpu_ms"] - 1
    print(f"step            {total['step_cpu_ms']:9.1f} CPU ms, all ranks   {ranks[0]['step_wall_ms']:8.1f} ms wall")
    print(f"graphs+switches {total['parts_cpu_ms']:9.1f} CPU ms, all ranks   {ranks[0]['parts_wall_ms']:8.1f} ms wall")
    print(f"overhead        {overhead:9.1%} of CPU (target 5 %)")
    if args.json:
        args.json.write_text(json.dumps({**total, "overhead": overhead}))


if __name__ == "__main__":
    main()
