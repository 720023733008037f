"""The loss over a large vocabulary in chunks of tokens, on one rank: bytes and time, against whole and plain torch.

    OMP_NUM_THREADS=1 python benchmarks/bench_chunks.py [--tokens 8192] [--vocab 32768] [--tiny] [--json OUT]

A head on the hidden states of a projection, cross entropy, and the gradients of both weights, in fp32. The peak is
predicted from the graph, and measured as the most that the allocator has given out in a step. Beside it what the
logits, their gradient and the kernels on them take of it. Times are CPU seconds of a step, the least of several, ways
in turn. Targets with 16 chunks: at most 1/16 of the bytes of the logits, at most 1.05 times the time of plain torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.profiler import ProfilerActivity, profile

from fxpar import losses
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.node_meta import local_meta
from fxpar.lowering import lower
from fxpar.memory import program_peak
from fxpar.runtime import bind
from fxpar.tracer import capture

BYTES, TIME = 1 / 16, 1.05
CHUNKS = (4, 16, 32)


class Head(nn.Module):
    """Hidden states [1, T, D] -> logits [1, T, V]; the projection is there for the hidden states to have a gradient."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(dim, dim, bias=False), nn.Linear(dim, vocab, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.project(hidden))


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The sum of the token losses."""
    return losses.cross_entropy_sum(model(batch["hidden"]), batch["labels"])


def logits_bytes(program: ExecGraph, tokens: int, vocab: int) -> int:
    """The most bytes of values over the vocabulary that stand at one time."""
    dims = {dim.symbol: tokens for dim in program.dims}
    nodes = list(program.body.graph.nodes)
    last = {node: max((nodes.index(user) for user in node.users), default=i) for i, node in enumerate(nodes)}
    wide = [n for n in nodes if n.op == "call_function" and _is_wide(n, vocab) and not _is_view(n)]
    sizes = {n: local_meta(n).numel(dims) * local_meta(n).dtype.itemsize for n in wide}
    moments = range(len(nodes))
    return max(sum(sizes[n] for n in wide if nodes.index(n) <= at <= last[n]) for at in moments)


def _is_wide(node: fx.Node, vocab: int) -> bool:
    meta = local_meta(node)
    shape = getattr(meta, "shape", ())
    return bool(shape) and shape[-1] == vocab and not isinstance(shape[0], int)


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or "reshape" in str(node.target)


def measured_bytes(step: Callable[[], object]) -> int:
    """The most that the allocator has given out in a step, above what it had at its start."""
    step()  # kernels keep what they allocate the first time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    start = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return max(e["args"]["Total Allocated"] for e in memory) - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small head, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.tokens, args.vocab, args.dim, args.repeats = 128, 256, 16, 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Head(args.dim, args.vocab)
    batch = {"hidden": torch.randn(1, args.tokens, args.dim), "labels": torch.randint(args.vocab, (1, args.tokens))}
    logical = capture(model, loss_sum, batch)
    names = ["dp1", *(f"dp1+chunks({count})" for count in CHUNKS)]
    programs = {name: lower(logical, name) for name in names}
    steps = {"torch": _eager(model, batch), **{name: _step(model, programs[name], batch) for name in names}}
    found: dict[str, dict[str, float]] = {name: {"bytes": measured_bytes(step)} for name, step in steps.items()}
    for name, program in programs.items():
        found[name]["predicted_bytes"] = program_peak(program, logical.example_dims()).total_bytes
        found[name]["logits_bytes"] = logits_bytes(program, args.tokens, args.vocab)
    for _ in range(args.repeats):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            found[name]["cpu_s"] = min(found[name].get("cpu_s", float("inf")), time.process_time() - begun)
    report(found)
    if args.json:
        args.json.write_text(json.dumps(found))


def _eager(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    def step() -> None:
        for p in model.parameters():
            p.grad = None
        logits = model(batch["hidden"])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").backward()

    return step


def _step(model: nn.Module, program: ExecGraph, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    bound = bind(program, 0, {})
    params = {name: p.detach() for name, p in model.named_parameters()}

    def step() -> object:
        bound.prepare(params, {})
        bound.run(dict(batch), 1.0)
        return bound.finish()

    return step


def report(found: Mapping[str, Mapping[str, float]]) -> None:
    whole, torch_s = found["dp1"], found["torch"]["cpu_s"]
    for name, one in found.items():
        text = f"{name:16} peak {one['bytes'] / 1e6:8.1f} MB"
        if "predicted_bytes" in one:
            logits = one["logits_bytes"] / whole["logits_bytes"]
            text += f", predicted {one['predicted_bytes'] / 1e6:8.1f} MB; logits {logits:.4f} of whole"
        text += f"; step {one['cpu_s'] * 1e3:7.0f} ms ({one['cpu_s'] / torch_s:.2f} of torch, "
        print(text + f"{one['cpu_s'] / whole['cpu_s']:.2f} of dp1)")
    chunked = found["dp1+chunks(16)"]
    logits, seconds = chunked["logits_bytes"] / whole["logits_bytes"], chunked["cpu_s"] / torch_s
    print(f"16 chunks: logits {logits:.4f} (target <= {BYTES:.4f}), time {seconds:.2f} (target <= {TIME})")


if __name__ == "__main__":
    main()
