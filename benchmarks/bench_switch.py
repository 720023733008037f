"""One switch on 4 gloo ranks: fxpar against a hand-written fused all-to-all and against DTensor.redistribute.

    OMP_NUM_THREADS=1 python benchmarks/bench_switch.py [--runs 7] [--tiny] [--json OUT]

32 MB of fp32 weights go from Shard(0) to Shard(1), as 32 tensors of 512 x 512 and as 512 tensors of 128 x 128. All
ways run in the same processes and take turns, so that load hits all of them; wall time is that of the slowest rank,
CPU time is summed over the ranks, both are the best of all runs. The fused all-to-all is what one would write by hand
for just this switch: concatenate all chunks, one all_to_all_single, copy out. `fxpar.redistribute` plans and compiles
within the time that is taken, the other ways of fxpar do so before.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fxpar
from fxpar.cost.cluster import ClusterSpec
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.mesh import Mesh
from fxpar.runtime.forked import run_forked
from fxpar.switch import ParamLayout, PlacedParam, plan_switch
from fxpar.transport import Holding, Switch

WORLD = 4
SIZES = {32: 512, 512: 128}  # tensors: rows and columns of each
TINY = {4: 16}
# tensors -> the most of the fused all-to-all's time, the least speedup over DTensor
TARGETS = {32: (1.1, 4.0), 512: (1.1, 12.0)}
Way = Callable[[], Any]


def sharded(name: str, tensors: int, dim: int, cut: int) -> ParamLayout:
    """`tensors` square matrices over all ranks, cut along dim `cut`."""
    mesh = Mesh((("x", WORLD),))
    dims = tuple((AxisShard("x"),) if d == cut else () for d in range(2))
    param = PlacedParam((dim, dim), torch.float32, (DistConfig(mesh, dims),))
    return ParamLayout(name, WORLD, {f"w{i}": param for i in range(tensors)})


def flat_views(layout: ParamLayout, whole: list[Tensor] | None, rank: int, flat: bool) -> dict[str, Tensor]:
    """The rank's tensors, as views of one buffer (as a weight store keeps them) or each on its own."""
    found: dict[str, Tensor] = {}
    shapes = {fqn: p.copies[0].local_shape(p.shape) for fqn, p in layout.params.items()}
    each = next(iter(shapes.values()))
    buffer = torch.zeros(len(shapes), *each)
    for number, (fqn, param) in enumerate(layout.params.items()):
        found[fqn] = buffer[number] if flat else torch.zeros(each)
        if whole is not None:
            found[fqn].copy_(param.copies[0].take(whole[number], rank))
    return found


def fused_all_to_all(local: list[Tensor], tensors: int, dim: int) -> list[Tensor]:
    """What one writes by hand for this switch, and for no other one."""
    send = torch.cat([x.chunk(WORLD, 1)[p].reshape(-1) for p in range(WORLD) for x in local])
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    k = dim // WORLD
    received = received.view(WORLD, tensors, k, k)
    return [received[:, i].reshape(dim, k) for i in range(tensors)]


def ways_of(rank: int, tensors: int, dim: int) -> dict[str, Way]:
    """Every way as a function that does the whole switch once; all of them have been checked."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(dim, dim, generator=generator) for _ in range(tensors)]
    want = [t.chunk(WORLD, 1)[rank] for t in whole]
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("x",))
    source: list[DTensor] = [distribute_tensor(t, mesh, [Shard(0)]) for t in whole]
    rows, columns = sharded("rows", tensors, dim, 0), sharded("columns", tensors, dim, 1)
    plan = plan_switch(rows, columns, ClusterSpec(1, WORLD, 10, 10, 10))
    plan.verify()
    ways: dict[str, Way] = {}

    def ours(execution: str, flat: bool) -> None:
        target = flat_views(columns, None, rank, flat)
        switch = Switch(
            plan, rank, [Holding(rows, flat_views(rows, whole, rank, flat))], Holding(columns, target),
            execution=execution,
        )  # fmt: skip

        def run() -> list[Tensor]:
            switch.run()
            return list(target.values())

        ways[f"fxpar {execution}" + ("" if flat else ", separate tensors")] = run

    ours("p2p", True)
    ours("a2a", True)
    ours("p2p", False)
    named = {f"w{i}": tensor for i, tensor in enumerate(source)}
    ways["fxpar.redistribute"] = lambda: [t.to_local() for t in fxpar.redistribute(named, (mesh, [Shard(1)])).values()]
    local = [t.to_local() for t in source]
    ways["fused all-to-all"] = lambda: fused_all_to_all(local, tensors, dim)
    ways["DTensor.redistribute"] = lambda: [t.redistribute(placements=[Shard(1)]).to_local() for t in source]
    for name, way in ways.items():
        assert all(torch.equal(a, b) for a, b in zip(way(), want, strict=True)), name
    return ways


def measure(sizes: dict[int, int], runs: int) -> Callable[[int], dict[str, dict[str, dict[str, float]]]]:
    def work(rank: int) -> dict[str, dict[str, dict[str, float]]]:
        results: dict[str, dict[str, dict[str, float]]] = {}
        for tensors, dim in sizes.items():
            ways = ways_of(rank, tensors, dim)
            walls: dict[str, list[float]] = {name: [] for name in ways}
            cpus: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(runs):
                for name, way in ways.items():
                    dist.barrier()
                    begun, cpu = time.perf_counter(), time.process_time()
                    way()
                    took = torch.tensor([time.perf_counter() - begun, time.process_time() - cpu])
                    both = [torch.empty_like(took) for _ in range(WORLD)]
                    dist.all_gather(both, took)
                    walls[name].append(1e3 * max(float(t[0]) for t in both))
                    cpus[name].append(1e3 * sum(float(t[1]) for t in both))
            results[str(tensors)] = {
                name: {"wall_ms": min(walls[name]), "cpu_ms": min(cpus[name])} for name in ways
            }  # fmt: skip
        return results

    return work


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="four small tensors, one run, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes, runs = (TINY, 1) if options.tiny else (SIZES, options.runs)
    results = run_forked(WORLD, measure(sizes, runs), timeout_s=3600)[0]
    for tensors, dim in sizes.items():
        ways = results[str(tensors)]
        fused, dtensor = ways["fused all-to-all"], ways["DTensor.redistribute"]
        size = f"{tensors} tensors of {dim} x {dim}, {tensors * dim**2 * 4 / 2**20:g} MB"
        print(f"\n{size}, Shard(0) -> Shard(1), {WORLD} gloo ranks")
        print(f"{'':32}{'wall ms':>9}{'CPU ms':>9}{'of fused':>10}{'DTensor is':>12}")
        for name, took in ways.items():
            ratio, speedup = took["wall_ms"] / fused["wall_ms"], dtensor["wall_ms"] / took["wall_ms"]
            print(f"{name:32}{took['wall_ms']:9.1f}{took['cpu_ms']:9.1f}{ratio:10.2f}{speedup:11.1f}x")
        if tensors in TARGETS:
            most, least = TARGETS[tensors]
            print(f"targets: fxpar p2p <= {most} of fused, DTensor >= {least:.0f}x; load {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
