"""The small language model of the step benchmarks, as plain torch modules: 2 layers, width 256, 2.08 M parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of the global batch of every step."""

    dim: int = 256
    heads: int = 4
    layers: int = 2
    vocab: int = 1024
    seq: int = 128
    batch: int = 8


TINY = Sizes(dim=32, vocab=64, seq=8, batch=4)  # to see that a benchmark runs


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.dim * 8 // 3 // 32 * 32
        self.w1 = nn.Linear(sizes.dim, hidden, bias=False)
        self.w3 = nn.Linear(sizes.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.attn, self.mlp = Attention(sizes), FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class LanguageModel(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.emb = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(sizes: Sizes) -> LanguageModel:
    """The same weights in every mode."""
    torch.manual_seed(0)
    return LanguageModel(sizes)


def make_tokens(sizes: Sizes) -> Tensor:
    """[batch, seq + 1] token ids, the global batch of every step."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq + 1), generator=generator)


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss as fxpar captures it: `batch` has ids and labels [B, T]."""
    from fxpar.losses import cross_entropy_sum

    return cross_entropy_sum(model(batch["ids"]), batch["labels"])
