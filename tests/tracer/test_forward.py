"""`capture_forward`: what it captures of a call, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import DataDependentError, UnsupportedOpError
from fxpar.ir.graph import TensorMeta
from fxpar.ir.printer import format_graph
from fxpar.lowering import lower_forward
from fxpar.tracer import call_key, capture_forward
from tests.forwards import Several


def test_modes_of_the_modules():
    """`training` is for all modules; without it each is in its own mode. The model keeps its modes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(3, 4)
    model[2].eval()

    def dropouts(**options: Any) -> int:
        graph = capture_forward(model, (x,), **options)
        return len(graph.gm.graph.find_nodes(op="call_function", target=torch.ops.fxpar.dropout.default))

    forward_only = {"gradients": False}
    assert dropouts(**forward_only) == 1
    assert dropouts(training=True, **forward_only) == 2
    assert dropouts(training=False, **forward_only) == 0
    assert [m.training for m in model] == [True, True, False]


def test_calls_with_other_keys_differ():
    model, x = Several(), torch.randn(5, 6)
    key = functools.partial(call_key, model)
    assert key((x,)) == key((torch.randn(9, 6),))
    different = [
        key((x,)),
        key((), {"x": x}),
        key((x.double(),)),
        key((torch.randn(5, 7),)),
        key((x, "other")),
        key((x.clone().requires_grad_(),)),
        key((x,), {"extra": [x]}),
        key((x[None],)),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        different.append(key((x,)))
    model.out.eval()
    different.append(key((x,)))
    model.unused.weight.requires_grad_(False)
    different.append(key((x,)))
    assert len(set(different)) == len(different)


def test_printed():
    """The tangent enters the backward, which reads results of the forward."""
    graph = capture_forward(Several(), (torch.randn(5, 6),))
    assert format_graph(graph).startswith("fxpar forward graph of Several\n")
    text = format_graph(lower_forward(graph, "tp2"))
    forward, backward = text.split("backward:\n")
    assert text.startswith("fxpar plain graph of Several\n")
    assert "tangent" not in forward
    assert "%tangent_0" in backward
    assert "%forward.tanh" in backward


def test_the_backward_is_given_tensors_and_sizes():
    """Of an op with several results only those are kept that the backward needs."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    program = lower_forward(capture_forward(model, (torch.randn(5, 6),)), "dp1")
    saved = program.forward.results[1:]
    assert saved
    assert all("sym" in node.meta or isinstance(node.meta["tensor"], TensorMeta) for node in saved)


class Cache:
    """Not a container that anybody knows."""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), Cache()


def test_objects_are_refused():
    with pytest.raises(UnsupportedOpError, match="returns a Cache"):
        capture_forward(Odd(), (torch.randn(3, 4),))


def test_errors_name_the_line():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if x.sum() > 0 else 1)

    with pytest.raises(DataDependentError, match=r"test_forward\.py:\d+"):
        capture_forward(Reads(), (torch.randn(3, 4),))
