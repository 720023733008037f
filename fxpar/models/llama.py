"""A plain Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head.

Built-in example `llama`. Nothing in it knows of fxpar: documents packed into a row come in through the loss function.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaOptions:
    """Sizes; `dim` = heads * head dim. `theta` is the base of the rotary frequencies."""

    layers: int = 2
    dim: int = 64
    heads: int = field(default=4, metadata={"parts_of": "dim", "times": 2})  # rotary positions are pairs
    kv_heads: int = field(default=2, metadata={"parts_of": "heads"})
    ffn: int = 88
    vocab: int = 131
    theta: float = 10_000.0
    eps: float = 1e-5
    tied: bool = False


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, statistics in at least fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [B, H, T, E]; cos and sin are [B, 1, T, E/2], pairs are (i, i + E/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Causal grouped-query attention, [B, T, D] -> [B, T, D]."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.head_dim = options.dim // options.heads
        narrow = options.kv_heads * self.head_dim
        self.q_proj = nn.Linear(options.dim, options.dim, bias=False)
        self.k_proj = nn.Linear(options.dim, narrow, bias=False)
        self.v_proj = nn.Linear(options.dim, narrow, bias=False)
        self.o_proj = nn.Linear(options.dim, options.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU, [B, T, D] -> [B, T, D]."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(options.dim, options.ffn, bias=False)
        self.up_proj = nn.Linear(options.dim, options.ffn, bias=False)
        self.down_proj = nn.Linear(options.ffn, options.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(options.dim, options.eps)
        self.attention = Attention(options)
        self.ffn_norm = RMSNorm(options.dim, options.eps)
        self.ffn = FeedForward(options)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """input_ids, position_ids [B, T] -> logits [B, T, V]."""

    inverse_frequencies: Tensor

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.vocab, options.dim)
        self.layers = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = RMSNorm(options.dim, options.eps)
        self.head = nn.Linear(options.dim, options.vocab, bias=False)
        if options.tied:
            self.head.weight = self.embedding.weight
        head_dim = options.dim // options.heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("inverse_frequencies", options.theta**-exponents, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        angles = position_ids[:, None, :, None] * self.inverse_frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
