"""The cost of a micro-batch, read off lowered programs: textbook counts, what each axis divides, links."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxpar import losses
from fxpar.cost.calls import NodeCost, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.device import Device
from fxpar.cost.group import GroupCost, group_cost
from fxpar.cost.links import crosses_nodes
from fxpar.cost.polynomial import Polynomial
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
DEVICE = Device(400.0, 2000.0, 4.0)
NODE = ClusterSpec(1, 4, 400.0, 50.0, 10.0, device=DEVICE)
PAIR = ClusterSpec(2, 2, 400.0, 50.0, 10.0, device=DEVICE)
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


def operations(calls: list[NodeCost], kind: str) -> Polynomial:
    return sum((call.flops for call in calls if call.kind == kind), Polynomial())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flops_are_the_textbook_ones(strategy):
    calls, ranks = node_costs(program(strategy), NODE), ranks_per_replica(strategy)
    products, attention = operations(calls, "product"), operations(calls, "attention")
    assert float(products.c1) * ranks == pytest.approx(6 * PRODUCT_WEIGHTS, rel=0.01)
    assert float(attention.c2) * ranks == pytest.approx(ATTENTION_PER_SQUARE, rel=0.01)
    assert products.c0 == products.c2 == attention.c0 == attention.c1 == 0


def test_a_replica_of_four_ranks_is_four_times_as_fast():
    fast = ClusterSpec(1, 4, 1e9, 1e9, 0.0, device=replace(DEVICE, launch_us=0.0))
    one, four = group_cost(program("dp4"), fast), group_cost(program("cp4"), fast)
    assert four.per_square_s == pytest.approx(one.per_square_s / 4)
    assert four.per_token_s == pytest.approx(one.per_token_s / 4, rel=0.2)
    two = group_cost(program("dp2.tp2"), fast)
    assert two.per_square_s == pytest.approx(one.per_square_s / 2)


@given(st.lists(st.integers(1, 10**6), max_size=5), st.integers(1, 10**6))
def test_cost_is_monotone(lengths, more):
    cost = group_cost_of_tp()
    assert cost.seconds([*lengths, more]) > cost.seconds(lengths)
    assert cost.seconds([*lengths, more + 1]) > cost.seconds([*lengths, more])


@functools.cache
def group_cost_of_tp() -> GroupCost:
    return group_cost(program("tp4"), NODE)


def test_faster_devices_links_and_memory_cost_less():
    def total(cluster: ClusterSpec = NODE, **better: Any) -> float:
        device = replace(cluster.device, **better)
        return group_cost(program("tp4"), replace(cluster, device=device)).seconds([4096])

    assert total(tflops=800.0) < total()
    assert total(memory_gb_per_s=4000.0) < total()
    assert total(launch_us=0.0) < total()
    assert total(replace(NODE, intra_gb_per_s=800.0)) < total()
    assert total(replace(NODE, latency_us=0.0)) < total()


def test_products_take_the_speed_of_their_dtype():
    """All parameters are bfloat16; what is computed in float32 are no products."""
    of_all, of_narrow, of_wide = (
        group_cost(program("dp4"), replace(NODE, device=replace(DEVICE, tflops=tflops)))
        for tflops in (400.0, {"bfloat16": 400.0, "float32": 1.0}, {"bfloat16": 1.0, "float32": 400.0})
    )
    assert of_all == of_narrow
    assert of_wide.per_square_s == pytest.approx(400 * of_all.per_square_s)


def test_an_axis_between_nodes_takes_the_network():
    def token_s(strategy: str, cluster: ClusterSpec) -> float:
        return group_cost(program(strategy), cluster).per_token_s

    assert token_s("tp4", PAIR) > 2 * token_s("tp4", NODE)
    assert token_s("dp2.tp2", PAIR) == token_s("dp2.tp2", NODE)  # its tp is inside of a node
    assert token_s("cp2.tp2", NODE) < token_s("cp2.tp2", PAIR) < token_s("tp4", PAIR)
    capped = replace(PAIR, node_gb_per_s=20.0)
    assert token_s("tp4", capped) > 2 * token_s("tp4", PAIR)


def test_which_axes_leave_a_node():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert not crosses_nodes(mesh, "tp", PAIR)
    assert crosses_nodes(mesh, "dp", PAIR)
    assert crosses_nodes(mesh, "dp.tp", PAIR)
    assert crosses_nodes(Mesh((("tp", 2),), 1), "tp", PAIR)
    assert not crosses_nodes(Mesh((("tp", 2),), 2), "tp", PAIR)


def test_collectives_are_those_of_the_body():
    """Bytes that grow with T are what the ExecGraph says of its body; ZeRO-3 gathers weights in every micro-batch."""
    for strategy in ("tp4", "cp4", "tp4+sp", "dp4"):
        lowered = program(strategy)
        (dim,) = lowered.dims
        mesh = lowered.strategy.mesh
        body = [c for c in lowered.communications() if c.part == "body"]
        sent = sum(c.wire_bytes(mesh.degree(c.axis), {dim.symbol: 4096}) for c in body)
        assert float(sum(call.nbytes.at(4096) for call in collectives(lowered))) == pytest.approx(sent)
    assert collectives(program("dp4")) == []
    gathered = sum(call.nbytes.c0 for call in collectives(program("dp4+zero3")))
    assert gathered > 2 * PRODUCT_WEIGHTS


def collectives(lowered: ExecGraph) -> list[NodeCost]:
    return [call for call in node_costs(lowered, NODE) if call.axis]


def test_weights_are_read_once_per_micro_batch():
    """The constant part: forward and backward read each weight of two bytes, and write its gradient."""
    constant = float(sum(call.nbytes.c0 for call in node_costs(program("dp4"), NODE)))
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
    assert operations(node_costs(full, NODE), "attention").c2 == 3.5 * 4 * 16
    for node in full.body.graph.nodes:
        if str(node.target).startswith("fxpar.attention"):
            node.args = (*node.args[:-4], True, 100, *node.args[-2:])
    windowed = operations(node_costs(full, NODE), "attention")
    assert windowed.c2 == 0
    assert windowed.c1 == 3.5 * 4 * 16 * 100


def test_models_without_tokens():
    calls = node_costs(lower(mlp().graph, "dp2"), NODE)
    assert operations(calls, "product").c1 > 0
    assert operations(calls, "attention") == Polynomial()


# ------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_cannot_be(bad):
    with pytest.raises(CostModelError, match="per_token_s"):
        GroupCost(0.0, bad, 0.0)


def test_cluster_with_too_few_devices():
    with pytest.raises(ClusterError, match="too small"):
        group_cost(program("dp4"), replace(NODE, devices_per_node=2))
