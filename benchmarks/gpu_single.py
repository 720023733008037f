"""One GPU: a training step of a 1B-class Llama, fxpar's graph with inductor against `torch.compile` of the same model.

    python benchmarks/gpu_single.py [--steps 20] [--rounds 5] [--tokens 8192] [--json OUT]
    python benchmarks/gpu_single.py --device cpu --tiny     # the same program, to see that it runs

bf16, one packed row of tokens (four documents), the same attention kernel on both sides (`fxpar::attention`). The
figure is the time of forward and backward of one micro-batch (CUDA events; wall time on CPU) and the peak of allocated
memory; modes alternate within a round, the ratio is the median over rounds. Loss and gradients of both are compared.
Targets: step time <= 1.0x, peak memory <= 1.02x. Not part of `make bench`: it needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.exec_graph import ExecGraph
from fxpar.lowering import lower
from fxpar.models import LoadedModel, load
from fxpar.runtime.bound import bind
from fxpar.tracer import capture

SIZES = {"layers": "16", "dim": "2048", "heads": "32", "kv_heads": "8", "ffn": "8192", "vocab": "32000"}
TINY = {"layers": "2", "dim": "64", "heads": "4", "kv_heads": "2", "ffn": "176", "vocab": "500"}
TOLERANCE = 0.05  # bf16 gradients, relative in the 2-norm
Step = Callable[[], tuple[float, dict[str, Tensor]]]


def fxpar_step(loaded: LoadedModel, batch: dict[str, Tensor], scale: float) -> Step:
    """The lowered graph of one rank."""
    program = lower(capture(loaded.model, loaded.loss_fn, batch), "dp1")
    assert isinstance(program, ExecGraph)
    bound = bind(program, 0, {}, compile="inductor")
    params = {name: p.detach() for name, p in loaded.model.named_parameters()}
    buffers = dict(loaded.model.named_buffers())

    def step() -> tuple[float, dict[str, Tensor]]:
        bound.prepare(params, buffers)
        bound.run(batch, scale)
        found = bound.finish()
        return float(found["loss"]), found["grads"]

    return step


def torch_step(loaded: LoadedModel, batch: dict[str, Tensor], scale: float) -> Step:
    """What a careful user writes."""
    model: nn.Module = loaded.model
    compiled: Any = torch.compile(lambda given: loaded.loss_fn(model, given) * scale)

    def step() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        loss = compiled(batch)
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return step


def timed(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """(ms per step, peak MB) of `steps` steps."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        return 1e3 * (time.perf_counter() - begun) / steps, 0.0
    torch.cuda.reset_peak_memory_stats(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps, torch.cuda.max_memory_allocated(device) / 1e6


def compare(first: Step, second: Step) -> float:
    """The worst relative difference of a gradient. Raises SystemExit if the two compute something else."""
    (loss, grads), (other, expected) = first(), second()
    grads = {name: grad.clone() for name, grad in grads.items()}
    errors = {n: float((grads[n].float() - e.float()).norm() / e.float().norm()) for n, e in expected.items()}
    worst = max(errors.values())
    if abs(loss / other - 1) > TOLERANCE or worst > TOLERANCE:
        raise SystemExit(f"they differ: losses {loss} and {other}, a gradient by {worst:.2e}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="per round and mode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU; --device cpu --tiny shows that the program runs")
    options = TINY if args.tiny else SIZES
    loaded = load(
        "llama", noise=False, options=options, dtype=torch.bfloat16, device=args.device, tokens=(args.tokens,)
    )
    batch = {key: value.to(device) for key, value in loaded.example_batch.items()}
    modes = {
        "fxpar": fxpar_step(loaded, batch, loaded.scale()),
        "torch": torch_step(loaded, batch, loaded.scale()),
    }
    found: dict[str, Any] = {"gradient_error": compare(*modes.values()), "ms": {}, "peak_mb": {}}
    for _ in range(args.rounds):
        for name, step in modes.items():
            ms, peak = timed(step, args.steps, device)
            found["ms"].setdefault(name, []).append(ms)
            found["peak_mb"].setdefault(name, []).append(peak)
    found["time_ratio"] = statistics.median(a / b for a, b in zip(*found["ms"].values(), strict=True))
    for name in modes:
        print(f"{name}  {statistics.median(found['ms'][name]):9.2f} ms, peak {max(found['peak_mb'][name]):9.0f} MB")
    print(f"time ratio {found['time_ratio']:.3f} (target <= 1.0), gradients {found['gradient_error']:.1e} apart")
    if device.type == "cuda":
        found["peak_ratio"] = max(found["peak_mb"]["fxpar"]) / max(found["peak_mb"]["torch"])
        print(f"peak ratio {found['peak_ratio']:.3f} (target <= 1.02)")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
