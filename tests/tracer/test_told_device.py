"""A forward that asks for its device is told where the model will run, though it is traced on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.tracer import api, capture

CUDA = torch.device("cuda", 1)
X = {"x": torch.randn(6, 8)}
ASKS = {
    "device.type": lambda x, w: x.device.type == "cuda",
    "device": lambda x, w: x.device == CUDA,
    "of a weight": lambda x, w: w.device == x.device == CUDA,
    "is_cuda": lambda x, w: x.is_cuda and not (x.is_cpu or x.is_mps or x.is_xpu),
    "get_device": lambda x, w: x.get_device() == 1,
    "of what it makes": lambda x, w: torch.arange(3, device=x.device).device == CUDA,
    "of a copy": lambda x, w: x.to(x.device, torch.float64).is_cuda,
}


class Asks(nn.Module):
    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.inner, self.ask = nn.Linear(8, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * 3.0 if self.ask(y, self.inner.weight) else y


def factors(ask: Any) -> list[Any]:
    graph = capture(Asks(ask), lambda model, batch: model(batch["x"]).sum(), X).gm.graph
    return [node.args[1] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)]


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_the_branch_of_the_device_is_taken(monkeypatch, ask):
    before = torch._subclasses.FakeTensor.device
    monkeypatch.setattr(api, "model_device", lambda model: CUDA)
    assert 3.0 in factors(ask)
    assert torch._subclasses.FakeTensor.device is before


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_on_a_cpu_it_is_that_of_the_cpu(ask):
    assert 3.0 not in factors(ask)


def test_constants_of_the_model_come_to_the_cpu(monkeypatch):
    """As on a GPU, where a tensor that is neither parameter nor buffer lies on the device too."""
    scale, copies = torch.tensor([2.0, 3.0, 4.0, 5.0]), []

    def copied(tensor: Tensor) -> Tensor:
        if tensor is not scale:
            return tensor
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(api, "model_device", lambda model: CUDA)
    monkeypatch.setattr("fxpar.tracer.redirect.copied_to_cpu", copied)

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(8, 4), scale

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.inner(x) * self.scale, self.scale.expand(6, 4)]) + self.scale

    logical = capture(Constant(), lambda model, batch: model(batch["x"]).sum(), X)
    assert len(copies) == 1
    (found,) = logical.constants.values()  # one constant of the graph, however often it is read
    assert torch.equal(found, scale)
