"""One training step on 4 gloo ranks: fxpar against DDP, FSDP2, DTensor TP and TP + sequence parallel, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/bench_step.py [--steps 8] [--rounds 3] [--json OUT]

Every mode takes the same global batch, weights and AdamW. The figure is CPU milliseconds per step summed over ranks
(wall times swing on shared machines), best of `rounds`; losses must agree. Modes alternate, so that load hits all of
them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import BATCH, SEQ, VOCAB, make_model, make_tokens
from torch import Tensor

WORLD = 4
# fxpar strategy -> (baseline, the most it may cost as a share of the baseline's CPU time)
PAIRS = {
    "dp4": ("ddp", 1.0),
    "dp4+zero3": ("fsdp", 0.85),
    "tp4": ("tp", 0.60),
    "tp4+sp": ("tp_sp", 0.60),
}
Step = Callable[[], float]


def eager_step(mode: str) -> Step:
    """A step of plain torch under DDP, FSDP2 or DTensor tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = make_model()
    tokens = make_tokens()
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
        _tensor_parallel(model, mesh, sequence=mode == "tp_sp")
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


def _tensor_parallel(model: torch.nn.Module, mesh: object, *, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

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


def fxpar_step(strategy: str, programs: dict) -> Step:
    """A step of the lowered graph with the same optimizer on this rank's stored parameters."""
    from fxpar.runtime import ProcessGroups, bind

    program = programs[strategy]
    rank = dist.get_rank()
    model = make_model()
    whole = dict(model.named_parameters())
    stored = {
        info.fqn: s.dist for info, s in zip(program.inputs, program.stored_inputs, strict=True) if info.kind == "param"
    }
    local = {
        fqn: torch.nn.Parameter(dist_config.take(whole[fqn].detach(), rank)) for fqn, dist_config in stored.items()
    }
    optimizer = torch.optim.AdamW(local.values(), lr=1e-3, foreach=False)
    mesh = program.strategy.mesh
    bound = bind(program, rank, ProcessGroups().names(mesh, program.axes()))
    tokens = make_tokens().chunk(mesh.degree("dp"))[mesh.coordinate(rank).get("dp", 0)]
    batch = local_pieces(program, {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}, rank)

    def step() -> float:
        bound.prepare(local, {})
        bound.run(batch, 1.0 / (BATCH * SEQ))
        result = bound.finish()
        for fqn, grad in result["grads"].items():
            local[fqn].grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return float(result["loss"])

    return step


def local_pieces(program: object, batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    from fxpar.runtime.micro import local_batch

    return local_batch(program, batch, rank)  # type: ignore[arg-type]


def loss_sum(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    from fxpar import losses

    return losses.cross_entropy_sum(model(batch["ids"]), batch["labels"])


def lower_all(strategies: list[str]) -> dict:
    """Capture once per replica batch size, lower each strategy; no process group."""
    from fxpar.lowering import lower
    from fxpar.strategy import Strategy
    from fxpar.tracer import capture

    programs, captured = {}, {}
    for text in strategies:
        rows = BATCH // Strategy.parse(text).degree("dp")
        if rows not in captured:
            ids = torch.zeros(rows, SEQ, dtype=torch.long)
            captured[rows] = capture(make_model(), loss_sum, {"ids": ids, "labels": ids})
        programs[text] = lower(captured[rows], text)
    return programs


def worker(rank: int, port: int, modes: list[str], programs: dict, steps: int, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    best: dict[str, float] = {}
    losses: dict[str, float] = {}
    made = {mode: fxpar_step(mode, programs) if mode in programs else eager_step(mode) for mode in modes}
    for mode, step in made.items():
        step()
        losses[mode] = step()
    for _ in range(rounds):
        for mode, step in made.items():
            dist.barrier()
            begun = time.process_time()
            for _ in range(steps):
                losses[mode] = step()
            spent = torch.tensor(time.process_time() - begun, dtype=torch.float64)
            dist.all_reduce(spent)
            best[mode] = min(best.get(mode, float("inf")), 1e3 * float(spent) / steps)
    if rank == 0:
        Path(out).write_text(json.dumps({"cpu_ms": best, "loss": losses, "load1": os.getloadavg()[0]}))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # forked from a process with a captured graph: skip its atexit handlers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PAIRS), help="fxpar strategies to run, with their baselines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    programs = lower_all(args.only)
    modes = [m for s in args.only for m in (PAIRS[s][0], s)]
    out = Path("/tmp") / f"fxpar_bench_{os.getpid()}.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=worker, args=(r, port, modes, programs, args.steps, args.rounds, str(out)))
        for r in range(WORLD)
    ]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    data = json.loads(out.read_text())
    out.unlink()
    print(f"{'fxpar':12} {'CPU ms':>8}   {'baseline':8} {'CPU ms':>8}   ratio  target   loss fxpar / baseline")
    for strategy in args.only:
        baseline, target = PAIRS[strategy]
        mine, theirs = data["cpu_ms"][strategy], data["cpu_ms"][baseline]
        print(
            f"{strategy:12} {mine:8.1f}   {baseline:8} {theirs:8.1f}   {mine / theirs:5.2f}  <={target:4.2f}   "
            f"{data['loss'][strategy]:.5f} / {data['loss'][baseline]:.5f}"
        )
    print(f"vocab {VOCAB}, batch {BATCH} x {SEQ}, {WORLD} ranks, load {data['load1']:.1f}, torch {torch.__version__}")
    if args.json:
        args.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
