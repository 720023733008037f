"""Small models of the kinds that capture must know."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.E = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.E, bias=False)
        self.v = nn.Linear(width, kv_heads * self.E, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, self.E).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A Llama-like decoder with a rope table of 64 rows as a buffer."""

    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        vocab, width, positions = 61, 32, 64
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, 4, 2) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        angles = torch.outer(torch.arange(positions), 1e-2 ** (torch.arange(4) / 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        T = input_ids.shape[1]
        if position_ids is None:
            cos, sin = self.cos[:T], self.sin[:T]
        else:
            cos, sin = self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class MLP(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)


class ViT(nn.Module):
    """Patches by a convolution, a class token, LayerNorm, attention without order."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.layers(x)[:, 0])


class ConvNet(nn.Module):
    """Convolutions and batch norms, whose running statistics change."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, classes)
        self.last = nn.BatchNorm1d(classes, affine=False)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)), inplace=True)
        return self.last(self.head(self.pool(x).flatten(1)))
