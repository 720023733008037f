"""Collectives as gloo carries them out: the same values, and nothing that gloo does badly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import TensorMeta
from fxpar.runtime.forked import run_forked
from fxpar.runtime.gloo import graph_of_rank
from fxpar.torch_api.threaded import run_threads

c10d = torch.ops._c10d_functional
WORLD = 3
OF_A_PART = (
    (c10d.all_gather_into_tensor.default, WORLD, "@dp"),
    (c10d.reduce_scatter_tensor.default, "sum", WORLD, "@dp"),
    (c10d.reduce_scatter_tensor.default, "max", WORLD, "@dp"),
)


def one_collective(target: object, *args: object, dtype: torch.dtype) -> fx.Graph:
    """The graph of a collective, its wait and the result."""
    graph = fx.Graph()
    call = graph.call_function(target, (graph.placeholder("rows"), *args))  # type: ignore[arg-type]
    call.meta["local"] = TensorMeta((1, 2, 5), dtype)
    graph.output((graph.call_function(c10d.wait_tensor.default, (call,)),))
    return graph


def rows_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """[count, 2, 5] numbers of a rank, sums of which every dtype holds exactly."""
    return torch.arange(count * 10).reshape(count, 2, 5).add(7 * rank).to(dtype)


def differences(rank: int) -> tuple[list[str], set[str]]:
    """Cases in which a rank gets something else than it should, and the collectives that it ran."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    wrong, ran = [], set()
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        everything = torch.stack([rows_of(r, WORLD, dtype) for r in range(WORLD)])
        want = [
            torch.cat([rows_of(r, 1, dtype) for r in range(WORLD)]),
            everything.sum(0, dtype=dtype)[rank : rank + 1],
            everything.amax(0)[rank : rank + 1],
        ]
        for (target, *args), expected in zip(OF_A_PART, want, strict=True):
            graph = graph_of_rank(one_collective(target, *args, dtype=dtype), {"dp": group}, {})
            ran |= {str(node.target).split(".")[1] for node in graph.nodes if "c10d" in str(node.target)}
            found = compile_graph(graph)(rows_of(rank, 1 if args[0] == WORLD else WORLD, dtype))[0]
            if found.dtype != dtype or not torch.equal(found, expected):
                wrong.append(f"{target} {args[0]} {dtype}")
    return wrong, ran


def test_gloo_exchanges_rows_and_adds_them_up():
    for wrong, ran in run_forked(WORLD, differences):
        assert wrong == []
        assert "all_to_all_single" in ran
        assert "all_gather_into_tensor" not in ran


def test_other_groups_are_left_alone():
    def targets(rank: int) -> list[object]:
        names = {"dp": dist.group.WORLD.group_name}  # type: ignore[union-attr]
        graphs = [graph_of_rank(one_collective(*case, dtype=torch.float32), names, {}) for case in OF_A_PART]
        return [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"][::2]

    assert run_threads(2, targets) == [[target for target, *_ in OF_A_PART]] * 2
