"""Which models compute another loss in evaluation mode, from their graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.tracer.same_loss import is_same_loss


class Moded(nn.Module):
    """A constant that depends on the mode, and maybe layers that do."""

    def __init__(self, *layers: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.layers, self.scales = nn.Sequential(nn.Linear(4, 4), *layers), (1.0, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * torch.tensor([self.scales[self.training], 1.0, 1.0, 1.0])


class Counted(nn.Module):
    """Counts calls of training, in a buffer that the loss may read: the next micro-batch then has another loss."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self.layer, self.is_read = nn.Linear(4, 4), is_read
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * (self.count.clone() if self.is_read else 1.0)
        if self.training:
            self.count.add_(1)
        return out


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"]).masked_fill(batch["x"] < 0, float("nan"))
    return out.square().sum(), {"seen": out.sum()}


def without_metric(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """In evaluation mode."""
    found, metrics = loss(model, batch)
    return found, metrics if model.training else {}


@pytest.mark.parametrize(
    ("model", "of", "same"),
    [
        (Moded(), loss, True),
        (Moded(nn.Dropout(0.0)), loss, True),
        (Moded(nn.Dropout(0.1)), loss, False),
        (Moded(nn.BatchNorm1d(4)), loss, False),
        (Moded(scale=2.0), loss, False),
        (Moded(), without_metric, False),
        (Counted(is_read=False), loss, True),
        (Counted(is_read=True), loss, False),
    ],
    ids=["plain", "no dropout", "dropout", "batch norm", "a constant", "a metric", "a count", "a count that is read"],
)
def test_which_models_evaluate_what_they_train(model, of, same):
    batch = {"x": torch.ones(3, 4)}
    trained = fxpar.capture(model.train(), of, batch)
    evaluated = fxpar.capture(model.eval(), of, batch, gradients=False)
    assert {out.kind for out in evaluated.outputs} <= {"loss", "buffer"}
    assert is_same_loss(evaluated, trained) is same
    assert is_same_loss(evaluated, evaluated)
