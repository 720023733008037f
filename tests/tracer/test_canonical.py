"""What every captured graph looks like: invariants that later passes rely on."""

from __future__ import annotations

import copy
import functools
import gc
import operator

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpar import losses
from fxpar.ir.graph import LogicalGraph, TensorMeta, dim_symbol
from fxpar.tracer import capture, capture_forward
from tests.tracer.helpers import check, ops
from tests.tracer.models import ConvNet, Decoder, ViT

aten = torch.ops.aten
IDS = torch.randint(61, (2, 10))
TOKENS = {"input_ids": IDS, "labels": IDS}
IMAGES = {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(5, (4,))}
MADE_BY = (operator.add, operator.mul, operator.floordiv, operator.mod, operator.pow, aten.sym_size.int)


def classify(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")


@pytest.fixture(scope="module", params=["decoder", "tied", "vit", "convnet"])
def graph(request):
    torch.manual_seed(0)
    if request.param in ("vit", "convnet"):
        return capture(ViT() if request.param == "vit" else ConvNet(), classify, IMAGES)
    return capture(Decoder(1, tied=True) if request.param == "tied" else Decoder(), losses.causal_lm, TOKENS)


def test_signature(graph):
    kinds = [i.kind for i in graph.inputs]
    assert kinds == sorted(kinds, key=["param", "buffer", "batch", "scale", "seed", "constant"].index)
    assert kinds.count("scale") == kinds.count("seed") == 1
    assert len(graph.placeholders) == len(graph.inputs)
    assert len(graph.results) == len(graph.outputs)
    for node, found in zip(graph.placeholders, graph.inputs, strict=True):
        assert node.meta["tensor"] == found.meta
    grads = [out.fqn for out in graph.outputs if out.kind == "grad"]
    assert grads == [i.fqn for i in graph.params()]
    metas = {i.fqn: i.meta for i in graph.inputs}
    for out, node in zip(graph.outputs, graph.results, strict=True):
        if out.kind != "loss":
            assert node.meta["tensor"] == metas[out.fqn]
    assert graph.outputs[0].kind == "loss"
    assert graph.results[0].meta["tensor"].shape == ()


def test_every_node_has_its_metas(graph):
    allowed = {"tensor", "sym", "fqn", "source", "backward"}
    for node in graph.gm.graph.nodes:
        if node.op == "output":
            continue
        assert set(node.meta) <= allowed, (node, set(node.meta) - allowed)
        assert isinstance(node.meta["fqn"], str)
        assert isinstance(node.meta["backward"], bool)
        assert ("tensor" in node.meta) != ("sym" in node.meta), node
        if "sym" in node.meta:
            assert isinstance(node.meta["sym"], sympy.Expr)
            assert node.target in MADE_BY
        else:
            metas = node.meta["tensor"]
            for meta in metas if isinstance(metas, tuple) else (metas,):
                assert meta is None or isinstance(meta, TensorMeta)


def test_functional_and_plain(graph):
    forbidden = {
        aten.addmm,
        aten.baddbmm,
        aten.linear,
        aten.detach,
        aten.alias,
        aten._unsafe_view,
        aten.lift_fresh_copy,
    }
    for node in graph.gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        assert not node.target._schema.is_mutable, node
        assert node.target.overloadpacket not in forbidden, node
        assert not {"device", "layout", "pin_memory"} & set(node.kwargs), node
        assert node.users, f"{node} is dead"


def test_sizes_are_read_once_at_the_top(graph):
    sizes = graph.gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    assert len(sizes) == len(graph.dims)
    batch = {node.name for node, i in zip(graph.placeholders, graph.inputs, strict=True) if i.kind == "batch"}
    assert all(node.args[0].name in batch for node in sizes)
    calls = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    integers = [node for node in calls if "sym" in node.meta]
    assert calls[: len(integers)] == integers
    assert len({node.meta["sym"] for node in integers}) == len(integers)
    for node in calls:
        if node.target in (aten.view.default, aten.expand.default):
            assert -1 not in node.args[1], node
            shape = [a.meta["sym"] if isinstance(a, torch.fx.Node) else a for a in node.args[1]]
            assert tuple(shape) == node.meta["tensor"].shape


def test_metas_tell_the_truth(graph):
    """Running at other sizes gives the shapes and dtypes that the metas say."""
    dims = {dim.symbol: 7 for dim in graph.dims}
    values = []
    for found in graph.inputs:
        shape = [s if isinstance(s, int) else int(s.subs(dims)) for s in found.meta.shape]
        whole = found.meta.dtype.is_floating_point
        values.append(torch.rand(shape).to(found.meta.dtype) if whole else torch.zeros(shape, dtype=found.meta.dtype))
    checked = 0

    class Watch(torch.fx.Interpreter):
        def run_node(self, node):
            nonlocal checked
            value = super().run_node(node)
            if isinstance(node.meta.get("tensor"), TensorMeta):
                meta = node.meta["tensor"]
                assert value.dtype == meta.dtype, node
                assert tuple(value.shape) == tuple(s if isinstance(s, int) else s.subs(dims) for s in meta.shape), node
                checked += 1
            elif "sym" in node.meta:
                assert value == node.meta["sym"].subs(dims), node
            return value

    with torch.no_grad():
        Watch(graph.gm).run(*values)
    assert checked > 50


def test_backward_nodes_have_the_module_of_their_forward(graph):
    names = {i.fqn.rpartition(".")[0] for i in graph.params()}
    forward = {n.meta["fqn"] for n in graph.gm.graph.nodes if n.op == "call_function" and not n.meta["backward"]}
    backward = [n for n in graph.gm.graph.nodes if n.op == "call_function" and n.meta["backward"]]
    assert {n.meta["fqn"] for n in backward} <= forward
    for out, node in zip(graph.outputs, graph.results, strict=True):
        if out.kind == "grad" and out.fqn.rpartition(".")[0] in forward & names and "token" not in out.fqn:
            assert node.meta["backward"]
    modules = [n.meta["fqn"] for n in backward if n.meta["fqn"]]
    assert modules.index(next(m for m in modules if "head" in m)) < len(modules) // 2


def test_source_is_a_line_of_the_model(graph):
    calls = [n for n in graph.gm.graph.nodes if n.op == "call_function" and n.meta["fqn"]]
    assert all(n.meta["source"] and "tests/tracer/models.py:" in n.meta["source"] for n in calls)


@functools.cache
def one_layer() -> LogicalGraph:
    return capture(Decoder(layers=1), losses.causal_lm, TOKENS)


def test_gradient_of_a_linear_layer_comes_from_its_module():
    graph = one_layer()
    results = dict(zip(((o.kind, o.fqn) for o in graph.outputs), graph.results, strict=True))
    assert results["grad", "layers.0.gate.weight"].meta["fqn"] == "layers.0.gate"
    assert results["grad", "embed.weight"].meta["fqn"] == "embed"
    T = dim_symbol("T")
    logits = next(n for n in graph.gm.graph.nodes if n.meta.get("fqn") == "head" and n.target is aten.mm.default)
    assert logits.meta["tensor"].shape == (2 * T, 61)


def test_names_are_stable():
    first, second = one_layer(), capture(Decoder(layers=1), losses.causal_lm, TOKENS)
    assert first.gm.code == second.gm.code
    assert [node.name for node in first.placeholders][-4:] == ["input_ids", "labels", "scale", "seed"]
    assert "mm_1" in {node.name for node in first.gm.graph.nodes}


def test_awkward_input_names():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(3, 3))
            self.register_parameter("a_0_weight", nn.Parameter(torch.ones(3)))

        def forward(self, x):
            return self.a(x) * self.a_0_weight

    def loss(model, batch):
        return (model(batch["class"]) * batch["2"] + batch["scale"] + batch["input"]).sum()

    batch = {key: torch.randn(4, 3, dtype=torch.float64) for key in ("class", "2", "scale", "input")}
    check(Named().double(), loss, [batch])


