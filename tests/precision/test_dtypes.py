"""What `with_precision` makes of a graph: every node has the dtype that it says, islands are where they should be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from fxpar.ir.graph import LogicalGraph
from fxpar.ir.printer import format_graph
from fxpar.precision import Precision, with_precision
from fxpar.torch_api import kernels
from tests import captured
from tests.precision.runs import (
    BF16,
    EVERY_RUN,
    EVERYTHING_LOW,
    LOW,
    MODELS,
    WIDE,
    calls,
    capture_small,
    case,
    floats,
    param_dtypes,
    run,
)
from tests.repeat import crossed, thinned

aten, own = torch.ops.aten, torch.ops.fxpar


# ------------------------------------------------------------------------------------------------ dtypes are real
@pytest.mark.parametrize(
    ("spec", "precision"),
    thinned(
        [*((spec, BF16) for spec in MODELS), ("llama", EVERYTHING_LOW), ("hf:gpt2", EVERYTHING_LOW)],
        [*((spec, BF16) for spec in EVERY_RUN if spec != "vit"), ("llama", EVERYTHING_LOW)],
    ),
)
def test_every_node_has_the_dtype_that_it_says(spec, precision):
    found = case(spec)
    graph = with_precision(found.graph, precision)
    results = run(graph, found.loaded.params(), found.loaded.buffers(), found.loaded.example_batch)
    dtypes = param_dtypes(graph)
    for out, value in zip(graph.outputs, results, strict=True):
        assert value.dtype == (dtypes[out.fqn] if out.kind == "grad" else WIDE)
    for node, info in zip(graph.placeholders, graph.inputs, strict=True):
        assert node.meta["tensor"] == info.meta


@pytest.mark.parametrize(
    ("text", "name"),
    crossed(
        ["bf16", "fp32", "bf16+low(norms|softmax|loss)"],
        ["norms", "counter", "shared", "sizes", "adapted", "experts", "routed"],
    ),
)
def test_odd_models_captured_in_float64(name, text):
    found = captured.odd(name)
    precision = Precision.parse(text)
    graph = with_precision(found.graph, precision)
    results = run(graph, found.params, found.buffers, found.batches[0])
    before = run(found.graph, found.params, found.buffers, found.batches[0])
    dtypes = param_dtypes(graph)
    assert set(dtypes.values()) <= {precision.param_dtype, torch.float64}
    for out, value, old in zip(graph.outputs, results, before, strict=True):
        assert value.dtype == (dtypes[out.fqn] if out.kind == "grad" else old.dtype)


def test_the_captured_graph_is_left_alone():
    found = case("llama")
    before, inputs = format_graph(found.graph), found.graph.inputs
    graph = with_precision(found.graph, BF16)
    assert format_graph(found.graph) == before
    assert found.graph.inputs is inputs
    assert graph is not found.graph
    assert type(graph) is LogicalGraph


@pytest.mark.parametrize("precision", [Precision(), Precision(torch.float32)], ids=str)
def test_the_captured_dtype_changes_nothing(precision):
    found = case("llama")
    assert with_precision(found.graph, precision) is found.graph


# --------------------------------------------------------------------------------------------------------- islands
NORMS = {
    "llama": ("attention_norm", "ffn_norm", "norm"),
    "gpt": ("norm_1", "norm_2", "norm"),
    "hf:gpt2": ("ln_1", "ln_2", "ln_f"),
    "hf:gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "norm",
    ),
}
MOVES = {aten.view.default, aten.t.default, aten.expand.default}


@pytest.mark.parametrize("spec", thinned(NORMS, ["gpt", "hf:gemma2"]))
def test_norms_are_islands_forward_and_backward(spec):
    graph = case(spec).bf16
    seen = Counter()
    for node in calls(graph):
        last = node.meta["fqn"].rpartition(".")[2]
        if last in NORMS[spec] and node.target is not kernels.to_copy and floats(node):
            seen[last, bool(node.meta["backward"])] += 1
            assert floats(node) == {WIDE}, node.format_node()
    assert {key for key, _ in seen} == set(NORMS[spec])
    assert all(seen[name, True] for name in NORMS[spec])


@pytest.mark.parametrize("spec", thinned(["llama", "gpt", "hf:gpt2", "hf:qwen2", "hf:gemma2"], ["gpt", "hf:gemma2"]))
def test_norm_parameters_stay_wide_and_all_others_are_low(spec):
    for fqn, dtype in param_dtypes(case(spec).bf16).items():
        owner = fqn.rpartition(".")[0].rpartition(".")[2]
        assert dtype == (WIDE if "norm" in owner or owner.startswith("ln_") else LOW), fqn


@pytest.mark.parametrize("spec", thinned(["llama", "gpt", "hf:gpt2", "hf:qwen2", "hf:gemma2"], ["gpt", "hf:gemma2"]))
def test_products_are_low(spec):
    products = calls(case(spec).bf16, aten.mm.default, aten.bmm.default)
    assert len(products) > 20
    assert all(floats(node) == {LOW} for node in products)


def test_attention_and_logits_go_in_uncast():
    graph = case("llama").bf16
    (attention, *_) = calls(graph, own.attention.default)
    assert [m.dtype for m in attention.meta["tensor"]] == [LOW, WIDE]
    (loss,) = calls(graph, own.cross_entropy.default)
    logits = loss.args[0]
    assert logits.target is aten.mm.default
    assert floats(logits) == {LOW}
    assert floats(loss) == {WIDE}
    (backward,) = calls(graph, own.cross_entropy_backward.default)
    assert floats(backward) == {LOW}
    vocab = case("llama").loaded.params()["head.weight"].shape[0]
    tokens = case("llama").graph.dims[0].symbol
    assert not [n for n in calls(graph) if floats(n) == {WIDE} and f"[{tokens}, {vocab}]" in str(n.meta["tensor"])]


def test_the_loss_is_wide_from_the_cross_entropy_on():
    graph = case("llama").bf16
    ordered = calls(graph)
    first = ordered.index(calls(graph, own.cross_entropy.default)[0])
    last = ordered.index(calls(graph, own.cross_entropy_backward.default)[0])
    assert last - first > 10
    assert all(floats(node) <= {WIDE} for node in ordered[first:last])


def test_rotary_tables_are_made_wide_and_cast_once():
    graph = case("llama").bf16
    for table in calls(graph, aten.cos.default, aten.sin.default):
        assert floats(table) == {WIDE}
        assert [user.target for user in table.users] == [kernels.to_copy]
    assert len(calls(graph, aten.cos.default)) == 1


def test_layers_stay_alike():
    text = format_graph(case("llama").bf16)
    assert "layers.1: as layers.0" in text
    assert "_to_copy(" in text


def test_softmax_is_an_island():
    class Scores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(-1) * 2.0

    graph = with_precision(capture_small(nn.Sequential(Scores(6, 7), nn.Linear(7, 3))).graph, BF16)
    for node in calls(graph, aten._softmax.default, aten._softmax_backward_data.default):
        assert floats(node) == {WIDE}
    (doubled,) = [n for n in calls(graph, aten.mul.Tensor, aten.mul.Scalar) if n.meta["fqn"] == "0"][:1]
    assert floats(doubled) == {LOW}
    off = Precision.parse("bf16+low(softmax)")
    low = with_precision(capture_small(nn.Sequential(Scores(6, 7), nn.Linear(7, 3))).graph, off)
    assert floats(calls(low, aten._softmax.default)[0]) == {LOW}


def test_the_backward_of_logsumexp_is_an_island():
    """exp(x - lse) with a bf16 lse of 500 would be wrong by a factor of up to e."""

    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) + 500.0).logsumexp(-1, keepdim=True) - 500.0

    torch.manual_seed(0)
    found = capture_small(nn.Sequential(Gate(6, 7), nn.Linear(1, 3)))
    graph = with_precision(found.graph, BF16)
    (weights,) = calls(graph, aten.exp.default)
    assert floats(weights) == {WIDE}


def test_a_norm_is_known_by_what_it_computes():
    graph = with_precision(
        capture_small(nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.LayerNorm(8), nn.Linear(8, 3))).graph, BF16
    )
    wide = {fqn for fqn, dtype in param_dtypes(graph).items() if dtype == WIDE}
    assert wide == {"1.weight", "2.weight", "2.bias"}


def test_norms_can_be_low():
    graph = with_precision(case("gpt").graph, Precision.parse("bf16+low(norms)"))
    assert set(param_dtypes(graph).values()) == {LOW}
    assert LOW in floats(calls(graph, aten.native_layer_norm.default)[0])


def test_running_statistics_stay_wide_whatever_the_norms_do():
    graph = with_precision(captured.odd("norms").graph, EVERYTHING_LOW)
    norms = [n for n in calls(graph) if "batch_norm" in str(n.target)]
    assert norms
    assert all(floats(n) == {torch.float64} for n in norms)


def test_a_moving_average_stays_wide():
    """0.9 * average + 0.1 * value: in bf16 the steps of a settled average round away."""
    graph = with_precision(captured.odd("counter").graph, BF16)
    (new,) = [n for n, out in zip(graph.results, graph.outputs, strict=True) if out.fqn == "average"]
    assert new.target is aten.add.Tensor
    assert floats(new) == {torch.float64}


def test_rows_are_added_wide_and_written_low():
    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            index = torch.zeros(y.shape[0], dtype=torch.int64)
            return torch.zeros_like(y).index_put((index,), y, accumulate=True).index_put((index[:1],), y[:1])

    found = capture_small(nn.Sequential(Rows(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    added, written = [n for n in calls(graph, aten.index_put.default) if not n.meta["backward"]]
    assert (floats(added), floats(written)) == ({WIDE}, {LOW})
    run(graph, found.params, found.buffers, found.batches[0])


def test_globs_make_islands_of_modules_and_all_inside():
    found = case("llama")
    graph = with_precision(found.graph, Precision.parse("bf16+fp32(*.ffn|head)"))
    for fqn, dtype in param_dtypes(graph).items():
        assert dtype == (WIDE if "ffn" in fqn or "norm" in fqn or fqn == "head.weight" else LOW), fqn
    # Views at the edge lie in the dtype of their readers.
    inside = [n for n in calls(graph) if ".ffn." in n.meta["fqn"] and n.target not in {kernels.to_copy, *MOVES}]
    assert {bool(n.meta["backward"]) for n in inside} == {False, True}
    assert all(floats(n) <= {WIDE} for n in inside)
    (loss,) = calls(graph, own.cross_entropy.default)
    assert floats(loss.args[0]) == {WIDE}


def test_everything_an_island_is_the_captured_graph():
    found = case("llama")
    graph = with_precision(found.graph, Precision.parse("bf16+fp32(*)"))
    assert format_graph(graph) == format_graph(found.graph)


def test_a_loss_written_by_hand_begins_behind_the_last_parameter():
    def loss(model: nn.Module, batch) -> Tensor:
        gap = model(batch["x"]) - batch["y"]
        return (gap.abs() + gap.exp()).sum()

    graph = with_precision(capture_small(nn.Linear(6, 4), loss=loss).graph, BF16)
    for node in calls(graph, aten.sub.Tensor, aten.abs.default, aten.exp.default, aten.sgn.default):
        assert floats(node) == {WIDE}
    assert all(floats(n) == {LOW} for n in calls(graph, aten.mm.default))
    low = with_precision(capture_small(nn.Linear(6, 4), loss=loss).graph, Precision.parse("bf16+low(loss)"))
    assert floats(calls(low, aten.exp.default)[0]) == {LOW}
