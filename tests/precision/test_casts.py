"""Casts are few and where they should be, forwards keep their interface, and mistakes are named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import PrecisionDtypeError, PrecisionGlobError
from fxpar.ir.graph import ForwardGraph
from fxpar.models import load
from fxpar.precision import Precision, with_precision
from fxpar.torch_api import kernels
from fxpar.tracer import capture_forward
from tests import captured
from tests.precision.runs import (
    BF16,
    EVERY_RUN,
    LOW,
    MODELS,
    WIDE,
    calls,
    capture_small,
    case,
    casts,
    floats,
    param_dtypes,
    run,
)
from tests.repeat import thinned

aten, own = torch.ops.aten, torch.ops.fxpar


# ------------------------------------------------------------------------------------------------------------ casts
@pytest.mark.parametrize("spec", thinned(MODELS, EVERY_RUN))
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
