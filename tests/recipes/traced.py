"""A step as graph_trainer traces it: two blocks and a chunked loss under FSDP, one gradient all-reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from fxpar.torch_api.threaded import run_threads

c10d = torch.ops._c10d_functional
RANKS, WIDTH, ROWS = 2, 8, 6
GROUP = "dp"


def gather(shard: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, RANKS, GROUP))


def scatter(grad: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad, "sum", RANKS, GROUP))


def at(fqn: str, backward: bool = False) -> Any:
    return annotate({"module_fqn": fqn, "late": backward})


def step(w0: Tensor, n0: Tensor, w1: Tensor, n1: Tensor, bias: Tensor, head: Tensor, x: Tensor) -> list[Tensor]:
    """Loss and gradients; parameters come as shards of dim 0, `bias` as a whole."""
    saved, h = [], x
    for i, (w, n) in enumerate(((w0, n0), (w1, n1))):
        with at(f"layers.{i}.norm"):
            scale = gather(n)
            u = h * scale
        with at(f"layers.{i}.linear"):
            weight = gather(w)
            a = torch.tanh(u @ weight)
        saved.append((h, scale, u, a))
        h = a
    with at("lm_head"):
        out = gather(head)
        grad, total, _dead = torch.zeros_like(h), h.sum() * 0, h * 3
    with at("loss", True):
        g_head = torch.zeros_like(out)
        for chunk in range(0, ROWS, 2):
            part = h[chunk : chunk + 2]
            error = part @ out + bias
            total = total + (error * error).sum()
            g_head.add_(part.t() @ error * 2)
            grad[chunk : chunk + 2].copy_(error @ out.t() * 2)  # nobody reads the result of copy_
    with at("lm_head", True):
        results = [scatter(g_head), c10d.wait_tensor(c10d.all_reduce((h @ out * 2).sum(0), "sum", GROUP))]
    for i in (1, 0):
        h, scale, u, a = saved[i]
        with at(f"layers.{i}.linear", True):
            weight = gather((w0, w1)[i])  # again, as after a resharding
            inner = grad * (1 - a * a)
            results.append(scatter(u.t() @ inner))
            g_u = inner @ weight.t()
        with at(f"layers.{i}.norm", True):
            results.append(scatter((g_u * h).sum(0)))
            grad = g_u * scale
    return [total, *results]


def shards(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(WIDTH // 2, WIDTH), (WIDTH // 2,)] * 2 + [(WIDTH,), (WIDTH // 2, WIDTH), (ROWS, WIDTH)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def traced() -> fx.GraphModule:
    """The graph of one rank with graph_trainer's metadata."""
    with preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")(*shards(0))
    for node in gm.graph.nodes:
        if node.meta.get("custom", {}).pop("late", False):
            node.meta["autograd_backward"] = True
    return gm


def small(function: Callable[[Tensor], Any]) -> fx.GraphModule:
    """The graph of a function of a vector of 4."""
    return make_fx(function, tracing_mode="fake")(torch.randn(4))


def run_on_ranks(gm: fx.GraphModule) -> list[list[Tensor]]:
    """Results of each of two ranks, as threads."""

    def work(rank: int) -> list[Tensor]:
        mine = copy.deepcopy(gm)
        group: Any = dist.group.WORLD
        for node in mine.graph.nodes:
            node.args = tuple(group.group_name if a == GROUP and isinstance(a, str) else a for a in node.args)
        mine.recompile()
        with torch.no_grad():
            return list(mine(*shards(rank)))

    return run_threads(RANKS, work)
