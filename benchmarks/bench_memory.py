"""Peak memory of one training step on one rank without parallelism: fxpar's graph against eager torch.

    OMP_NUM_THREADS=1 python benchmarks/bench_memory.py [--batch 64] [--json OUT]

Each mode runs in a process of its own; the figure is how far the resident set rises over its level before the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

TARGET = 1.05


def step_peak_mb(mode: str, batch: int) -> float:
    """Run one step after a warm-up with a small batch; MB by which the resident set rose at most."""
    import torch
    from model import SEQ, VOCAB, make_model

    torch.set_num_threads(1)
    model = make_model()
    ids = torch.randint(0, VOCAB, (batch, SEQ + 1), generator=torch.Generator().manual_seed(1))
    step = _eager(model) if mode == "eager" else _fxpar(model, batch)
    step(ids[:, :9] if mode == "eager" else ids[:, : SEQ // 4 + 1])
    before = _resident_mb()
    _reset_peak()
    step(ids)
    return _peak_mb() - before


def _eager(model):
    import torch.nn.functional as F

    def step(ids):
        for p in model.parameters():
            p.grad = None
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
        loss.backward()

    return step


def _fxpar(model, batch: int):
    import torch
    from bench_step import loss_sum
    from model import SEQ

    from fxpar.lowering import lower
    from fxpar.runtime import bind
    from fxpar.tracer import capture

    example = torch.zeros(batch, SEQ, dtype=torch.long)
    bound = bind(lower(capture(model, loss_sum, {"ids": example, "labels": example}), "dp1"), 0, {})
    params = {n: p.detach() for n, p in model.named_parameters()}

    def step(ids):
        bound.prepare(params, {})
        bound.run({"ids": ids[:, :-1], "labels": ids[:, 1:]}, 1.0)
        return bound.finish()

    return step


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resident_mb() -> float:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    return _status("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--mode", choices=["eager", "fxpar"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.mode:
        print(step_peak_mb(args.mode, args.batch))
        return
    found = {}
    for mode in ("eager", "fxpar"):
        command = [sys.executable, __file__, "--mode", mode, "--batch", str(args.batch)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        found[mode] = float(result.stdout.split()[-1])
    ratio = found["fxpar"] / found["eager"]
    print(f"peak of a step over its start: eager {found['eager']:.0f} MB, fxpar {found['fxpar']:.0f} MB, ", end="")
    print(f"ratio {ratio:.2f} (target <= {TARGET})")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
