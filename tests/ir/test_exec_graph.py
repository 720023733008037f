"""`ExecGraph`: its three parts fit together, and what it says about its traffic is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from fxpar.ir.exec_graph import Communication, collective_kind, make_tensors_on, substitute_tokens
from fxpar.ir.graph import TensorMeta, dim_symbol
from fxpar.ir.node_meta import is_backward
from fxpar.lowering import lower
from fxpar.runtime.micro import local_batch
from fxpar.runtime.padding import pad_batch
from tests.captured import llama, lowered, mlp, odd

STRATEGIES = ["dp1", "dp2", "tp3", "tp2+sp", "cp2", "dp2+zero1", "dp2+zero2", "dp2.tp2+sp+zero3", "dp2.cp2+zero3"]
T = dim_symbol("T")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_fit_together(strategy):
    """Every placeholder comes from an input or an earlier part's result, and nothing comes from a later part."""
    program = lowered(llama(), strategy)
    results = {name: len(part.results) for name, part in program.parts.items()}
    earlier = {"prologue": set(), "body": {"prologue"}, "epilogue": {"prologue", "body"}}
    for name, part in program.parts.items():
        places = list(part.graph.find_nodes(op="placeholder"))
        assert len(places) == len(part.sources)
        assert all(place.users for place in places), "no placeholder is there for nothing"
        assert len(set(part.sources)) == len(part.sources)
        for where, index in part.sources:
            assert where == "input" or where in earlier[name]
            assert index < (len(program.inputs) if where == "input" else results[where])
        part.graph.lint()
    assert len(program.epilogue.results) == len(program.outputs) == len(program.stored_outputs)
    assert len(program.stored_inputs) == len(program.inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_axes_stay_out_of_forward_and_backward(strategy):
    """Without ZeRO-2 or 3, replicas may run different numbers of micro-batches: the body does not talk over dp."""
    program = lowered(llama(), strategy)
    body = {axis for c in program.communications() if c.part == "body" for axis in c.axis.split(".")}
    assert ("dp" in body) == (program.strategy.zero >= 2)
    prologue = [c for c in program.communications() if c.part == "prologue"]
    assert bool(prologue) == (program.strategy.zero in (1, 2) and bool(program.strategy.data_axes))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stored_results_lie_like_the_parameters(strategy):
    program = lowered(llama(), strategy)
    lies = {i.fqn: s for i, s in zip(program.inputs, program.stored_inputs, strict=True)}
    for out, stored in zip(program.outputs, program.stored_outputs, strict=True):
        if out.kind == "grad":
            assert stored.dist == lies[out.fqn].dist
            assert stored.local == lies[out.fqn].local
        assert not stored.dist.is_partial


def test_an_empty_prologue_is_no_work():
    program = lowered(llama(), "tp2")
    assert program.prologue.is_empty
    assert not program.body.is_empty
    assert lowered(llama(), "dp1").epilogue.is_empty


def test_node_count_and_collectives():
    program = lowered(llama(), "tp2+sp")
    assert program.node_count == sum(len(p.graph.nodes) for p in program.parts.values())
    found = sum(1 for p in program.parts.values() for n in p.graph.nodes if collective_kind(n))
    assert sum(program.collectives().values()) == found == len(program.communications())
    assert list(program.collectives()) == sorted(program.collectives())


# -------------------------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize(
    ("kind", "degree", "factor"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 3.0), ("reduce_scatter", 4, 0.75), ("all_to_all", 4, 0.75)],
)
def test_wire_bytes_of_a_ring(kind, degree, factor):
    """Per rank, as a share of what it puts in: 1000 tokens of 8 bf16 numbers."""
    c = Communication(kind, "tp", TensorMeta((T, 8), torch.bfloat16), "body", "", False)
    assert c.wire_bytes(degree, {T: 1000}) == 16000 * factor
    assert c.wire_bytes(1, {T: 1000}) == 0


def test_bytes_of_a_data_parallel_step():
    """An all-reduce of all gradients and of the loss, whatever the batch is."""
    program = lowered(llama(), "dp4")
    numbers = sum(value.numel() for value in llama().params.values()) + 1
    assert program.collective_bytes() == program.collective_bytes({"T": 4000}) == round(numbers * 8 * 2 * 3 / 4)


