"""Small models of any depth, as `fxpar plan` prices them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpar import expert_mm, weighted_sum
from fxpar.cli.options import GraphSource
from fxpar.cli.shallow import Shallow
from fxpar.ir.graph import LogicalGraph
from fxpar.models.builtin import packed_lm_loss
from fxpar.models.depth import layer_option
from fxpar.passes.pack_documents import packed_if_proved
from fxpar.search.chosen import lowering
from fxpar.search.price import Depth
from fxpar.tracer import capture

DIM, HEADS = 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = F.scaled_dot_product_attention(q * turns, k * turns, v, is_causal=True)
        return self.o_proj(x.transpose(1, 2).flatten(2))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, 128), nn.Linear(128, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(x)))


class Mixture(nn.Module):
    """Each token through one of 8 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.empty(8, DIM, 128)), nn.Parameter(torch.empty(8, 128, DIM))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(1, -1)
        made = torch.tanh(expert_mm(flat[:, None], self.up, ids))
        return weighted_sum(expert_mm(made, self.down, ids), weights).view_as(x)


class Block(nn.Module):
    def __init__(self, ffn: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.ffn = Attention(), ffn()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(x, turns)
        return x + self.ffn(x)


class Stack(nn.Module):
    """Parts are called like those of `llama`, and like there all layers read what is made of the positions; with few
    nodes per layer, as deep models take their time to capture.
    """

    def __init__(self, layers: int, vocab: int, ffn: type[nn.Module] = Ffn) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocab, DIM), nn.ModuleList(Block(ffn) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocab, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x, turns = self.embedding(input_ids), torch.cos(position_ids)[:, None, :, None]
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


@functools.cache
def stack_rows(layers: int, vocab: int = 131, ffn: type[nn.Module] = Ffn) -> LogicalGraph:
    with torch.device("meta"):
        model, row = Stack(layers, vocab, ffn), torch.zeros(1, 61, dtype=torch.int64)
    batch = {"input_ids": row, "labels": row, "position_ids": row}
    return packed_if_proved(capture(model, packed_lm_loss, batch))[0]


@functools.cache
def shallow(model: str, layers: int) -> Any:
    """Rows of a model, lowered and outlined by depth: "stack", "mixture" (its layers have experts), or one that
    `fxpar plan` knows.
    """
    if model in ("stack", "mixture"):
        rows = functools.partial(stack_rows, ffn=Mixture) if model == "mixture" else stack_rows
        lower, outlines = lowering(rows)
        return SimpleNamespace(rows=rows, lower=lower, outlines=outlines, depth=Depth(layers))
    option = layer_option(model, {})
    assert option is not None
    return Shallow(GraphSource(model, world=8, options=(f"{option.name}={layers}",)))
