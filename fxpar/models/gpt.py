"""A plain GPT: learned positions, LayerNorm, one fused q, k, v projection, dropout, biases, tied head.

Built-in example `gpt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptOptions:
    """Sizes; `dropout` acts on the embeddings and on both branches of a block."""

    layers: int = 2
    dim: int = 64
    heads: int = field(default=4, metadata={"parts_of": "dim"})
    ffn: int = 200
    vocab: int = 131
    positions: int = 512
    dropout: float = 0.1
    tied: bool = True


class Attention(nn.Module):
    """Causal attention, [B, T, D] -> [B, T, D]; q, k and v come out of one matrix, in this order."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.qkv = nn.Linear(options.dim, 3 * options.dim)
        self.out = nn.Linear(options.dim, options.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(dim, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(options.dim)
        self.attention = Attention(options)
        self.norm_2 = nn.LayerNorm(options.dim)
        self.up = nn.Linear(options.dim, options.ffn)
        self.down = nn.Linear(options.ffn, options.dim)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Gpt(nn.Module):
    """input_ids, position_ids [B, T] -> logits [B, T, V]."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.vocab, options.dim)
        self.positions = nn.Embedding(options.positions, options.dim)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.dim)
        self.head = nn.Linear(options.dim, options.vocab, bias=False)
        if options.tied:
            self.head.weight = self.embedding.weight
            torch.nn.init.normal_(self.embedding.weight, std=options.dim**-0.5)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(input_ids) + self.positions(position_ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
