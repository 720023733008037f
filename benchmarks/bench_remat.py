"""Recomputation on one rank: what is saved for the backward, the peak of a step, and its time.

    OMP_NUM_THREADS=1 python benchmarks/bench_remat.py [--layers 12] [--tokens 512] [--tiny] [--json OUT]

Bytes are predicted from the graph (tests/memory compares them with a run). Times are CPU seconds of one step, the
least of several, strategies in turn. Targets: with `remat` at most 1/6 of the bytes saved, at most 1.4 times the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fxpar.lowering import lower
from fxpar.memory import program_peak
from fxpar.models import load
from fxpar.runtime import bind
from fxpar.tracer import capture

SAVED, TIME = 1 / 6, 1.4


def strategies(none_bytes: int) -> list[str]:
    """What is compared; budgets of a half and a quarter of what is saved without recomputation."""
    budgets = [f"dp1+remat({none_bytes // part}B)" for part in (2, 4)]
    return ["dp1", "dp1+remat", "dp1+remat(selective)", "dp1+remat(*.ffn)", *budgets]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="two layers, few tokens, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.tokens, args.repeats = 2, 32, 1
    torch.set_num_threads(1)
    options = {"layers": args.layers, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 688, "vocab": 1024}
    model = load("llama", options={k: str(v) for k, v in options.items()}, tokens=(args.tokens,))
    logical = capture(model.model, model.loss_fn, model.example_batch)
    dims = logical.example_dims()
    found = {}
    bound = {}
    for name in strategies(program_peak(lower(logical, "dp1"), dims).saved_bytes):
        begun = time.process_time()
        program = lower(logical, name)
        lower_s = time.process_time() - begun
        peak = program_peak(program, dims)
        found[name] = {"saved_bytes": peak.saved_bytes, "peak_bytes": peak.total_bytes, "lower_cpu_s": lower_s}
        bound[name] = bind(program, 0, {})
    for name, step in bound.items():
        _step(step, model)
        found[name]["step_cpu_s"] = float("inf")
    for _ in range(args.repeats):
        for name, step in bound.items():
            found[name]["step_cpu_s"] = min(found[name]["step_cpu_s"], _step(step, model))
    report(found)
    if args.json:
        args.json.write_text(json.dumps(found))


def _step(step, model) -> float:
    step.prepare(model.params(), model.buffers())
    begun = time.process_time()
    step.run(model.example_batch, 1.0)
    return time.process_time() - begun


def report(found: dict) -> None:
    none = found["dp1"]
    for name, one in found.items():
        saved, peak, seconds = (one[key] / none[key] for key in ("saved_bytes", "peak_bytes", "step_cpu_s"))
        print(
            f"{name:26} saved {one['saved_bytes'] / 1e6:7.1f} MB ({saved:.3f})  peak {one['peak_bytes'] / 1e6:7.1f} MB "
            f"({peak:.3f})  step {one['step_cpu_s'] * 1e3:6.0f} ms ({seconds:.2f}x)  lower {one['lower_cpu_s']:.1f} s"
        )
    full = found["dp1+remat"]
    saved, seconds = full["saved_bytes"] / none["saved_bytes"], full["step_cpu_s"] / none["step_cpu_s"]
    print(f"remat: saved {saved:.3f} (target <= {SAVED:.3f}), time {seconds:.2f}x (target <= {TIME}x)")


if __name__ == "__main__":
    main()
