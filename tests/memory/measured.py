"""The true peak of a program's body: every allocation of the process, those inside of kernels too.

    python -m tests.memory.measured llama 512 dp1 dp1+offload --set layers=4 --set dim=128

prints it beside the predicted one. What a program moves to the host lies in memory that torch does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxpar.ir.exec_graph import ExecGraph, collective_kind
from fxpar.lowering import lower
from fxpar.memory import program_peak
from fxpar.models import load
from fxpar.runtime.bound import BoundGraph
from fxpar.runtime.host import HostCopies
from fxpar.runtime.micro import as_one_sequence, local_batch
from fxpar.runtime.padding import pad
from fxpar.tracer import capture
from fxpar.transport import ProcessGroups
from tests.captured import Captured


@functools.cache
def model(spec: str, tokens: int, dtype: str = "float32", **options: str) -> Captured:
    """One of the loader's models, captured with a batch of `tokens`."""
    loaded = load(spec, dtype=dtype, options=options, tokens=(tokens,))
    graph = capture(loaded.model, loaded.loss_fn, loaded.example_batch, name=spec)
    return Captured(graph, loaded.params(), loaded.buffers(), loaded.batches)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _waited(result: Tensor, *held: Tensor) -> Tensor:
    return _WAIT(result)


class _Host:
    """Memory that torch does not count, and one stream for all: copies end at once."""

    def stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None, record_event=lambda: None)

    kernels = stream

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def on_host(self, x: Tensor) -> Tensor:
        memory = torch.from_numpy(np.empty(x.numel() * x.element_size(), np.uint8))
        return memory.view(x.dtype).as_strided(x.shape, x.stride())

    def on_device(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(self, x: Tensor, stream: Any) -> None:
        pass


class BesideHost(BoundGraph):
    """A program whose device is the CPU, and whose host has memory of its own."""

    def host_copies(self) -> HostCopies:
        return HostCopies(_Host())


def body_bytes(captured: Captured, program: ExecGraph, micro_batches: int = 1) -> int:
    """Bytes above the level before the last micro-batch at its peak, on the first rank. The other ranks are not there:
    collectives allocate their results and leave them as they are, as they do where a network card moves the data; it
    reads an operand until somebody waits for the result.
    """
    strategy = program.strategy
    for wait in program.body.graph.find_nodes(op="call_function", target=_WAIT):
        (sent,) = wait.all_input_nodes
        wait.target, wait.args = _waited, (sent, *(sent.all_input_nodes if collective_kind(sent) else ()))
    params = {
        info.fqn: stored.dist.take(captured.params[info.fqn], 0)
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }
    batch = local_batch(program, pad(program, as_one_sequence(program.inputs, captured.batches[0], 0)), 0)
    dist.init_process_group("fake", rank=0, world_size=strategy.world)
    try:
        bound = BesideHost(program, 0, ProcessGroups().names(strategy.mesh, program.axes()))
        _run(bound, params, captured, batch, micro_batches)  # kernels allocate scratch that they keep, the first time
        return _run(bound, params, captured, batch, micro_batches)
    finally:
        dist.destroy_process_group()


def _run(
    bound, params: Mapping[str, Tensor], captured: Captured, batch: Mapping[str, Tensor], micro_batches: int
) -> int:
    bound.prepare(params, captured.buffers)
    for _ in range(micro_batches - 1):
        bound.run(batch, 1.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        bound.run(batch, 1.0)
    return peak_bytes(profiler)


def peak_bytes(profiler: profile) -> int:
    """From the recorded allocations, of which the public trace has the running total."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    start = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return max(e["args"]["Total Allocated"] for e in memory) - start


def allocated_bytes(count: int) -> int:
    """What the measurement says of one tensor of `count` bytes and a second one after it is gone."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        first = torch.empty(count, dtype=torch.uint8)
        del first
        torch.empty(count // 2, dtype=torch.uint8)
    return peak_bytes(profiler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("strategies", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    captured = model(args.model, args.tokens, **dict(pair.split("=") for pair in args.set))
    for strategy in args.strategies:
        program = lower(captured.graph, strategy)
        assert isinstance(program, ExecGraph)
        peak, measured = program_peak(program, captured.graph.example_dims()), body_bytes(captured, program)
        words = f"predicted {peak.total_bytes / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB"
        print(f"{strategy}: {words}, on the host {peak.host_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
