"""A graph in bf16 goes through the lowering as any other: sharded it computes what it computes on one device."""

from __future__ import annotations

import pytest
import torch

from fxpar.checking import check
from fxpar.lowering import lower, lower_forward
from fxpar.precision import Precision, with_precision
from fxpar.torch_api import kernels
from fxpar.tracer import capture_forward
from tests.precision.runs import BF16, case
from tests.repeat import thinned

STRATEGIES = ["tp2+sp", "dp2", "cp2", "dp2.tp2+zero3"]


def low_params(graph, params):
    return {info.fqn: params[info.fqn].to(info.meta.dtype) for info in graph.params()}


@pytest.mark.parametrize("spec", thinned(["llama", "gpt"], ["llama"]))
def test_sharded_equals_unsharded(spec):
    found = case(spec)
    batches = found.loaded.batches[:2]
    params = low_params(found.bf16, found.loaded.params())
    results = check(found.bf16, STRATEGIES, params, found.loaded.buffers(), batches, scale=0.01)
    assert [(r.strategy, r.error) for r in results if not r.ok] == []
    assert any(r.grad_max_rel_err > 0 for r in results)


def test_islands_of_a_user_too():
    found = case("llama")
    graph = with_precision(found.graph, Precision.parse("bf16+fp32(*.ffn|head)"))
    params = low_params(graph, found.loaded.params())
    (result,) = check(graph, ["tp2+sp+remat"], params, found.loaded.buffers(), found.loaded.batches[:1])
    assert result.ok, result


def test_what_a_store_keeps_is_low_and_gradients_leave_wide():
    graph = case("llama").bf16
    program = lower(graph, "dp2.tp2", for_store=True)
    dtypes = {info.fqn: info.meta.dtype for info in graph.params()}
    for info, stored in zip(program.inputs, program.stored_inputs, strict=True):
        if info.kind == "param":
            assert stored.meta.dtype == dtypes[info.fqn]
    for out, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if out.kind == "grad":
            assert stored.meta.dtype == torch.float32
    assert program.prologue.is_empty


def test_low_precision_halves_what_travels():
    found = case("llama")
    for strategy in ("tp2", "tp2+sp", "cp2"):  # under sp the casts stand in front of the gathers
        wide, low = lower(found.graph, strategy), lower(found.bf16, strategy)
        assert low.collective_bytes() < 0.51 * wide.collective_bytes()


def test_a_forward_lowers():
    loaded = case("llama").loaded
    inputs = {k: v for k, v in loaded.example_batch.items() if k != "labels"}
    forward = with_precision(capture_forward(loaded.model, (), inputs), BF16)
    program = lower_forward(forward, "dp2.tp2")
    saved = [n for n in program.forward.results if n.target is kernels.to_copy]
    assert all(n.meta["tensor"].dtype == torch.bfloat16 for n in saved)  # the backward widens again
    assert saved
