"""What is tried: a tiny form of all of it, on one rank and on two emulated nodes."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.ir.node_meta import is_backward
from fxpar.profiling import trials
from fxpar.profiling.points import BACKWARD, measured
from fxpar.profiling.trials import device_series, link_series
from fxpar.runtime.forked import run_forked
from tests.captured import llama

CPU = torch.device("cpu")
SIZES = (1 << 10, 1 << 12)


def test_results_are_kept(monkeypatch):
    """What a step makes next lies in other memory than what it made last."""
    monkeypatch.setattr(trials, "KEPT_BYTES", 3 << 12)
    made: list[weakref.ref[torch.Tensor]] = []

    def run() -> tuple[torch.Tensor]:
        made.append(weakref.ref(out := torch.empty(1 << 10)))
        return (out,)

    keeping = trials._keeping(run)
    for _ in range(5):
        keeping()
    assert [one() is not None for one in made[1:]] == [False, False, True, True, True]


class Layouts(TorchDispatchMode):
    """Of the products that run: whether each operand is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.found.append(tuple(one.stride(0) == 1 for one in args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("half", "backward"), [("", False), (BACKWARD, True)])
def test_products_are_those_of_captured_graphs(half, backward):
    """Forward rows with the transposed weight, backward the gradients with the weight, and transposed with the rows."""
    calls = [n for n in llama().graph.gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    transposed = torch.ops.aten.t.default
    graphs = {tuple(one.target is transposed for one in n.args) for n in calls if is_backward(n) is backward}
    run = trials._linear(CPU, "float32", 6, 4, half)
    with Layouts() as layouts:
        run()
    assert set(layouts.found) == graphs
    assert len(layouts.found) == len(graphs)


def test_attention_keeps_a_gpu_busy():
    """With 4 heads an H200 waits below 8,192 tokens; nothing is prepared here, so that no GPU is needed."""
    on_gpu, on_cpu = (next(trials._attention(torch.device(kind), "bfloat16", "")) for kind in ("cuda", "cpu"))
    assert (on_gpu.size, on_gpu.amount) == (256, 2.0 * 32 * 64 * 256**2)
    assert on_gpu.amount == 8 * on_cpu.amount
    assert next(trials._attention(CPU, "bfloat16", BACKWARD)).amount == 2.5 * on_cpu.amount


def test_thin_products_are_measured_where_they_take_longer_than_starting_them():
    """An H200 does each in 13 us, all of them Python's: as traffic that would be 23 times what memory gives."""
    on_gpu, on_cpu = (len(device_series(torch.device(kind))) for kind in ("cuda", "cpu"))
    assert (on_gpu, on_cpu) == (12, 15)  # that of a GPU has copies to its host


def test_a_device():
    points = measured(device_series(CPU, (8, 16), (1 << 12, 1 << 14)), CPU, 0.005, lambda text: None)
    found = {(point.kind, point.of): point for point in points}
    halves = [f"{half}{kind}" for half in ("", "backward ") for kind in ("product", "thin product", "attention")]
    assert set(found) == {
        *((kind, dtype) for kind in halves for dtype in ("float32", "bfloat16")),
        ("copy", "memory"),
        ("add", "memory"),
        ("launch", "kernel"),
    }
    assert found["product", "bfloat16"].amount == 2 * 16**3
    least = {(point.kind, point.of): point for point in reversed(points)}  # of which no series is too slow
    for kind in ("product", "thin product"):
        assert least[f"backward {kind}", "bfloat16"].amount == 2 * least[kind, "bfloat16"].amount
    assert found["copy", "memory"].amount == 2 * (1 << 14)
    assert found["add", "memory"].amount == 3 * (1 << 14)
    assert all(point.seconds > 0 for point in points)


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (2, 2)])
def test_links(world, nodes, monkeypatch):
    monkeypatch.setattr("fxpar.profiling.points.SLOW", 1000)  # on a busy machine no series ends early

    def work(rank: int) -> list:
        return measured(link_series(CPU, nodes, SIZES), CPU, 0.01, lambda text: None)

    found = run_forked(world, work, 60.0)
    level = "intra" if nodes == 1 else "inter"
    for points in found:
        assert points == found[0]
        assert {(point.kind, point.of) for point in points} == {
            ("send", level),
            ("all_reduce", level),
            ("all_gather", level),
            ("reduce_scatter", level),
        }
        last = {point.kind: point for point in points}
        assert {kind: point.amount for kind, point in last.items()} == {
            "send": 1 << 12,
            "all_reduce": 1 << 12,  # 2 * (2 - 1) / 2 of it
            "all_gather": 1 << 11,  # a half comes, a half is there
            "reduce_scatter": 1 << 11,
        }


def test_all_pairs_send_at_once():
    """Two nodes of two ranks: both levels, and no rank is left out of a group."""

    def work(rank: int) -> list:
        return measured(link_series(CPU, 2, SIZES[:1]), CPU, 0.005, lambda text: None)

    (points, *others) = run_forked(4, work, 60.0)
    assert [(point.kind, point.of) for point in points] == [
        (kind, level) for level in ("inter", "intra") for kind in ("send", "all_reduce", "all_gather", "reduce_scatter")
    ]
    assert all(other == points for other in others)


def test_gathers_beside_a_product(monkeypatch):
    """On a GPU alone; that they all begin before the product, and are waited for."""
    monkeypatch.setattr(trials, "BESIDE_WIDTH", 16)
    monkeypatch.setattr(trials, "BESIDE_BYTES", 1 << 12)

    def work(rank: int) -> tuple:
        group = dist.new_group([0, 1])
        (trial,) = trials._beside_gathers(CPU, "intra", group, 1 << 10)
        product, gathered = trial.prepare()()
        return trial.kind, trial.size, trial.amount, product.shape, len(gathered), gathered[0].numel()

    expected = ("product beside gathers", 1 << 12, 2.0 * 16**3, (16, 16), 4, 1 << 8)
    assert run_forked(2, work, 60.0) == [expected] * 2
