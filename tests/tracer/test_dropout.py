"""Dropout is fxpar's op with the graph's seed: same masks for the same seed, also when a checkpoint runs it again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxpar.ops.dropout import dropout
from fxpar.tracer import capture
from fxpar.tracer.dropout import salt
from tests.tracer.helpers import difference, eager, ops, run

X = {"x": torch.randn(6, 8, dtype=torch.float64)}


class Net(nn.Module):
    """Two linear layers around a function; `replay` computes its dropouts by the op itself."""

    def __init__(self, function, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.function, self.again = function, again

    def middle(self, x):
        return self.function(torch.tanh(self.first(x))).pow(2)  # needs what was dropped in the backward

    def forward(self, x):
        y = checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x)
        return self.second(y)


def loss(model, batch):
    return model(batch["x"]).pow(2).sum()


def replay(*rates):
    """A function that drops with these rates, as module "" of the model does in a graph with seed 5."""

    def function(x):
        for call, p in enumerate(rates):
            x = dropout(x, p, torch.tensor(5), salt(f":{call}"))
        return x

    return function


@pytest.mark.parametrize("again", [False, True])
def test_functional_dropout(again):
    torch.manual_seed(3)
    model = Net(lambda x: F.dropout(F.dropout(x, 0.3), 0.2, inplace=True), again).double()
    graph = capture(model, loss, X)
    assert ops(graph).count("fxpar.dropout") == 4 + 2 * again
    got = run(graph, model, X, seed=5)
    model.function, model.again = replay(0.3, 0.2), False
    assert difference(got, eager(model, loss, X)) < 1e-12
    model.function = replay(0.2, 0.3)
    assert difference(got, eager(model, loss, X)) > 1e-3
    assert difference(got, run(graph, model, X, seed=6)) > 1e-3


def test_checkpoint_inside_a_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(lambda x: F.dropout(x, 0.3), again=True)

        def forward(self, x):
            return self.net(F.dropout(self.net(x).repeat(1, 2), 0.1))

    graph = capture(Outer().double(), loss, X)
    found = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default)
    first, second, between = salt("net:0"), salt("net:0:[0, 0, 1]"), salt(":0")
    assert [n.args[4] for n in found if not n.meta["backward"]] == [first, between, second]
    # Backward of the second call (run again, then its gradient), of what lies between, of the first call.
    assert [n.args[4] for n in found if n.meta["backward"]] == [second, second, between, first, first]


def test_dropout_modules_have_their_own_salts():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))).double()
    graph = capture(model, loss, X)
    salts = [n.args[4] for n in graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default)]
    assert salts == [salt("1:0"), salt("2.0:0"), salt("2.0:0"), salt("1:0")]


def test_shared_module_and_repeated_calls_differ():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.drop(self.linear(x)))

    graph = capture(Twice().double(), loss, X)
    salts = [n.args[4] for n in graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default)]
    assert len(salts) == 4
    assert len(set(salts)) == 2


def test_no_dropout_in_eval_or_at_zero():
    model = Net(nn.Dropout(0.5)).double().eval()
    assert "fxpar.dropout" not in ops(capture(model, loss, X))
    assert "fxpar.dropout" not in ops(capture(Net(nn.Dropout(0.0)).double(), loss, X))


def test_whole_channels():
    model = Net(lambda x: F.dropout1d(x.view(2, 3, 8), 0.5).view(6, 8)).double()
    graph = capture(model, loss, X, dynamic=None)
    dropped = run(graph, model, X, seed=5)
    kept = dropout(torch.ones(2, 3).double(), 0.5, torch.tensor(5), salt(":0"))
    model.function = lambda x: (x.view(2, 3, 8) * kept[..., None]).view(6, 8)
    assert difference(dropped, eager(model, loss, X)) < 1e-12


def test_attention_dropout():
    def heads(x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def attention(x):
        q = heads(x)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4, is_causal=True).transpose(1, 2).flatten(2)

    def by_hand(x):
        q = heads(x)
        scores = (q @ q.transpose(2, 3) / 2).masked_fill(torch.ones(q.shape[2], q.shape[2]).tril() == 0, -torch.inf)
        return (dropout(scores.softmax(-1), 0.4, torch.tensor(5), salt(":0")) @ q).transpose(1, 2).flatten(2)

    model = Net(attention).double()
    batches = [{"x": torch.randn(2, T, 8, dtype=torch.float64)} for T in (6, 10)]
    graph = capture(model, loss, batches[0], dynamic={"x": {1: "T"}})
    assert "fxpar.attention" not in ops(graph)
    model.function = by_hand
    for batch in batches:
        assert difference(run(graph, model, batch, seed=5), eager(model, loss, batch)) < 1e-12
