"""What each call costs, read off lowered programs: textbook counts, what an axis divides, what is sent."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxpar import losses
from fxpar.cost import calls
from fxpar.cost.calls import NodeCost, busy_s, handed_on_s, node_costs
from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.ops import SizesAt, is_plain
from fxpar.cost.polynomial import Polynomial, sent_bytes
from fxpar.ir.graph import TensorMeta
from fxpar.ir.node_meta import is_backward
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.lowering import lower
from fxpar.ops.traits import ATTENTION
from fxpar.tracer import capture
from tests.captured import mlp
from tests.cost.programs import DEVICE, DIM, FFN, LAYERS, NODE, PAIR, VOCAB, program

own = torch.ops.fxpar
PRODUCT_WEIGHTS = LAYERS * (4 * DIM * DIM + 3 * DIM * FFN) + DIM * VOCAB
# Causal: 2 * E * len**2 per head forward (two products of 2 * len**2 * E, half of them), 2.5 times that backward.
ATTENTION_PER_SQUARE = 3.5 * 2 * LAYERS * DIM
STRATEGIES = ("dp4", "tp4", "cp4", "dp2.tp2", "cp2.tp2", "tp4+sp", "ring4", "cp2.ring2")


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


def test_collectives_are_those_of_the_body():
    """Bytes that grow with T are what the TrainGraph says of its body; ZeRO-3 gathers weights in every micro-batch."""
    for strategy in ("tp4", "cp4", "tp4+sp", "dp4", "ring4"):
        lowered = program(strategy)
        (dim,) = lowered.dims
        mesh = lowered.strategy.mesh
        body = [c for c in lowered.communications() if c.part == "body"]
        sent = sum(c.wire_bytes(mesh.degree(c.axis), {dim.symbol: 4096}) for c in body)
        assert float(sum(call.nbytes.at(4096) for call in collectives(lowered))) == pytest.approx(sent)
    assert collectives(program("dp4")) == []
    gathered = sum(call.nbytes.c0 for call in collectives(program("dp4+zero3")))
    assert gathered > 2 * PRODUCT_WEIGHTS


def test_calls_with_equal_operands_are_priced_once(monkeypatch):
    """As each of them alone, also where programs of other strategies, and for other devices, were priced before."""
    priced = [(program(name), cluster) for cluster in (NODE, on(**HALVES)) for name in ("tp4+sp", "dp4", "dp4+offload")]
    found = [node_costs(*one) for one in priced]
    called, work_out = [], calls._Walk._called
    monkeypatch.setattr(calls._Walk, "_called", lambda walk, node: called.append(node.target) or work_out(walk, node))
    assert node_costs(*priced[1]) == found[1]
    assert called
    assert not any(map(is_plain, called))
    monkeypatch.setattr(calls, "is_plain", lambda target: False)
    assert found == [node_costs(*one) for one in priced]
    assert len({id(one.seconds) for one in found[0]}) < len(found[0]) / 2


def test_copies_to_the_host_take_its_link():
    """Both ways, at the rate of the device's link; everything else costs what it does without them."""
    lowered = program("dp4+offload")
    plain, moved = node_costs(program("dp4"), NODE), node_costs(lowered, NODE)
    (dim,), copies = lowered.dims, [call for call in moved if call.kind == "host"]
    values = [n.meta["local"] for n in lowered.parts["body"].graph.nodes if n.target is own.to_host.default]
    nbytes = sum(value.numel({dim.symbol: 4096}) * value.dtype.itemsize for value in values)
    assert float(sum(call.nbytes.at(4096) for call in copies)) == pytest.approx(2 * nbytes)
    device = replace(DEVICE, host_gb_per_s=10.0, launch_us=0.0)
    found = node_costs(lowered, replace(NODE, device=device))
    seconds = float(sum(call.seconds.at(4096) for call in found if call.kind == "host"))
    assert seconds == pytest.approx(2 * nbytes / 10e9)
    assert [call for call in moved if call.kind == "product"] == [call for call in plain if call.kind == "product"]


def test_how_long_calls_keep_a_device_busy_is_of_their_half():
    """What stages, recomputation and compressed layers ask for."""
    lowered = program("dp4")
    (dim,) = lowered.dims
    sizes, halved = SizesAt({dim.symbol: 4096}), on(**HALVES)
    rows = [(n, busy_s(n, sizes, NODE), busy_s(n, sizes, halved)) for n in lowered.body.graph.nodes]
    found = {(n.target, is_backward(n)): other / one for n, one, other in rows if one and other}
    product, attention = torch.ops.aten.mm.default, (own.attention.default, own.attention_backward.default)
    assert (found[product, False], found[product, True]) == (1, 4)
    assert (found[attention[0], False], found[attention[1], True]) == (1, 2)