def test_derived_sizes():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            T = x.shape[1]
            y = self.linear(x)[:, : (T + 3) // 4]
            y = torch.cat([y, x[:, : min(T, 2)]], 1) * (T**2) / T
            return y.mean(1) + torch.arange(T).double().mean() + y.new_full((4,), 2 * T - 1)

    batches = [{"x": torch.randn(2, T, 4, dtype=torch.float64)} for T in (9, 2, 30)]
    graph = check(Pooled().double(), lambda m, b: m(b["x"]).pow(2).sum(), batches, dynamic={"x": {1: "T"}})
    assert "aten.mean.dim" in ops(graph)


def test_constants_of_the_model():
    table = torch.arange(4.0).double()

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype) + torch.tensor(2.0) * table

    batches = [{"x": torch.randn(B, 4, dtype=torch.float64)} for B in (3, 5)]
    check(Constant().double(), lambda m, b: m(b["x"]).pow(2).sum(), batches)


def test_code_is_written_for_graphs_that_are_called_alone(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("code is written while a model is captured")

    with monkeypatch.context() as patch:
        patch.setattr(fx.Graph, "python_code", never)
        graph = capture(ConvNet(), classify, IMAGES)
    assert "torch.ops.aten.mm.default" in graph.gm.code
    assert copy.deepcopy(graph.gm).code == graph.gm.code


def test_the_collector_rests_while_a_model_is_captured():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(gc.isenabled())
            return super().forward(x)

    x = torch.ones(3, 4)
    capture_forward(Watched(4, 4), (x,))
    capture(Watched(4, 4), lambda model, batch: model(batch["x"]).sum(), {"x": x})
    assert seen == [False, False]
    assert gc.isenabled()
