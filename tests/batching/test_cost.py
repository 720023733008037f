"""The cost of a micro-batch, read off lowered programs: textbook counts, what each axis divides, links."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxpar import losses
from fxpar.batching import GroupCost
from fxpar.batching.cost import group_cost
from fxpar.batching.work import body_work, link_crosses_nodes
from fxpar.cost.cluster import ClusterSpec
from fxpar.errors import ClusterError, CostModelError
from fxpar.ir.exec_graph import ExecGraph
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.mesh import Mesh
from fxpar.lowering import lower
from fxpar.models import load
from fxpar.tracer import capture
from tests.captured import mlp

LAYERS, DIM, HEADS, FFN, VOCAB = 2, 512, 8, 1376, 4096
OPTIONS = {"layers": LAYERS, "dim": DIM, "heads": HEADS, "kv_heads": HEADS, "ffn": FFN, "vocab": VOCAB}
PRODUCT_WEIGHTS = LAYERS * (4 * DIM * DIM + 3 * DIM * FFN) + DIM * VOCAB
# Causal: 2 * E * len**2 per head forward (two products of 2 * len**2 * E, half of them), 2.5 times that backward.
ATTENTION_PER_SQUARE = 3.5 * 2 * LAYERS * DIM
NODE = ClusterSpec(1, 4, 400.0, 50.0, 10.0)
PAIR = ClusterSpec(2, 2, 400.0, 50.0, 10.0)
STRATEGIES = ("dp4", "tp4", "cp4", "dp2.tp2", "cp2.tp2", "tp4+sp")


@functools.cache
def graph() -> LogicalGraph:
    model = load(
        "llama", options={k: str(v) for k, v in OPTIONS.items()}, tokens=(61,), device="meta", dtype="bfloat16"
    )
    return capture(model.model, model.loss_fn, model.example_batch)


@functools.cache
def program(strategy: str) -> ExecGraph:
    return lower(graph(), strategy)


def ranks_per_replica(strategy: str) -> int:
    return 4 // program(strategy).strategy.degree("dp")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flops_are_the_textbook_ones(strategy):
    work, ranks = body_work(program(strategy)), ranks_per_replica(strategy)
    assert float(work.product_flops.c1) * ranks == pytest.approx(6 * PRODUCT_WEIGHTS, rel=0.01)
    assert float(work.attention_flops.c2) * ranks == pytest.approx(ATTENTION_PER_SQUARE, rel=0.01)
    assert work.product_flops.c0 == work.product_flops.c2 == 0
    assert work.attention_flops.c0 == work.attention_flops.c1 == 0


def test_a_replica_of_four_ranks_is_four_times_as_fast():
    one = group_cost(program("dp4"), NODE, 400.0, launch_us=0.0)
    fast = ClusterSpec(1, 4, 1e9, 1e9, 0.0)
    four = group_cost(program("cp4"), fast, 400.0, launch_us=0.0)
    assert four.per_square_s == pytest.approx(one.per_square_s / 4)
    assert four.per_token_s == pytest.approx(one.per_token_s / 4, rel=0.2)
    two = group_cost(program("dp2.tp2"), fast, 400.0, launch_us=0.0)
    assert two.per_square_s == pytest.approx(one.per_square_s / 2)


@given(st.lists(st.integers(1, 10**6), max_size=5), st.integers(1, 10**6))
def test_cost_is_monotone(lengths, more):
    cost = group_cost_of_tp()
    assert cost.seconds([*lengths, more]) > cost.seconds(lengths)
    assert cost.seconds([*lengths, more + 1]) > cost.seconds([*lengths, more])


@functools.cache
def group_cost_of_tp() -> GroupCost:
    return group_cost(program("tp4"), NODE, 400.0)


def test_faster_devices_links_and_memory_cost_less():
    def total(strategy: str = "tp4", cluster: ClusterSpec = NODE, tflops: float = 400.0, **rates: float) -> float:
        return group_cost(program(strategy), cluster, tflops, **rates).seconds([4096])

    assert total(tflops=800.0) < total()
    assert total(memory_gb_per_s=4000.0) < total()
    assert total(launch_us=0.0) < total()
    assert total(cluster=ClusterSpec(1, 4, 800.0, 50.0, 10.0)) < total()
    assert total(cluster=ClusterSpec(1, 4, 400.0, 50.0, 0.0)) < total()


def test_an_axis_between_nodes_takes_the_network():
    def token_s(strategy: str, cluster: ClusterSpec) -> float:
        return group_cost(program(strategy), cluster, 400.0).per_token_s

    assert token_s("tp4", PAIR) > 2 * token_s("tp4", NODE)
    assert token_s("dp2.tp2", PAIR) == token_s("dp2.tp2", NODE)  # its tp is inside of a node
    assert token_s("cp2.tp2", NODE) < token_s("cp2.tp2", PAIR) < token_s("tp4", PAIR)
    capped = ClusterSpec(2, 2, 400.0, 50.0, 10.0, node_gb_per_s=20.0)
    assert token_s("tp4", capped) > 2 * token_s("tp4", PAIR)


def test_which_axes_leave_a_node():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert not link_crosses_nodes(mesh, "tp", PAIR.node_of)
    assert link_crosses_nodes(mesh, "dp", PAIR.node_of)
    assert link_crosses_nodes(mesh, "dp.tp", PAIR.node_of)
    assert link_crosses_nodes(Mesh((("tp", 2),), 1), "tp", PAIR.node_of)
    assert not link_crosses_nodes(Mesh((("tp", 2),), 2), "tp", PAIR.node_of)


def test_collectives_are_those_of_the_body():
    """Bytes that grow with T are what the ExecGraph says of its body; ZeRO-3 gathers weights in every micro-batch."""
    for strategy in ("tp4", "cp4", "tp4+sp", "dp4"):
        work, lowered = body_work(program(strategy)), program(strategy)
        (dim,) = lowered.dims
        mesh = lowered.strategy.mesh
        body = [c for c in lowered.communications() if c.part == "body"]
        sent = sum(c.wire_bytes(mesh.degree(c.axis), {dim.symbol: 4096}) for c in body)
        assert float(sum(t.sent_bytes.at(4096) for t in work.traffic)) == pytest.approx(sent)
    assert body_work(program("dp4")).traffic == ()
    gathered = sum(t.sent_bytes.c0 for t in body_work(program("dp4+zero3")).traffic)
    assert gathered > 2 * PRODUCT_WEIGHTS


def test_weights_are_read_once_per_micro_batch():
    """The constant part: forward and backward read each weight of two bytes, and write its gradient."""
    constant = float(body_work(program("dp4")).memory_bytes.c0)
    assert constant == pytest.approx(3 * 2 * PRODUCT_WEIGHTS, rel=0.15)


def test_window_is_linear_and_full_attention_is_not_halved():
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.into(x).view(1, -1, 2, 8).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(1, -1, 16)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return losses.mse_sum(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(1, 13, 16), "y": torch.randn(1, 13, 16)}
    full = lower(capture(Windowed(), loss, batch, dynamic={"x": {1: "T"}, "y": {1: "T"}}), "dp1")
    assert body_work(full).attention_flops.c2 == 3.5 * 4 * 16
    for node in full.body.graph.nodes:
        if str(node.target).startswith("fxpar.attention"):
            node.args = (*node.args[:-4], True, 100, *node.args[-2:])
    windowed = body_work(full).attention_flops
    assert windowed.c2 == 0
    assert windowed.c1 == 3.5 * 4 * 16 * 100


def test_models_without_tokens():
    work = body_work(lower(mlp().graph, "dp2"))
    assert work.product_flops.c1 > 0
    assert work.attention_flops.c2 == 0


# ------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_cannot_be(bad):
    with pytest.raises(CostModelError, match="per_token_s"):
        GroupCost(0.0, bad, 0.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rates_that_cannot_be(rate):
    with pytest.raises(CostModelError, match="device_tflops"):
        group_cost(program("dp4"), NODE, rate)
    with pytest.raises(CostModelError, match="memory_gb_per_s"):
        group_cost(program("dp4"), NODE, 400.0, memory_gb_per_s=rate)


def test_negative_launch():
    with pytest.raises(CostModelError, match="launch_us"):
        group_cost(program("dp4"), NODE, 400.0, launch_us=-1.0)


def test_cluster_with_too_few_devices():
    with pytest.raises(ClusterError, match="too small"):
        group_cost(program("dp4"), ClusterSpec(1, 2, 400.0, 50.0, 10.0), 400.0)
