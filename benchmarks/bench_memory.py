"""Peak memory of one training step on one rank without parallelism: fxpar's graph against eager torch.

    OMP_NUM_THREADS=1 python benchmarks/bench_memory.py [--batch 64] [--tiny] [--json OUT]

Each mode runs in a process of its own; the figure is how far the resident set rises over its level before the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from model import TINY, LanguageModel, Sizes, loss_sum, make_model
from torch import Tensor

from fxpar.lowering import lower
from fxpar.runtime import bind
from fxpar.runtime.forked import run_forked
from fxpar.tracer import capture

TARGET = 1.05
Step = Callable[[Tensor], object]


def step_peak_mb(mode: str, sizes: Sizes) -> float:
    """Run one step after a warm-up with a short batch; MB by which the resident set rose at most."""
    model = make_model(sizes)
    shape = (sizes.batch, sizes.seq + 1)
    ids = torch.randint(0, sizes.vocab, shape, generator=torch.Generator().manual_seed(1))
    step = _eager(model) if mode == "eager" else _fxpar(model, sizes)
    step(ids[:, :9] if mode == "eager" else ids[:, : sizes.seq // 4 + 1])
    before = _resident_mb()
    _reset_peak()
    step(ids)
    return _peak_mb() - before


def _eager(model: LanguageModel) -> Step:
    def step(ids: Tensor) -> None:
        for p in model.parameters():
            p.grad = None
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
        loss.backward()

    return step


def _fxpar(model: LanguageModel, sizes: Sizes) -> Step:
    example = torch.zeros(sizes.batch, sizes.seq, dtype=torch.long)
    bound = bind(lower(capture(model, loss_sum, {"ids": example, "labels": example}), "dp1"), 0, {})
    params = {n: p.detach() for n, p in model.named_parameters()}

    def step(ids: Tensor) -> object:
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes = TINY if args.tiny else Sizes(batch=args.batch)
    found = {mode: run_forked(1, lambda _, mode=mode: step_peak_mb(mode, sizes))[0] for mode in ("eager", "fxpar")}
    print(f"peak of a step over its start: eager {found['eager']:.0f} MB, fxpar {found['fxpar']:.0f} MB, ", end="")
    ratio = found["fxpar"] / found["eager"] if found["eager"] else float("nan")
    print(f"ratio {ratio:.2f} (target <= {TARGET})")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
