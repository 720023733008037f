"""One step with experts on 4 ranks: `ep4` against torchtitan's expert parallelism, on gloo.

    OMP_NUM_THREADS=1 python benchmarks/bench_experts.py [--tokens 1024] [--steps 1] [--rounds 8] [--ops 12] [--tiny]
        [--json OUT]

A small model with 8 experts in each layer, of which a token takes 2; forward, backward and AdamW in fp32, one sequence
of as many tokens on each rank, from the same weights. The other side is the same model as its users write it: eager
modules, whose tokens torchtitan's dispatcher sends to experts and back, gradients of all else averaged in one message.
torchtitan's experts compute in bf16 alone, so here their grouped products are called in fp32. Losses and gradients must
agree. The figure is CPU milliseconds per step (process time, all threads) summed over ranks: wall times swing on shared
machines. Both take turns within a round; the ratio is the median over rounds. Target: at most 0.8. With --ops the
costliest ops of each follow, by the time of the thread that calls them: without gloo's threads, and Python between ops.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import model as plain
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from turns import accept, cpu_ms_of_all

from fxpar import expert_mm, weighted_sum
from fxpar.batching import MicroBatch
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.losses import cross_entropy_sum
from fxpar.lowering import lower
from fxpar.passes.pack_documents import pack_documents
from fxpar.runtime import bind
from fxpar.runtime.forked import run_forked
from fxpar.runtime.micro import local_batch, row_of
from fxpar.tracer import capture
from fxpar.transport import ProcessGroups

WORLD, EXPERTS, SLOTS = 4, 8, 2
MINE, BASE = "ep4", "torchtitan"
TARGET = 0.8
SIZES = plain.Sizes(dim=256, heads=4, layers=2, vocab=1024, seq=1024, batch=WORLD)
TINY = plain.Sizes(dim=16, heads=2, layers=1, vocab=64, seq=16, batch=WORLD)
TOLERANCE = 1e-4  # of the norm of all gradients, relative, float32
Step = Callable[[], float]


class Mixture(nn.Module):
    """A router, and gated experts as fxpar takes them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, dim, dim) / dim**0.5)

    def routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of tokens [N, D]; both [N, K]."""
        return self.router(x).softmax(-1).topk(SLOTS, -1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.routes(flat)
        gate, up = expert_mm(flat[:, None].expand(-1, SLOTS, -1), self.up, ids).chunk(2, -1)
        return weighted_sum(expert_mm(F.silu(gate) * up, self.down, ids), weights).view_as(x)


class Dispatched(nn.Module):
    """`Mixture` with this rank's experts, and torchtitan's dispatcher."""

    def __init__(self, whole: Mixture, dispatcher: Any) -> None:
        super().__init__()
        self.router, self.dispatcher = whole.router, dispatcher
        mine = slice(dist.get_rank() * EXPERTS // WORLD, (dist.get_rank() + 1) * EXPERTS // WORLD)
        self.up, self.down = (nn.Parameter(one.detach()[mine].clone()) for one in (whole.up, whole.down))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(SLOTS, -1)
        counts = torch.bincount(ids.reshape(-1), minlength=EXPERTS)
        rows, held, metadata = self.dispatcher.dispatch(flat, weights, ids, counts)
        ends = held.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        return self.dispatcher.combine(made, metadata, flat).view_as(x)


def make_model(sizes: plain.Sizes) -> plain.LanguageModel:
    """With experts in place of feed-forwards."""
    found = plain.make_model(sizes)
    for layer in found.layers:
        layer.mlp = Mixture(sizes.dim)
    return found


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy_sum(model(batch["input_ids"]), batch["labels"])


def program_of(model: nn.Module, tokens: Tensor, strategy: str = MINE) -> TrainGraph:
    """Of rows of documents; no process group."""
    row = tokens[:1, :-1]
    batch = {"input_ids": row, "labels": row}
    return lower(pack_documents(capture(model, loss_sum, batch)), strategy)


def of_fxpar(program: TrainGraph, model: nn.Module, tokens: Tensor, bind: Callable[..., Any] = bind) -> Step:
    """A step on this rank, a sequence in each bin; it returns the square of the norm of its gradients."""
    rank, weights = dist.get_rank(), dict(model.named_parameters())
    local = {
        info.fqn: nn.Parameter(stored.dist.take(weights[info.fqn].detach(), rank).clone())
        for info, stored in zip(program.inputs, program.stored_inputs, strict=True)
        if info.kind == "param"
    }
    bound = bind(program, rank, ProcessGroups().names(program.mesh, program.axes()))
    sequences = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    count = WORLD * (tokens.shape[1] - 1)
    whole = row_of(program, sequences, MicroBatch(tuple(range(WORLD)), count, (1,) * WORLD))
    batch, buffers = local_batch(program, whole, rank), dict(model.named_buffers())
    optimizer = torch.optim.AdamW(local.values(), lr=1e-3, foreach=False)

    def step() -> float:
        bound.prepare(local, buffers)
        bound.run(batch, 1.0 / count)
        grads = bound.finish()["grads"]
        for fqn, grad in grads.items():
            local[fqn].grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return _square(grads)

    return step


def of_torchtitan(model: nn.Module, tokens: Tensor) -> Step:
    """A step on this rank, of its own sequence."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    set_spmd_backend("default")  # all-to-alls of torch, on the mesh that is given
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    mine = copy.deepcopy(model)
    for layer in mine.layers:
        dispatcher = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=SLOTS))
        dispatcher.wire_meshes(ep_mesh=mesh)
        layer.mlp = Dispatched(layer.mlp, dispatcher)
    params = dict(mine.named_parameters())
    shared = [param for fqn, param in params.items() if not _of_experts(fqn)]
    row = tokens[dist.get_rank()][None]
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3, foreach=False)

    def step() -> float:
        loss = cross_entropy_sum(mine(row[:, :-1]), row[:, 1:])
        (loss / (WORLD * (row.shape[1] - 1))).backward()
        flat = torch.cat([param.grad.reshape(-1) for param in shared])
        dist.all_reduce(flat)
        for param, grad in zip(shared, flat.split([param.numel() for param in shared]), strict=True):
            param.grad.copy_(grad.view_as(param))
        square = _square({fqn: param.grad for fqn, param in params.items()})
        optimizer.step()
        optimizer.zero_grad()
        return square

    return step


