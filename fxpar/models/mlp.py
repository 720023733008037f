"""A multi-layer perceptron on vectors, the smallest built-in example (`mlp`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MlpOptions:
    """Sizes: `inputs` -> `layers` hidden ones of `dim` -> `classes`."""

    layers: int = 2
    inputs: int = 24
    dim: int = 72
    classes: int = 7


class Mlp(nn.Module):
    """x [B, inputs] -> logits [B, classes]."""

    def __init__(self, options: MlpOptions) -> None:
        super().__init__()
        sizes = [options.inputs, *[options.dim] * options.layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], options.classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)