def test_zero_one_sends_as_much_as_an_all_reduce():
    plain, sharded = lowered(llama(vocab=96), "dp4"), lowered(llama(vocab=96), "dp4+zero1")
    assert plain.collective_bytes() == sharded.collective_bytes()


def test_bytes_grow_with_the_length():
    program = lowered(llama(), "cp2")
    short, long = program.collective_bytes({"T": 1000}), program.collective_bytes({"T": 2000})
    rest = program.collective_bytes({"T": 0})
    assert long - rest == 2 * (short - rest)
    assert program.collective_bytes() == program.collective_bytes({"T": 13})


# -------------------------------------------------------------------------------------------------------- binding
def test_tokens_are_filled_in_a_copy():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "@tp"))
    z = graph.call_function(torch.ops.aten.select.int, (y, 0, "#dp.cp"))
    graph.output((z,))
    bound = substitute_tokens(graph, {"tp": "group 7"}, {"dp.cp": 3})
    assert [n.args[-1] for n in bound.nodes if n.op == "call_function"] == ["group 7", 3]
    assert [n.args[-1] for n in graph.nodes if n.op == "call_function"] == ["@tp", "#dp.cp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_but_tokens_depends_on_the_rank(strategy):
    program = lowered(llama(), strategy)
    for part in program.parts.values():
        for node in part.graph.nodes:
            strings = [a for a in node.args if isinstance(a, str)]
            assert all(a[:1] in "@#" or a in ("sum", "avg", "max") for a in strings), node.args


def test_local_batches_are_cut_tokens():
    captured = llama()
    program = lowered(captured, "cp2.tp2+sp")
    whole = pad_batch(program.inputs, program.dims, program.divisors, captured.batches[0])
    pieces = [local_batch(program, whole, rank)["input_ids"] for rank in range(4)]
    assert torch.equal(pieces[0], pieces[1])
    assert torch.equal(torch.cat([pieces[0], pieces[2]], 1), whole["input_ids"])


def test_constants_travel_with_the_program():
    program = lower(odd("counter").graph, "dp2")
    assert set(program.constants) == {i.fqn for i in program.inputs if i.kind == "constant"}
    assert program.constants


_PRINT = """
from fxpar.ir.node_meta import is_backward
from fxpar.lowering import lower
from tests.captured import mlp
for text in {texts!r}:
    print(lower(mlp().graph, text).fingerprint())
"""


@pytest.mark.nightly  # ranks compare the fingerprints of their programs at the start of every session
def test_the_fingerprint_is_the_same_in_another_process():
    """Ranks that are not forked have other addresses and another hash seed; they compare before they run."""
    texts = ["dp2.tp2+sp", "dp4+zero3", "dp2.pp2+zb_h1"]
    here = [lowered(mlp(), text).fingerprint() for text in texts]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRINT.format(texts=texts)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == here


def test_what_a_graph_makes_from_nothing_is_made_on_the_device():
    """Ops do not listen to `with torch.device(...)`. What has an operand goes where that is."""
    aten = torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(aten.arange.start, (1, 5)), graph.call_function(aten.zeros.default, ([2],))]
    made += [graph.call_function(aten.zeros_like.default, (x,)), graph.call_function(aten.new_ones.default, (x, [3]))]
    graph.output(tuple(made))
    make_tensors_on(graph, torch.device("meta"))
    results = fx.GraphModule(torch.nn.Module(), graph)(torch.empty(2, device="meta"))
    assert [one.device.type for one in results] == ["meta"] * 4
    assert [sorted(node.kwargs) for node in made] == [["device"], ["device"], [], []]


@pytest.mark.parametrize("strategy", ["cp2", "dp2.tp2+sp+zero3"])
def test_the_loss_alone_needs_no_backward(strategy):
    """What evaluation runs of a step, and no gradient is reduced for it."""
    program = lowered(llama(), strategy)
    run = [node for node in program.loss_body.graph.nodes if node.op == "call_function"]
    assert run
    assert not any(is_backward(node) for node in run)
    losses = [out for out in program.outputs if out.kind == "loss"]
    assert len(program.loss.results) == len(losses)
    assert {source for source, _ in program.loss.sources} <= {"body", "prologue", "input"}
    assert max(i for source, i in program.loss.sources if source == "body") < len(program.loss_body.results)
