"""One training step on 4 gloo ranks: fxpar against DDP, FSDP2, DTensor TP and TP + sequence parallel, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/bench_step.py [--steps 6] [--rounds 8] [--only dp4+zero3] [--tiny] [--json OUT]

Every mode takes the same global batch, weights and AdamW; losses must agree. The figure is CPU milliseconds per step
(process time, all threads) summed over ranks: wall times swing on shared machines. Modes take turns within a round, so
that load hits all of them; the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import TINY, Sizes, loss_sum, make_model, make_tokens
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from turns import cpu_ms_of_all

from fxpar.ir.strategy import Strategy
from fxpar.lowering import lower
from fxpar.runtime import bind
from fxpar.runtime.forked import run_forked
from fxpar.runtime.micro import local_batch
from fxpar.tracer import capture
from fxpar.transport import ProcessGroups

WORLD = 4
# fxpar strategy -> (baseline, the most it may cost as a share of the baseline's CPU time)
PAIRS = {
    "dp4": ("ddp", 1.0),
    "dp4+zero3": ("fsdp", 0.8),
    "tp4": ("tp", 0.6),
    "tp4+sp": ("tp_sp", 0.6),
}
TOLERANCE = 1e-5  # of losses, relative, float32
Step = Callable[[], float]


def eager_step(mode: str, sizes: Sizes) -> Step:
    """A step of plain torch under DDP, FSDP2 or DTensor tensor parallelism."""
    model: torch.nn.Module = make_model(sizes)
    tokens = make_tokens(sizes)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("x",))
    if mode in ("ddp", "fsdp"):
        tokens = tokens.chunk(WORLD)[dist.get_rank()]
    if mode == "ddp":
        model = DistributedDataParallel(model)
    elif mode == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif mode in ("tp", "tp_sp"):
        tensor_parallel(model, mesh, sequence=mode == "tp_sp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> float:
        logits = model(tokens[:, :-1])
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if mode in ("ddp", "fsdp"):
            dist.all_reduce(value)
            value /= WORLD
        return float(value)

    return step


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    if sequence:
        parallelize_module(
            model,
            mesh,
            {
                "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
    out = Shard(1) if sequence else Replicate()
    for layer in model.layers:
        plan: dict = {name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")}
        plan |= {name: RowwiseParallel(output_layouts=out) for name in ("attn.wo", "mlp.w2")}
        if sequence:
            gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
            plan |= {"attn": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
        parallelize_module(layer, mesh, plan)


def fxpar_step(program, sizes: Sizes) -> Step:
    """A step of the lowered graph with the same optimizer on this rank's stored parameters."""
    rank, mesh = dist.get_rank(), program.strategy.mesh
    whole = dict(make_model(sizes).named_parameters())
    local = {
        info.fqn: torch.nn.Parameter(stored.dist.take(whole[info.fqn].detach(), rank))
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }
    optimizer = torch.optim.AdamW(local.values(), lr=1e-3, foreach=False)
    bound = bind(program, rank, ProcessGroups().names(mesh, program.axes()))
    tokens = make_tokens(sizes).chunk(mesh.degree("dp"))[mesh.coordinate(rank).get("dp", 0)]
    batch = local_batch(program, {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}, rank)

    def step() -> float:
        bound.prepare(local, {})
        bound.run(batch, 1.0 / (sizes.batch * sizes.seq))
        result = bound.finish()
        for fqn, grad in result["grads"].items():
            local[fqn].grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return float(result["loss"])

    return step


def lower_all(strategies: Sequence[str], sizes: Sizes) -> dict:
    """Capture once per replica batch size, lower each strategy; no process group."""
    programs, captured = {}, {}
    for text in strategies:
        rows = sizes.batch // Strategy.parse(text).degree("dp")
        if rows not in captured:
            ids = torch.zeros(rows, sizes.seq, dtype=torch.long)
            captured[rows] = capture(make_model(sizes), loss_sum, {"ids": ids, "labels": ids})
        programs[text] = lower(captured[rows], text)
    return programs


def measure(programs: dict, sizes: Sizes, steps: int, rounds: int) -> tuple[dict, dict]:
    """On one rank: CPU ms per step summed over ranks, of each mode and round; the loss of each mode's second step."""
    modes = [mode for strategy in programs for mode in (PAIRS[strategy][0], strategy)]
    made = {m: fxpar_step(programs[m], sizes) if m in programs else eager_step(m, sizes) for m in modes}
    losses = {}
    for mode, step in made.items():
        step()
        losses[mode] = step()
    return cpu_ms_of_all(made, steps, rounds), losses


def report(cpu_ms: dict[str, list[float]], losses: dict[str, float], sizes: Sizes) -> dict:
    """Print a line per strategy. Raises SystemExit if it computes something else than its baseline."""
    found: dict = {"cpu_ms": cpu_ms, "loss": losses, "ratio": {}, "load1": os.getloadavg()[0]}
    print(f"{'fxpar':12} {'CPU ms':>8}   {'baseline':8} {'CPU ms':>8}   ratio  target   loss fxpar / baseline")
    for strategy, (baseline, target) in PAIRS.items():
        if strategy not in cpu_ms:
            continue
        mine, theirs = cpu_ms[strategy], cpu_ms[baseline]
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        found["ratio"][strategy] = ratio
        print(
            f"{strategy:12} {statistics.median(mine):8.1f}   {baseline:8} {statistics.median(theirs):8.1f}   "
            f"{ratio:5.2f}  <={target:4.2f}   {losses[strategy]:.5f} / {losses[baseline]:.5f}"
        )
        if not abs(losses[strategy] / losses[baseline] - 1) <= TOLERANCE:
            raise SystemExit(f"{strategy} and {baseline} differ")
    print(
        f"vocab {sizes.vocab}, batch {sizes.batch} x {sizes.seq}, {WORLD} ranks, load {found['load1']:.1f}, "
        f"torch {torch.__version__}"
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="per round and mode")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(PAIRS), help="fxpar strategies to run, with their baselines")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one step, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes, steps, rounds = (TINY, 1, 1) if args.tiny else (Sizes(), args.steps, args.rounds)
    programs = lower_all(args.only, sizes)
    cpu_ms, losses = run_forked(WORLD, lambda _: measure(programs, sizes, steps, rounds), timeout_s=3600)[0]
    found = report(cpu_ms, losses, sizes)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
