"""Graphs as plain data: nothing that a later step reads is lost, and what cannot be read says so."""

from __future__ import annotations

import pickle

import pytest
import torch

from fxpar.errors import GraphFormatError
from fxpar.ir.exec_graph import collective_kind, compile_graph
from fxpar.ir.serialize import graph_from_data, graph_to_data, target_from_name, target_name
from fxpar.lowering import lower
from fxpar.ops import layout
from tests.captured import gpt, llama, lowered, odd

STRATEGIES = ["dp2", "tp3", "tp2+sp", "cp2", "dp2.cp2.tp2+sp+zero3"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exec_graph_pickles(strategy):
    program = lowered(llama(), strategy)
    again = pickle.loads(pickle.dumps(program))
    assert again.fingerprint() == program.fingerprint()
    assert again.communications() == program.communications()
    assert again.collective_bytes() == program.collective_bytes()
    for field in ("strategy", "inputs", "outputs", "stored_inputs", "stored_outputs", "dims", "divisors", "notes"):
        assert getattr(again, field) == getattr(program, field)
    for name, part in program.parts.items():
        assert again.parts[name].sources == part.sources
        assert str(again.parts[name].graph) == str(part.graph)


def test_a_logical_graph_lowers_to_the_same_program():
    graph = odd("norms").graph
    again = pickle.loads(pickle.dumps(graph))
    assert lower(again, "dp2").fingerprint() == lower(graph, "dp2").fingerprint()
    assert again.placeholders[0].graph is again.gm.graph is not graph.gm.graph
    assert again.carried_buffers() == graph.carried_buffers()


@pytest.mark.parametrize("strategy", ["dp2.tp2", "tp2+sp"])
def test_pickling_twice_is_the_same_bytes(strategy):
    program = lowered(llama(), strategy)
    once = pickle.dumps(program)
    assert pickle.dumps(pickle.loads(once)) == pickle.dumps(pickle.loads(pickle.dumps(pickle.loads(once))))


OF_LOWERING = {"dist_in", "bucket", "class", "variant", "rule"}
"""What only the lowering reads."""


def test_metadata_survives():
    program = lowered(llama(), "dp2.tp2+sp+zero3")
    again = pickle.loads(pickle.dumps(program))
    for name, part in program.parts.items():
        for old, new in zip(part.graph.nodes, again.parts[name].graph.nodes, strict=True):
            told = {key: value for key, value in old.meta.items() if key not in OF_LOWERING}
            assert new.meta == told, old


def test_buffers_are_carried_after_pickling():
    program = pickle.loads(pickle.dumps(lower(odd("norms").graph, "dp2")))
    carried = {n.meta["buffer"] for n in program.body.results if "buffer" in n.meta}
    assert carried == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize("captured", [llama, gpt, lambda: odd("counter")], ids=["llama", "gpt", "counter"])
def test_a_pickled_graph_computes_the_same(captured):
    graph = captured().graph
    again = compile_graph(graph_from_data(pickle.loads(pickle.dumps(graph_to_data(graph.gm.graph)))))
    values = []
    for info in graph.inputs:
        tensors = {**captured().params, **captured().buffers, **graph.constants, **captured().batches[0]}
        numbers = {"scale": torch.ones((), dtype=torch.float64), "seed": torch.tensor(3)}
        values.append(numbers[info.kind] if info.kind in numbers else tensors[info.fqn])
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(graph.gm(*values), again(*values), strict=True))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.mm.default, "aten.mm.default"),
        (torch.ops.aten.sum.dim_IntList, "aten.sum.dim_IntList"),
        (torch.ops.fxpar.attention.default, "fxpar.attention.default"),
        (torch.ops._c10d_functional.wait_tensor.default, "_c10d_functional.wait_tensor.default"),
        (layout.pack, "fxpar.ops.layout:pack"),
        (torch.sym_max, "torch:sym_max"),
        (__import__("operator").floordiv, "operator:floordiv"),
        (__import__("math").trunc, "math:trunc"),
    ],
)
def test_target_names(target, name):
    assert target_name(target) == name
    assert target_from_name(name) is target


@pytest.mark.parametrize(
    "name", ["aten.no_such_op.default", "aten.mm.no_such", "no.module:x", "fxpar.ops.layout:gone", "a:b:c"]
)
def test_a_name_that_is_not_there(name):
    with pytest.raises(GraphFormatError, match=f"op '{name}' of a saved graph is not available here"):
        target_from_name(name)


def test_arguments_keep_their_types():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [0, 1], True), {"dtype": torch.float64})
    z = graph.call_function(layout.pack, (y, 2, 0, (1, 2)))
    graph.output((z, x))
    again = graph_from_data(graph_to_data(graph))
    _, total, packed, output = again.nodes
    assert total.args[1:] == ([0, 1], True)
    assert isinstance(packed.args[3], tuple)
    assert total.kwargs == {"dtype": torch.float64}
    assert output.args[0] == (packed, next(iter(again.nodes)))


def test_fingerprints_tell_programs_apart():
    texts = ["dp2", "tp2", "tp2+sp", "cp2", "dp2+zero1", "dp2+zero2", "dp2+zero3", "dp2.tp2", "tp2.dp2"]
    assert len({lowered(llama(), text).fingerprint() for text in texts}) == len(texts)
    assert lowered(llama(), "tp2").fingerprint() == lowered(llama(), "tp2").fingerprint()
    assert collective_kind(next(iter(llama().graph.gm.graph.nodes))) is None
