"""Writes in place become values: temporaries, views of them, buffers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.tracer import capture, functional
from tests.tracer.helpers import check, run


class Net(nn.Module):
    """A linear layer, then a function of the module and the result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.register_buffer("state", torch.arange(8.0), persistent=False)
        self.register_buffer("other", torch.ones(8))

    def forward(self, x):
        return self.function(self, self.linear(x))


def loss(model, batch):
    return model(batch["x"]).pow(2).sum()


def batches():
    return [{"x": torch.randn(B, 8, dtype=torch.float64)} for B in (5, 3)]


def on_temporary(m, y):
    y = y * 2
    y.add_(1).mul_(0.5)
    return y.sigmoid_() + F.relu(y * 1, inplace=True)


def powers(m, y):
    y = y * 1
    y **= 2
    return (y + 1).pow_(y.detach())


def then_view(m, y):
    z = y * 1
    z /= 3.0
    z += y
    return z.reshape(-1, 4).t()


def on_result_of_several(m, y):
    top, index = y.topk(3)
    top = top * 1
    top /= top.detach().sum(-1, keepdim=True)
    return y.gather(1, index) * top


def through_view(m, y):
    y = y * 1
    y[:, 2:4] = 0.5
    y[0].mul_(3)
    head = y[:, :4]
    y.add_(1)
    return head * 2


def masked(m, y):
    z = torch.zeros_like(y)
    z.copy_(y)
    z.masked_fill_(y > 1, 0.0)
    z[:, 0].fill_(2.0)
    return z


def promoted(m, y):
    count = torch.zeros(8, dtype=torch.float32)
    count += y.detach().double().mean(0) * 0
    return y + count.double()


def through_expand(m, y):
    """To the shape that it has: such a view is written to, one of repeated elements is not."""
    seen, bias = (y > 0).expand(y.shape), torch.zeros_like(y).expand(-1, 8)
    seen[:, 2:] = True
    bias[:, :2] = -torch.inf
    bias[:, :2] = 0.5
    return y.masked_fill(~seen, 0.0) + bias


CASES = [on_temporary, powers, then_view, on_result_of_several, through_view, masked, promoted, through_expand]


@pytest.mark.parametrize("function", CASES)
def test_writes_to_temporaries(function):
    graph = check(Net(function).double(), loss, batches())
    for node in graph.gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable
        assert node.op == "output" or isinstance(node.meta["fqn"], str)


@pytest.mark.parametrize("function", [on_temporary, powers, then_view, on_result_of_several, promoted])
def test_simple_writes_need_no_second_trace(function, monkeypatch):
    def refuse(*_):
        raise AssertionError("traced again")

    monkeypatch.setattr(functional, "_functionalize", refuse)
    capture(Net(function).double(), loss, batches()[0])
    with pytest.raises(AssertionError, match="traced again"):
        capture(Net(through_view).double(), loss, batches()[0])


def in_place(m, y):
    m.state.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y * m.state


def through_buffer_view(m, y):
    m.state[2:4] += 1
    return y * m.state


def reassigned(m, y):
    m.state = 0.5 * m.state + y.mean(0)
    return y * m.state.detach()


def copied(m, y):
    m.state.copy_(y.sum(0))
    m.other.zero_()
    return y


def under_no_grad(m, y):
    with torch.no_grad():
        m.state += 1
        m.state.data.mul_(2)
    return y + m.state


@pytest.mark.parametrize("function", [in_place, through_buffer_view, reassigned, copied, under_no_grad])
def test_buffers(function):
    model = Net(function).double()
    before = model.state.clone()
    graph = capture(model, loss, batches()[0])
    assert torch.equal(model.state, before)
    for batch in batches():
        results = run(graph, model, batch)
        model.state, model.other = before.clone(), torch.ones(8).double()
        value = loss(model, batch)
        torch.testing.assert_close(results["loss", "loss"], value.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(results["buffer", "state"], model.state.detach(), rtol=1e-12, atol=0)
        if function is copied:
            torch.testing.assert_close(results["buffer", "other"], model.other)
        model.state, model.other = before.clone(), torch.ones(8).double()
    written = [out.fqn for out in graph.outputs if out.kind == "buffer"]
    assert written == ["state", "other"] if function is copied else ["state"]


def test_batch_norm_in_eval_changes_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double().eval()
    graph = check(model, loss, batches())
    assert [out.kind for out in graph.outputs].count("buffer") == 0


def test_shared_batch_norm_updates_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    model = Twice().double()
    (batch, _) = batches()
    graph = capture(model, loss, batch)
    results = run(graph, model, batch)
    loss(model, batch)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(results["buffer", name], buffer, rtol=1e-12, atol=0)
