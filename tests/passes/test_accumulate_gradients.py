"""accumulate_gradients: gradients that are matrix products add up in the product itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.ir.exec_graph import compile_graph
from fxpar.ir.graph import AnnotatedGraph
from fxpar.lowering import lower
from fxpar.passes.accumulate_gradients import AccumulateGradients, accumulate
from fxpar.torch_api import kernels
from tests.captured import llama
from tests.passes.sketch import F64, Sketch, names

aten = torch.ops.aten

PRODUCTS = {
    "product": lambda s, m: [m],
    "transpose": lambda s, m: [s.call(aten.t.default, m, shape=(5, 3))],
    "there and back": lambda s, m: [s.call(aten.t.default, s.call(aten.t.default, m, shape=(5, 3)), shape=(3, 5))],
    "reshape": lambda s, m: [s.call(aten.reshape.default, m, [3, 1, 5], shape=(3, 1, 5))],
}
"""A gradient that is a matrix product [3, 5], by how it is relabelled."""

OTHERS = {
    "transpose and reshape": lambda s, m: [
        s.call(aten.reshape.default, s.call(aten.t.default, m, shape=(5, 3)), [15], shape=(15,))
    ],
    "read again": lambda s, m: [m, s.call(aten.neg.default, m, shape=(3, 5))],
    "twice": lambda s, m: [m, m],
    "cast": lambda s, m: [s.call(kernels.to_copy, m, shape=(3, 5))],
    "two views": lambda s, m: [m, s.call(aten.t.default, m, shape=(5, 3))],
}
"""What is added as it was."""


def accumulated(make: Any) -> AnnotatedGraph:
    s = Sketch("dp1")
    a, b = s.place("a", (3, 4), kind="batch"), s.place("b", (4, 5), kind="batch")
    results = make(s, s.call(aten.mm.default, a, b, shape=(3, 5)))
    graph = s.done(*results)
    AccumulateGradients()(graph)
    return graph


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
def test_a_product_is_added_as_it_is_computed(name, dense):
    """`dense`: accumulators in one stretch; else as the first micro-batch leaves them."""
    make = {**PRODUCTS, **OTHERS}[name]
    graph = accumulated(make)
    assert ("aten.addmm_" in names(graph.graph)) == (name in PRODUCTS)
    assert ("aten.add_.Tensor" in names(graph.graph)) == (name in OTHERS)
    s = Sketch("dp1")
    places = s.place("a", (3, 4), kind="batch"), s.place("b", (4, 5), kind="batch")
    plain = s.done(*make(s, s.call(aten.mm.default, *places, shape=(3, 5))))
    first, second = ([torch.randn(3, 4, dtype=F64), torch.randn(4, 5, dtype=F64)] for _ in range(2))
    once, twice = (compile_graph(plain.graph)(*values) for values in (first, second))
    totals = [t.contiguous() if dense else t for t in once]
    totals = [t.clone(memory_format=torch.preserve_format) for t in totals]
    copies = [t.clone() for t in totals]
    results = compile_graph(graph.graph)(*second, *totals)
    for total, copy, new, result in zip(totals, copies, twice, results, strict=True):
        assert torch.allclose(total, copy + new, rtol=1e-14, atol=1e-14)
        assert result.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
        assert torch.equal(result, total)


def test_batches_of_products_are_added_too():
    s = Sketch("dp1")
    a, b = s.place("a", (2, 3, 4), kind="batch"), s.place("b", (2, 4, 5), kind="batch")
    m = s.call(aten.bmm.default, a, b, shape=(2, 3, 5))
    graph = s.done(s.call(aten.transpose.int, m, 1, 2, shape=(2, 5, 3)))
    AccumulateGradients()(graph)
    assert names(graph.graph) == ["aten.transpose.int", "aten.baddbmm_", "aten.transpose.int"]
    values, total = (torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 4, 5, dtype=F64)), torch.ones(2, 5, 3, dtype=F64)
    expected = total + torch.bmm(*values).mT
    compile_graph(graph.graph)(*values, total)
    assert torch.allclose(total, expected, rtol=1e-14)


def test_a_model_accumulates_its_weights_in_the_products():
    """Of a Llama all but norms and the embedding; what comes out is what a float64 device computes."""
    captured = llama(layers=1)
    program = lower(captured.graph, "dp1", for_store=True)
    accumulate(program.body.graph, ())
    later = names(program.body.graph)
    assert later.count("aten.addmm_") == 8
    assert captured.check("dp1").ok