def test_what_tells_products_apart():
    """Operands of other shapes in another order, and the one that is added."""
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    for node, shape in ((a, (4, 8)), (b, (8, 4)), (c, (4, 4))):
        node.meta["tensor"] = TensorMeta(shape, torch.float32)
    mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    made = [graph.call_function(mm, (a, b)), graph.call_function(addmm, (c, a, b)), graph.call_function(mm, (c, c))]
    made += [graph.call_function(addmm, (c, c, c)), graph.call_function(torch.ops.aten.add.Tensor, (c, c))]
    for node in made:
        node.meta["tensor"] = TensorMeta((4, 4), torch.float32)

    def looks(node: fx.Node) -> tuple:
        return calls._looks(node, calls._Way.of(node.target))

    assert len({looks(node) for node in made}) == len(made)
    again = graph.call_function(mm, (a, b))
    again.meta["tensor"] = TensorMeta((4, 4), torch.float32)
    assert looks(again) == looks(made[0])
    attention = next(n for n in program("dp4").body.graph.nodes if n.target in ATTENTION)
    assert not calls._Way.of(attention.target).is_plain


def collectives(lowered: TrainGraph, cluster: ClusterSpec = NODE) -> list[NodeCost]:
    return [call for call in node_costs(lowered, cluster) if call.axis]


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


def test_products_take_the_speed_of_their_dtype():
    """All parameters are bfloat16; what is computed in float32 are no products."""

    def with_speeds(**tflops: float) -> list[NodeCost]:
        return node_costs(program("dp4"), replace(NODE, device=replace(DEVICE, tflops=tflops)))

    usual, no_wide, slow = (
        with_speeds(bfloat16=400.0),
        with_speeds(bfloat16=400.0, float32=1.0),
        with_speeds(bfloat16=1.0),
    )
    assert usual == no_wide == node_costs(program("dp4"), NODE)
    one, other = (next(call.seconds for call in calls if call.kind == "attention") for calls in (usual, slow))
    assert other.c2 == 400 * one.c2


def test_one_call_keeps_the_device_busy_for_what_its_walk_says_without_launch():
    """At the sizes of a micro-batch: arithmetic of products, memory of others, the links for collectives."""
    lowered = program("tp4+sp")
    shape = SizesAt({dim.symbol: 4096 for dim in lowered.dims})
    found = {node.name: busy_s(node, shape, NODE) for node in lowered.body.graph.nodes}
    for call in node_costs(lowered, NODE):
        if call.kind in ("product", "attention"):
            assert found[call.name] == pytest.approx(float(call.flops.at(4096)) / 400e12)
        elif call.kind == "memory":
            passes = {"cross_entropy": 6, "cross_entropy_backward": 3}.get(call.name, 1)
            assert found[call.name] == pytest.approx(float(call.nbytes.at(4096)) / passes / 2000e9)
        else:
            assert found[call.name] > 0
    views = [
        node for node in lowered.body.graph.nodes if "reshape" in str(node.target) or "getitem" in str(node.target)
    ]
    assert views
    assert {found[node.name] for node in views} == {0.0}


# ------------------------------------------------------------------------------------------------------------- links
def test_an_exchange_takes_the_network_for_what_leaves_the_node_and_a_ring_for_all_of_it():
    """Of three quarters of a tensor that leave a rank, two go to the other node."""
    pairs = zip(collectives(program("cp4")), collectives(program("cp4"), PAIR), strict=True)
    for inside, between in pairs:
        slower = Fraction(400, 50) * (Fraction(2, 3) if between.kind == "all_to_all" else 1)
        assert between.seconds.c1 == slower * inside.seconds.c1
        assert between.nbytes == inside.nbytes
    assert {call.kind for call in collectives(program("cp4"))} > {"all_to_all"}


def test_the_network_of_a_node_is_shared():
    capped = replace(PAIR, node_gb_per_s=20.0)
    assert [float(cluster.bytes_per_s(True)) for cluster in (PAIR, capped)] == [50e9, 10e9]
    assert float(capped.bytes_per_s(False)) == 400e9


def test_a_message_takes_the_link_between_its_two_stages():
    """Four stages of one rank on two nodes: only the second and the third have the network between them."""
    pipeline = program("pp4+cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)")
    inside, between = (
        sent_bytes(pipeline.stages[0], [next(iter(pipeline.stages[0].given("sent").values())).local])
        * (1 / (gb * 10**9))
        for gb in (Fraction(400), Fraction(50))
    )
    latency = Polynomial(Fraction(10, 10**6))
    forward = [handed_on_s(pipeline, stage, "sent", PAIR) for stage in range(3)]
    assert forward == [inside + latency, between + latency, inside + latency]
    assert [handed_on_s(pipeline, stage, "sent_grad", PAIR) for stage in (1, 2, 3)] == forward


def of_kind(cluster, kind: str, strategy: str = "dp4") -> list[NodeCost]:
    return [call for call in node_costs(program(strategy), cluster) if call.kind == kind]


def on(**figures: Any):
    return replace(NODE, device=replace(DEVICE, **figures))


