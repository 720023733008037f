"""`LogicalGraph`, `AnnotatedGraph` and what their nodes carry."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from fxpar.annotate import annotate
from fxpar.errors import DimNameError
from fxpar.ir.fqn import block_or_module_of
from fxpar.ir.graph import Dim, Input, TensorMeta, dim_symbol, run_dims, run_sizes
from fxpar.ir.pass_base import gathered_together
from fxpar.ir.strategy import Strategy
from fxpar.tracer import capture
from tests.captured import gpt, llama, odd

T, B = dim_symbol("T"), dim_symbol("B")


def test_symbols_are_equal_by_name():
    """A graph that was pickled in another process names the same dims."""
    assert Dim("T", 13).symbol == T
    assert pickle.loads(pickle.dumps(T)) == T
    assert T != B


def test_tensor_meta():
    meta = TensorMeta((2, 3 * T, 4), torch.bfloat16)
    assert str(meta) == "bf16[2, 3*T, 4]"
    assert meta.numel({T: 5}) == 120
    assert TensorMeta((), torch.float32).numel({}) == 1
    assert {meta: 1}[TensorMeta((2, 3 * T, 4), torch.bfloat16)] == 1


def test_logical_graph_lists_inputs_and_results_in_order():
    graph = llama(layers=2).graph
    kinds = [i.kind for i in graph.inputs]
    order = ["param", "buffer", "constant", "batch", "scale", "seed"]
    assert kinds == sorted(kinds, key=order.index)
    assert len(graph.placeholders) == len(graph.inputs)
    assert len(graph.results) == len(graph.outputs)
    assert [o.kind for o in graph.outputs] == ["loss"] + ["grad"] * (len(graph.outputs) - 1)
    assert graph.example_dims() == {T: 13}
    assert sum(1 for _ in graph.params()) == 21


def test_sizes_of_a_run():
    """What a strategy cuts is padded, named or not; another dim's name is refused."""
    whole = llama().graph
    cut = annotate(whole, Strategy.parse("cp4"))
    assert (run_sizes(whole), run_dims(whole)) == ({"T": 13}, whole.example_dims())
    assert (run_sizes(cut), run_sizes(cut, {"T": 17}), run_sizes(cut, {"T": 20})) == ({"T": 16}, {"T": 20}, {"T": 20})
    assert run_dims(cut, {"T": 17}) == {T: 20}
    with pytest.raises(DimNameError, match="'S' is not a dynamic dim"):
        run_sizes(cut, {"S": 8})


def test_gradients_are_shaped_like_their_parameters():
    for captured in (llama(), gpt(), llama(tied=True), odd("counter")):
        shapes = {i.fqn: i.meta for i in captured.graph.inputs}
        for node, out in zip(captured.graph.results, captured.graph.outputs, strict=True):
            if out.kind != "loss":
                assert node.meta["tensor"] == shapes[out.fqn]


def test_frozen_and_unused_parameters_have_no_gradient():
    captured = odd("counter")
    inputs = {i.fqn: i for i in captured.graph.inputs}
    grads = {o.fqn for o in captured.graph.outputs if o.kind == "grad"}
    assert not inputs["frozen"].requires_grad
    assert "frozen" not in grads
    assert inputs["unused"].requires_grad
    assert "unused" not in grads
    assert {o.fqn for o in captured.graph.outputs if o.kind == "buffer"} == {"calls", "average"}


def test_tied_parameters_are_one_input():
    (tied,) = [i for i in llama(tied=True).graph.inputs if i.fqn == "embedding.weight"]
    assert tied.aliases == ("head.weight",)
    assert isinstance(tied, Input)


def test_every_node_carries_its_contract():
    for node in llama().graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        assert ("tensor" in node.meta and node.meta["tensor"] is not None) != ("sym" in node.meta), node
        if "sym" not in node.meta:
            assert isinstance(node.meta["fqn"], str)
            assert isinstance(node.meta["backward"], bool)


def test_annotated_graph_is_a_copy():
    graph = llama().graph
    annotated = annotate(graph, Strategy.parse("tp2"))
    assert annotated.graph is not graph.gm.graph
    assert annotated.inputs == graph.inputs
    assert len(annotated.placeholders) == len(graph.placeholders)
    assert len(annotated.results) == len(graph.results)


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("layers.3.attention.q.weight", "layers.3"),
        ("model.layers.12", "model.layers.12"),
        ("model.norm.weight", "model.norm"),
        ("head.weight", "head"),
        ("gain", ""),
        ("layers.1.experts.7.up.weight", "layers.1"),
    ],
)
def test_block_or_module_of(fqn, block):
    assert block_or_module_of(fqn) == block


def test_what_is_gathered_together():
    """What lies outside of layers is cut where layers come between, whatever the order in which parameters stand."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.last, self.bridge = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.tower = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for one in (self.first, self.second, self.tower[0], self.bridge, self.tower[1], self.last, self.head):
                x = one(x)
            return x

    captured = capture(Towers(), lambda model, batch: model(batch["x"]).sum(), {"x": torch.zeros(2, 4)})
    found = gathered_together(annotate(captured, Strategy.parse("dp2")))
    assert {fqn.removesuffix(".weight"): group for fqn, group in found.items()} == {
        **{"first": "first", "second": "first", "tower.0": "tower.0"},
        **{"bridge": "bridge", "tower.1": "tower.1", "last": "last", "head": "last"},
    }


class CountingNorm(nn.BatchNorm1d):
    """A batch norm with a buffer of its own beside the statistics."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


def test_a_counter_beside_the_statistics_of_a_batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), CountingNorm())
    graph = capture(model, lambda m, b: m(b["x"]).square().sum(), {"x": torch.randn(6, 3)})
    written = [out.fqn for out in graph.outputs if out.kind == "buffer"]
    assert written == ["1.running_mean", "1.running_var", "1.num_batches_tracked", "1.calls"]
    assert (graph.carried_buffers(), graph.counted_buffers()) == ([], ["1.calls"])
