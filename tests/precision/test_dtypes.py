"""What `with_precision` makes of a graph: every node has the dtype that it says, islands are where they should be."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import PrecisionDtypeError, PrecisionGlobError
from fxpar.graph import ForwardGraph, LogicalGraph, TensorMeta
from fxpar.models import load
from fxpar.precision import Precision, with_precision
from fxpar.printer import format_graph
from fxpar.torch_api import kernels
from fxpar.tracer import capture_forward
from tests import captured
from tests.precision.runs import BF16, EVERYTHING_LOW, MODELS, case, run

aten, own = torch.ops.aten, torch.ops.fxpar
LOW, WIDE = torch.bfloat16, torch.float32


def calls(graph: LogicalGraph, *targets) -> list:
    return [n for n in graph.gm.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]


def casts(graph: LogicalGraph) -> list:
    return calls(graph, kernels.to_copy)


def floats(node) -> set[torch.dtype]:
    meta = node.meta.get("tensor")
    metas = meta if isinstance(meta, tuple) else (meta,)
    return {m.dtype for m in metas if isinstance(m, TensorMeta) and m.dtype.is_floating_point}


def param_dtypes(graph: LogicalGraph) -> dict[str, torch.dtype]:
    return {info.fqn: info.meta.dtype for info in graph.params()}


def capture_small(model: nn.Module, dtype: torch.dtype = WIDE, loss=captured.squared) -> captured.Captured:
    width = next(model.parameters()).shape[-1]
    with torch.no_grad():
        out = model(torch.randn(3, width)).shape[-1]
    return captured.take(model, loss, captured.vectors(width, out, 5), dtype)


# ------------------------------------------------------------------------------------------------ dtypes are real
@pytest.mark.parametrize(
    ("spec", "precision"), [*((spec, BF16) for spec in MODELS), ("llama", EVERYTHING_LOW), ("hf:gpt2", EVERYTHING_LOW)]
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


@pytest.mark.parametrize("text", ["bf16", "fp32", "bf16+low(norms|softmax|loss)"])
@pytest.mark.parametrize("name", ["norms", "counter", "shared", "sizes", "adapted", "experts"])
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


@pytest.mark.parametrize("spec", NORMS)
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


@pytest.mark.parametrize("spec", ["llama", "gpt", "hf:gpt2", "hf:qwen2"])
def test_norm_parameters_stay_wide_and_all_others_are_low(spec):
    for fqn, dtype in param_dtypes(case(spec).bf16).items():
        owner = fqn.rpartition(".")[0].rpartition(".")[2]
        assert dtype == (WIDE if "norm" in owner or owner.startswith("ln_") else LOW), fqn


@pytest.mark.parametrize("spec", ["llama", "gpt", "hf:gpt2", "hf:qwen2"])
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
    graph = with_precision(case("hf:gpt2").graph, Precision.parse("bf16+low(norms)"))
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


# ------------------------------------------------------------------------------------------------------------ casts
@pytest.mark.parametrize("spec", MODELS)
def test_casts_are_needed_and_made_once(spec):
    graph = case(spec).bf16
    made: dict = {}
    for cast in casts(graph):
        source, dtype = cast.args[0], cast.kwargs["dtype"]
        assert source.meta["tensor"].dtype != dtype
        # Down and up again would lose what an island has computed; up and down again is for nothing.
        assert source.target is not kernels.to_copy
        assert cast.users
        made.setdefault((source, dtype), []).append(cast)
    assert all(len(again) <= 2 for again in made.values())
    for (source, dtype), again in made.items():
        if len(again) == 2:  # the backward widens a value of the forward again instead of keeping it wide
            assert dtype == WIDE
            assert source.op != "placeholder"
            assert [bool(c.meta["backward"]) for c in again] == [False, True]


def test_a_parameter_of_islands_and_others_is_low_and_cast_up_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.head.weight = self.into.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.head(torch.tanh(self.into(x))))

    graph = with_precision(capture_small(Tied()).graph, Precision.parse("bf16+fp32(head)"))
    (weight,) = [n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "param"]
    assert floats(weight) == {LOW}
    assert len([u for u in weight.users if u.target is kernels.to_copy]) == 1
    assert {floats(n).pop() for n in calls(graph, aten.mm.default)} == {LOW, WIDE}


def test_frozen_and_unused_parameters():
    dtypes = param_dtypes(with_precision(captured.odd("counter").graph, BF16))
    assert dtypes["frozen"] == LOW
    assert dtypes["unused"] == torch.float64  # nobody reads it


def test_casts_of_the_user_keep_their_dtype():
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y.double().exp().sum(-1, keepdim=True) + 1.0).to(y.dtype) * y

    found = capture_small(nn.Sequential(Wide(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    (exp,) = calls(graph, aten.exp.default)
    assert floats(exp) == {torch.float64}
    (up,) = [n for n in casts(graph) if n.kwargs["dtype"] == torch.float64 and not n.meta["backward"]]
    assert floats(up.args[0]) == {LOW}
    run(graph, found.params, found.buffers, found.batches[0])


def test_a_way_down_and_up_of_the_user_costs_nothing():
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to(torch.bfloat16).float() * 2.0

    found = capture_small(nn.Sequential(Rounded(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    assert [n for n in casts(graph) if n.meta["fqn"] == "0"] == []
    run(graph, found.params, found.buffers, found.batches[0])


def test_repeated_dtypes_follow_and_constants_are_made_low():
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y = y.sum(0, keepdim=True, dtype=torch.float32) + y
            return y + torch.where(y > 0, y, torch.zeros(y.shape[-1]))

    found = capture_small(nn.Sequential(Picky(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    sums = [n for n in calls(graph, aten.sum.dim_IntList) if "dtype" in n.kwargs]
    assert sums
    assert all(n.kwargs["dtype"] == LOW for n in sums)
    assert all(floats(n) == {LOW} for n in calls(graph, aten.zeros.default) if n.meta["fqn"] == "0")
    run(graph, found.params, found.buffers, found.batches[0])


def test_a_mask_of_the_least_number_hides_and_is_not_infinite():
    """fp32's least number is -inf in bf16, and the softmax of a row of -inf is NaN."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            hidden = torch.ones(y.shape[-1], y.shape[-1], dtype=torch.bool).tril()[:1] < 1
            least = torch.finfo(torch.float32).min
            mask = torch.zeros(1, y.shape[-1]).masked_fill(hidden | True, least)
            return (y + mask).softmax(-1).masked_fill(hidden, least * 0.0)

    found = capture_small(nn.Sequential(Masked(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    results = run(graph, found.params, found.buffers, found.batches[0])
    assert all(bool(r.isfinite().all()) for r in results)
    numbers = [a for n in calls(graph) for a in n.args if isinstance(a, float) and math.isfinite(a)]
    assert min(numbers) == torch.finfo(LOW).min


def test_a_number_without_dims_is_not_rounded():
    """It promotes nothing: bf16[...] * f32[] is bf16 with one rounding, of the product."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor(1 / 3)

    found = capture_small(nn.Sequential(Scaled(6, 5), nn.Linear(5, 3)))
    graph = with_precision(found.graph, BF16)
    (number,) = [n for n, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "constant"]
    assert number.users
    assert kernels.to_copy not in {user.target for user in number.users}
    run(graph, found.params, found.buffers, found.batches[0])


# ------------------------------------------------------------------------------------------------------- forwards
def test_a_forward_keeps_its_class_and_what_it_returns():
    loaded = load("llama")
    inputs = {k: v for k, v in loaded.example_batch.items() if k != "labels"}
    forward = capture_forward(loaded.model, (), inputs)
    graph = with_precision(forward, BF16)
    assert type(graph) is ForwardGraph
    assert graph.structure == forward.structure
    assert set(param_dtypes(graph).values()) == {LOW, WIDE}
    tokens = inputs["input_ids"].shape[-1]
    sources: dict = {"param": loaded.params(), "buffer": loaded.buffers(), "batch": inputs, "constant": graph.constants}
    values = []
    for info in graph.inputs:
        shape = tuple(s if isinstance(s, int) else tokens for s in info.meta.shape)
        made = torch.ones(shape) if info.kind in ("seed", "tangent") else sources[info.kind][info.fqn]
        values.append(made.to(info.meta.dtype))
    assert any(i.kind == "tangent" and i.meta.dtype == WIDE for i in graph.inputs)
    with torch.no_grad():
        results = graph.gm(*values)
    dtypes = param_dtypes(graph)
    for out, value in zip(graph.outputs, results, strict=True):
        assert value.dtype == (dtypes[out.fqn] if out.kind == "grad" else WIDE)


# ----------------------------------------------------------------------------------------------------------- errors
def test_a_glob_that_matches_nothing():
    with pytest.raises(PrecisionGlobError, match=r"'\*\.fnn' matches no module of the model; did you mean '\*\.ffn'"):
        with_precision(case("llama").graph, Precision(LOW, fp32=("*.fnn",)))
    with pytest.raises(PrecisionGlobError, match="head"):
        with_precision(case("llama").graph, Precision(fp32=("haed",)))


def test_a_dtype_wider_than_captured():
    with pytest.raises(PrecisionDtypeError, match="Capture the model in f64"):
        with_precision(case("llama").graph, Precision(torch.float64))