def _of_experts(fqn: str) -> bool:
    return fqn.endswith((".up", ".down"))


def _square(grads: Mapping[str, Tensor]) -> float:
    """Of the norm of all gradients; those of experts are on one rank each."""
    of_experts = sum(grad.double().square().sum() for fqn, grad in grads.items() if _of_experts(fqn))
    assert isinstance(of_experts, Tensor)
    dist.all_reduce(of_experts)
    return float(of_experts + sum(grad.double().square().sum() for fqn, grad in grads.items() if not _of_experts(fqn)))


class Timed(TorchDispatchMode):
    """CPU ms of this thread in each op, with what the op calls."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        found = func(*args, **(kwargs or {}))
        self.ms[str(func).removesuffix(".default")] += 1e3 * (time.thread_time() - begun)
        return found


def measure(
    program: TrainGraph, model: nn.Module, tokens: Tensor, steps: int, rounds: int, ops: bool
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, Counter[str]]]:
    """On one rank: CPU ms per step summed over ranks, of each way and round; norms of gradients at the start; and, if
    asked for, the ms of this rank's ops in `rounds` more steps.
    """
    made = {MINE: of_fxpar(program, model, tokens), BASE: of_torchtitan(model, tokens)}
    norms = {name: step() for name, step in made.items()}
    cpu_ms, timed = cpu_ms_of_all(made, steps, rounds), {name: Timed() for name in made}
    for _ in range(rounds if ops else 0):
        for name, step in made.items():
            with timed[name]:
                step()
    return cpu_ms, norms, {name: one.ms for name, one in timed.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=SIZES.seq, help="of each rank's sequence")
    parser.add_argument("--steps", type=int, default=1, help="per round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ops", type=int, default=0, help="so many of the costliest ops of each")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one step, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes, steps, rounds = (TINY, 1, 1) if args.tiny else (SIZES, args.steps, args.rounds)
    model = make_model(sizes)
    length = sizes.seq if args.tiny else args.tokens
    tokens = torch.randint(0, sizes.vocab, (WORLD, length + 1), generator=torch.Generator().manual_seed(1))
    program = program_of(model, tokens)
    ranks = run_forked(WORLD, lambda _: measure(program, model, tokens, steps, rounds, args.ops > 0), timeout_s=3600)
    cpu_ms, norms, _ = ranks[0]
    accept(MINE, abs(norms[MINE] / norms[BASE] - 1), TOLERANCE)
    ratio = statistics.median(a / b for a, b in zip(cpu_ms[MINE], cpu_ms[BASE], strict=True))
    for name, mine in cpu_ms.items():
        print(f"{name:12} {statistics.median(mine):8.1f} CPU ms")
    print(f"ratio {ratio:.2f}, target <= {TARGET}; {length} tokens per rank, load {os.getloadavg()[0]:.1f}")
    for name in cpu_ms if args.ops else ():
        ms = sum((rank[2][name] for rank in ranks), Counter())
        print(f"{name}: {sum(ms.values()) / rounds:.0f} CPU ms in ops")
        for op, spent in ms.most_common(args.ops):
            print(f"    {op:60} {spent / rounds:6.1f}")
    if args.json:
        found = {"cpu_ms": cpu_ms, "ratio": ratio, "tokens": length, "load1": os.getloadavg()[0]}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
