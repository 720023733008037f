"""A small vision transformer: patches by a convolution, a class token, attention that is not causal.

Built-in example `vit`; its batch has a leading dim and no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VitOptions:
    """Sizes; images are [3, image, image], cut into squares of `patch`."""

    layers: int = 2
    dim: int = 64
    heads: int = field(default=4, metadata={"parts_of": "dim"})
    ffn: int = 88
    image: int = 16
    patch: int = 4
    classes: int = 11


class Attention(nn.Module):
    """Full attention, [B, S, D] -> [B, S, D]."""

    def __init__(self, options: VitOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.q = nn.Linear(options.dim, options.dim)
        self.k = nn.Linear(options.dim, options.dim)
        self.v = nn.Linear(options.dim, options.dim)
        self.out = nn.Linear(options.dim, options.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, options: VitOptions) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(options.dim)
        self.attention = Attention(options)
        self.norm_2 = nn.LayerNorm(options.dim)
        self.up = nn.Linear(options.dim, options.ffn)
        self.down = nn.Linear(options.ffn, options.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Vit(nn.Module):
    """pixel_values [B, 3, N, N] -> logits [B, classes]."""

    def __init__(self, options: VitOptions) -> None:
        super().__init__()
        count = (options.image // options.patch) ** 2
        self.patches = nn.Conv2d(3, options.dim, options.patch, stride=options.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, options.dim))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, options.dim))
        self.layers = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, options.classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))