@pytest.mark.parametrize(
    ("strategy", "stage", "pairs"),
    [("pp4+cut(layers.0.ffn_norm|layers.1|layers.1.ffn_norm)", 1, 1), ("pp2.tp2+cut(layers.1)", 0, 2)],
)
def test_only_messages_that_leave_a_node_share_its_network(strategy, stage, pairs):
    free, capped, one_node = (
        handed_on_s(program(strategy), stage, "sent", cluster).at(4096)
        for cluster in (
            ClusterSpec(2, 2, 400.0, 50.0, 0.0),
            ClusterSpec(2, 2, 400.0, 50.0, 0.0, node_gb_per_s=50.0),
            ClusterSpec(1, 4, 400.0, 50.0, 0.0, node_gb_per_s=1.0),
        )
    )
    assert (capped / free, one_node / free) == (pairs, Fraction(1, 8))


def test_small_tensors_take_their_time_from_a_cache_and_large_ones_hide_no_longer():
    cached = on(cache_mb=4.0, cache_gb_per_s=20_000.0)
    for plain, call in zip(of_kind(NODE, "memory"), of_kind(cached, "memory"), strict=True):
        assert call.nbytes == plain.nbytes
        assert call.seconds.at(4096) <= plain.seconds.at(4096)
    (forward,) = (call for call in of_kind(cached, "memory") if call.name == "cross_entropy")
    logits = 2 * 4096 * VOCAB  # bytes; read once from memory, and five times more in blocks that a cache holds
    assert float(forward.seconds.at(4096)) == pytest.approx(logits / 2e12 + 5 * logits / 20e12 + 4e-6, rel=0.01)
    pairs = zip(of_kind(NODE, "product"), of_kind(cached, "product"), strict=True)
    longer = max(float(call.seconds.at(4096) - one.seconds.at(4096)) for one, call in pairs)
    assert longer == pytest.approx(logits / 2e12, rel=0.2)  # forward writes the logits, backward reads their gradient


def test_a_share_of_what_products_read_and_write_takes_time():
    """Weights in full, as they do without it; what grows with the tokens by its share; attention likewise."""
    rate = 2000 * 10**9
    for kind in ("product", "attention"):
        share = {"bfloat16": 0.5, "float32": 7.0}
        for one, other in zip(of_kind(NODE, kind), of_kind(on(exposed_traffic=share), kind), strict=True):
            assert other.seconds.c1 - one.seconds.c1 == other.nbytes.c1 / 2 / rate > 0
            assert (other.seconds.c0, other.seconds.c2) == (one.seconds.c0, one.seconds.c2)


HALVES = {
    "backward_tflops": {"bfloat16": 100.0},
    "backward_attention_tflops": 200.0,
    "backward_attention_block": 512.0,
    "backward_exposed_traffic": 0.5,
}


@pytest.mark.parametrize("kind", ["product", "attention", "memory"])
def test_the_backward_has_its_own_figures(kind):
    """Products four times as long, attention twice; the forward and what has no arithmetic are as they were."""
    plain, halves = of_kind(NODE, kind), of_kind(on(**HALVES), kind)
    assert {one.backward for one in plain} == {False, True}
    for one, other in zip(plain, halves, strict=True):
        if kind == "memory" or not one.backward:
            assert other == one
        elif kind == "product":
            work = one.flops.c1 * (1 / Fraction(100 * 10**12) - 1 / Fraction(400 * 10**12))
            assert other.seconds.c1 - one.seconds.c1 == work + one.nbytes.c1 / 2 / (2000 * 10**9)
        else:
            assert (other.seconds.c2, other.flops.c1) == (2 * one.seconds.c2, 512 * one.flops.c2)


def test_attention_computes_with_half_a_block_more():
    plain, blocks = of_kind(NODE, "attention"), of_kind(on(attention_block=512.0, attention_tflops=100.0), "attention")
    for one, other in zip(plain, blocks, strict=True):
        assert other.flops.c2 == one.flops.c2
        assert other.flops.c1 == 512 * one.flops.c2  # (n + 512) * n instead of n * n
        assert other.seconds.c2 == 4 * one.seconds.c2
    table = on(attention_block={"float32": 512.0, "bfloat16": 64.0}, attention_tflops=100.0)
    for one, other in zip(plain, of_kind(table, "attention"), strict=True):
        assert other.flops.c1 == 64 * one.flops.c2  # the model's dtype


def test_all_reduces_have_links_of_their_own():
    slow = replace(NODE, all_reduce_gb_per_s=100.0, all_reduce_latency_us=1000.0)
    for plain, call in zip(of_kind(NODE, "all_reduce", "tp4"), of_kind(slow, "all_reduce", "tp4"), strict=True):
        assert call.seconds.c1 == 4 * plain.seconds.c1
        assert call.seconds.c0 == plain.seconds.c0 + Fraction(990, 10**6)
    assert of_kind(slow, "all_gather", "tp4+sp") == of_kind(NODE, "all_gather", "tp4+sp")
