"""Where nodes come from: module, line, forward or backward; and programs that run under other modes."""

from __future__ import annotations

import inspect
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpar import errors, losses
from fxpar.tracer import capture
from fxpar.tracer.provenance import is_user_file
from tests.tracer.helpers import check
from tests.tracer.models import MLP, Decoder

aten = torch.ops.aten
X = {"x": torch.randn(6, 8, dtype=torch.float64), "y": torch.randn(6, 4, dtype=torch.float64)}


def loss(model, batch):
    return model(batch["x"]).pow(2).sum()


def lines_of(function):
    source, first = inspect.getsourcelines(function)
    return {f"{__file__}:{first + i}": text.strip() for i, text in enumerate(source)}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        a = self.left(x)
        b = torch.tanh(self.right(x))
        return a * b


def test_line_and_module_of_each_node():
    graph = capture(Branches().double(), loss, X)
    lines = lines_of(Branches.forward)
    nodes = [n for n in graph.gm.graph.nodes if n.op == "call_function"]
    seen = {(n.target, n.meta["fqn"], lines.get(n.meta["source"]), n.meta["backward"]) for n in nodes}
    assert (aten.tanh.default, "", "b = torch.tanh(self.right(x))", False) in seen
    assert (aten.tanh_backward.default, "", "b = torch.tanh(self.right(x))", True) in seen
    assert (aten.mm.default, "left", "a = self.left(x)", False) in seen
    assert (aten.mm.default, "right", "b = torch.tanh(self.right(x))", True) in seen
    assert (aten.mul.Tensor, "", "return a * b", True) in seen


def test_sum_of_gradients_belongs_to_a_user():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            h = self.first(x)
            return self.second(h) + self.third(h)

    graph = capture(Fork().double(), loss, X)
    adds = graph.gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (add,) = [n for n in adds if n.meta["backward"]]
    assert add.meta["fqn"] in ("second", "third")


def test_caught_exceptions_do_not_confuse_the_stack():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.works = MLP(), MLP()
            self.fails.stack = None

        def forward(self, x):
            try:
                return self.fails(x)
            except TypeError:
                return self.works(x)

    model = Careful().double()
    graph = capture(model, loss, X)
    fqns = {n.meta["fqn"] for n in graph.gm.graph.nodes if n.op == "call_function"}
    assert fqns == {"", "works.stack.0", "works.stack.1", "works.stack.3"}


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_modules(early_stop):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.head = MLP(), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(checkpoint(self.mlp, x, use_reentrant=False, early_stop=early_stop))

    graph = check(Again().double(), loss, [X])
    again = [n for n in graph.gm.graph.nodes if n.op == "call_function" and n.target is aten.gelu.default]
    assert [(n.meta["fqn"], n.meta["backward"]) for n in again] == [
        ("mlp.stack.1", False),
        ("mlp.stack.1", True),
    ]
    assert all(n.meta["source"] for n in again)


def test_custom_autograd_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x * x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return Cube.apply(self.linear(x))

    graph = check(Net().double(), loss, [X])
    assert all(isinstance(n.meta["fqn"], str) for n in graph.gm.graph.nodes if n.op != "output")


def test_compiled_submodules_run_as_they_are():
    model = MLP().double()
    model.stack[0] = torch.compile(model.stack[0], backend="eager")
    check(model, lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="sum"), [X])


def test_under_other_modes():
    ids = torch.ones(2, 6, dtype=torch.long)
    model = Decoder(layers=1)
    model.norm.register_forward_hook(lambda module, args, output: output + torch.ones(output.shape[1], 1))
    with torch.no_grad(), torch.device("meta"):
        first = capture(model, losses.causal_lm, {"input_ids": ids, "labels": ids})
    model = MLP().double()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", errors.FxparWarning)
        second = capture(model, loss, X)
    assert first.results[0].meta["tensor"].shape == second.results[0].meta["tensor"].shape == ()


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_that_are_sequences():
    def pair_loss(model, batch):
        x, y = batch
        return (model(x) - y).pow(2).sum()

    for batch in ((X["x"], X["y"]), [X["x"], X["y"]], Pair(X["x"], X["y"])):
        graph = capture(MLP().double(), pair_loss, batch)
        assert [i.fqn for i in graph.inputs if i.kind == "batch"] == ["0", "1"]


def test_user_files():
    assert is_user_file(__file__)
    assert not is_user_file(torch.nn.functional.__file__)
    assert not is_user_file(losses.__file__)
    assert not is_user_file(inspect.__file__)
    assert is_user_file("/env/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py")
    assert not is_user_file("/env/lib/python3.11/site-packages/transformers/integrations/sdpa_attention.py")
    assert is_user_file("/env/lib/python3.11/site-packages/torchtitan/models/llama3/model.py")
